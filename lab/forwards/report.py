"""Measured forwards beside those of the device table. Knows the shape of results only."""

from collections.abc import Mapping
from typing import Any

from ssd_serve.bench.tables import markdown_table


def table(result: Mapping[str, Any]) -> str:
    """For each model, backend and way to launch a line for each row count: measured, and said, by context."""
    rows = result["results"]
    contexts = sorted({row["context"] for row in rows})
    found = {
        (row["model"], row["attention"], row["captured"], row["rows"], row["context"]): row for row in rows
    }
    head = (
        *("model", "attention", "launched", "rows"),
        *(f"after {context:,}: ms (table)" for context in contexts),
    )
    lines = [
        (
            *(model, attention, "as a graph" if captured else "one by one", count),
            *(_cell(found.get((model, attention, captured, count, context))) for context in contexts),
        )
        for model, attention, captured, count in dict.fromkeys(key[:4] for key in found)
    ]
    return (
        f"{markdown_table(head, lines)}\n\n{result['hardware']['gpus'][0]}; a copy moves "
        f"{result['copied_gb_per_s']:,} GB/s, the data sheet of {result['sheet']} says "
        f"{result['sheet_gb_per_s']:,}."
    )


def _cell(row: Mapping[str, Any] | None) -> str:
    return "" if row is None else f"{row['ms']:.2f} ({row['said_ms']:.2f})"
