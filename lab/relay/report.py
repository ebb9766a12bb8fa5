"""What `python -m lab.relay` has measured, for a terminal and for a document."""

from collections.abc import Mapping
from statistics import median
from typing import Any

from ssd_serve.bench.tables import markdown_table, text_table

_HEAD = ("what", "median")
_TOLD = {
    "hub_us_a_report": "the server process hands on a report to a worker, us",
    "decode_us": "a token becomes text, us",
    "hop_us": "a hop to a thread and back to the event loop, us",
    "two_threads_gain": "two threads decode so much more than one, times",
}


def _rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(text, f"{median(result[name]):.2f}") for name, text in _TOLD.items()]


def table(result: Mapping[str, Any]) -> str:
    """As text."""
    return text_table(_HEAD, _rows(result))


def relay_table(result: Mapping[str, Any]) -> str:
    """As Markdown."""
    return markdown_table(_HEAD, _rows(result))
