"""The load benchmark's plot: throughput and time per token by concurrency, a line for each mode.

Knows rows of numbers, not how they came about.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from ssd_serve.bench.charts import legend, panels

_COLOURS = {"ar": "#7f7f7f", "sd": "#e69f00", "ssd": "#0072b2", "auto": "#d55e00"}
"""Told apart without colour vision too (after Okabe and Ito); others are black."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram: a title and for each mode its points (concurrency, value)."""

    title: str
    lines: Mapping[str, Sequence[tuple[int, float]]]


def plot(content: Sequence[Panel]) -> Figure:
    """Panels side by side with one legend. Concurrencies are at least 1, values not negative."""
    figure, axes = panels(len(content), 8.6, 4.0)
    for each, panel in zip(axes, content, strict=True):
        for mode, line in panel.lines.items():
            at, values = zip(*sorted(line), strict=True)
            each.plot(at, values, label=mode, linestyle=_dash(mode), color=_colour(mode), marker="o", ms=4)
        each.set_title(panel.title, loc="left", fontsize=11, fontweight="bold")
        each.set_xscale("log", base=2)
        marks = sorted({at for line in panel.lines.values() for at, _ in line})
        each.set_xticks(marks, [str(mark) for mark in marks])
        each.set_xlabel("requests at once")
        each.set_ylim(bottom=0)
        each.grid(axis="y", color="#e5e5e5")
    legend(figure)
    return figure


def _dash(mode: str) -> str:
    """A mode on more devices has its colour and dots."""
    return "--" if mode == "auto" else "-" if mode in _COLOURS else ":"


def _colour(mode: str) -> str:
    return _COLOURS.get(mode.partition("-")[0], "#000000")
