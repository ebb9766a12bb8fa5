"""The result of `python -m lab.calibration` as a Markdown table. Knows its shape, not how it came about."""

from collections.abc import Mapping

import msgspec

from lab.calibration.figures import Reliability
from ssd_serve.bench.document import read_as
from ssd_serve.bench.tables import markdown_table

_HEAD = (
    *("T", "source", "nodes", "guesses", "happened", "mean reach", "calibration error", "Brier"),
    *("base rate's Brier", "better by"),
)
_NODES = {
    "all": "all candidates",
    "likely": "of reach 0.05 or more",
    "verified": "verified by a round",
}


class CalibrationRow(msgspec.Struct, frozen=True):
    """One temperature and source."""

    temperature: float
    source: str
    warm_up_tokens: int
    tokens: int
    all: Reliability
    likely: Reliability
    verified: Reliability


class _Result(msgspec.Struct, frozen=True):
    results: list[CalibrationRow]
    time: str


def calibration_table(result: Mapping[str, object]) -> str:
    """One line for each temperature, source and kind of node."""
    found = read(result)
    cells = [
        _cells(row, _NODES[name], figures)
        for row in found.results
        for name, figures in (("all", row.all), ("likely", row.likely), ("verified", row.verified))
    ]
    tokens = min((row.tokens for row in found.results), default=0)
    warm = min((row.warm_up_tokens for row in found.results), default=0)
    told = f"At least {tokens} tokens each, after {warm} that only calibrated. Time is {found.time}."
    return f"{markdown_table(_HEAD, cells)}\n\n{told}"


def read(result: Mapping[str, object]) -> _Result:
    """The result as its type."""
    return read_as(_Result, result, "python -m lab.calibration")


def _cells(row: CalibrationRow, nodes: str, figures: Reliability) -> tuple[str, ...]:
    return (
        f"{row.temperature:g}",
        row.source,
        nodes,
        str(figures.count),
        f"{figures.happened:.3f}",
        f"{figures.predicted:.3f}",
        f"{figures.expected_calibration_error:.4f}",
        f"{figures.brier:.4f}",
        f"{figures.base_brier:.4f}",
        f"{figures.gain:.0%}",
    )
