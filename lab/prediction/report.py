"""The result of `python -m lab.prediction` as Markdown. Knows its shape, not how it came about."""

from collections.abc import Mapping, Sequence
from typing import Any

from ssd_serve.bench.tables import markdown_table

Json = Mapping[str, Any]
_WAYS = {"plain": "plain", "chain": "chain of 6, in turns", "table": "table of outcomes, beside"}


def prediction_tables(result: Json) -> str:
    """Published against computed, what assumed constants do to it, and this engine on the same devices."""
    parts = [_figures(result["readings"]), _assumed(result["if"])]
    return "\n\n".join([*parts, *(_engine(each) for each in result["readings"] if "engine" in each)])


def _figures(readings: Sequence[Json]) -> str:
    head = ("way", "devices", "published tokens/s", *(f"computed: {each['name']}" for each in readings))
    columns = [each["figures"] for each in readings]
    rows = [
        (
            _WAYS[row[0]["mode"]],
            f"{row[0]['devices']} {row[0]['device']}",
            f"{row[0]['published']:g}",
            *(_computed(each) for each in row),
        )
        for row in zip(*columns, strict=True)
    ]
    return markdown_table(head, rows)


def _computed(figure: Json) -> str:
    how = "fitted" if figure["fitted"] else f"{100 * figure['error']:+.1f} %"
    return f"{figure['computed']:.1f} ({how})"


def _assumed(rows: Sequence[Mapping[str, object]]) -> str:
    head = tuple(rows[0])
    return markdown_table(head, [tuple(str(row[key]) for key in head) for row in rows])


def _engine(reading: Json) -> str:
    head = (
        f"{reading['name']}; host of a draft step",
        "way",
        "devices",
        "tokens/s",
        "a device",
        "tokens a round",
        "nodes a draft step",
    )
    rows = [
        (
            f"{entry['draft_host_ms']:g} ms, {entry['host']}",
            way["way"],
            str(way["devices"]),
            f"{way['tokens_per_s']:.1f}",
            f"{way['tokens_per_s_a_device']:.1f}",
            f"{way['tokens_per_round']:.2f}",
            str(way.get("width", "")),
        )
        for entry in reading["engine"]
        for way in entry["ways"]
    ]
    return markdown_table(head, rows)
