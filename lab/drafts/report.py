"""The result for people."""

from collections.abc import Mapping
from typing import Any

from ssd_serve.bench.tables import text_table

_HEAD = ("device", "text", "T", "draft", "texts", "tokens/s", "tokens/round", "overlap", "against", "")


def table(result: Mapping[str, Any]) -> str:
    """A line of each way and of what it is compared with, and who is left out."""
    rows: list[tuple[object, ...]] = []
    for row in result["results"]:
        if not row["texts"]:
            continue
        name = " ".join(part for part in (row["engine"], row["way"], row["shape"]) if part)
        overlap = row.get("overlap")
        begin = (
            *(row["device"], row["kind"], f"{row['temperature']:g}", name, row["texts"]),
            *(f"{row['tokens_per_s']:.1f}", f"{row['tokens_per_round']:.2f}"),
            "" if overlap is None else f"{overlap:.0%}",
        )
        compared = [
            (other, f"{each['mean']:.2f} ({each['low']:.2f} to {each['high']:.2f}) {each['verdict']}")
            for other, each in row["ratios"].items()
            if each is not None
        ]
        rows += [(*begin, *each) for each in compared or [("", "")]]
    left_out = [f"{engine} is not measured: {why}" for engine, why in result.get("left_out", {}).items()]
    return "\n".join((text_table(_HEAD, rows), *left_out))
