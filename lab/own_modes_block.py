"""What the comparisons with other engines say of our own modes beside one another. Knows their results' rows.

A result keeps no single answers: of each mode it has the speeds of its launches, over the same prompts.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lab.page_blocks import ratio
from ssd_serve.bench.peers.ways import OURS
from ssd_serve.bench.statistics import ratio_interval
from ssd_serve.bench.tables import markdown_table

Row = Mapping[str, Any]

_AGAINST = ("sd", "ssd", "ar")


def own_modes(*results: Mapping[str, Any]) -> str:
    """A line for each number format and temperature: how many times as fast `auto` is as each other mode."""
    lines: list[tuple[str, ...]] = []
    for result in results:
        ours = [row for row in result["results"] if row["engine"] == OURS]
        for dtype, temperature in dict.fromkeys((row["dtype"], row["temperature"]) for row in ours):
            modes = {
                row["mode"]: row for row in ours if (row["dtype"], row["temperature"]) == (dtype, temperature)
            }
            cells = (cell for mode in _AGAINST for cell in _compared(modes.get("auto"), modes.get(mode)))
            lines.append((dtype, f"{temperature:g}", *cells))
    head = (
        "weights",
        "T",
        *(title for mode in _AGAINST for title in (f"`auto` against `{mode}`", "that is")),
    )
    return f"{markdown_table(head, lines)}\n\n{_TOLD}"


_TOLD = (
    "Whole requests, of the results above: geometric means of the launches' speeds and their 95 % interval, "
    "which counts what differs between launches, and not between prompts."
)


def _compared(auto: Row | None, other: Row | None) -> tuple[str, str]:
    if auto is None or other is None:
        return ("not measured", "")
    if auto["answers"] != other["answers"]:
        return ("not the same prompts", "")
    pairs = zip(auto["launches"], other["launches"], strict=True)
    interval = ratio_interval([mine / theirs for mine, theirs in pairs])
    if interval is None:
        return ("one launch", "")
    return ratio(asdict(interval)), str(interval.verdict)
