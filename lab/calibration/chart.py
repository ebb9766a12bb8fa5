"""The reliability diagram of `python -m lab.calibration`. Knows the result, not how it came about."""

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.calibration.report import CalibrationRow, read
from ssd_serve.bench.charts import COLOURS, legend, panels

MIN_SHOWN = 20
"""A bin of fewer guesses is left out: its share is chance."""


def plot(result: Mapping[str, object]) -> Figure:
    """A diagram for each temperature: mean reach against the share that happened, by source, of all
    candidates."""
    rows = read(result).results
    temperatures = list(dict.fromkeys(row.temperature for row in rows))
    sources = list(dict.fromkeys(row.source for row in rows))
    figure, axes = panels(len(temperatures), 0.5 + 2.7 * max(1, len(temperatures)), 3.4)
    for each, temperature in zip(axes, temperatures, strict=False):
        each.plot([0, 1], [0, 1], color="#999999", linestyle="--", linewidth=1)
        each.set_title(f"temperature {temperature:g}", loc="left", fontsize=11, fontweight="bold")
        each.set_xlabel("reach")
        each.set_ylabel("happened")
        each.set_aspect("equal")
        for row in rows:
            if row.temperature == temperature:
                _points(each, row, COLOURS[sources.index(row.source) % len(COLOURS)])
    legend(figure)
    return figure


def _points(axes: Axes, row: CalibrationRow, colour: str) -> None:
    """A dot for each bin; its bar spans two standard errors of the share, as if guesses were independent."""
    shown = [(reach, share, count) for reach, share, count in row.all.bins if count >= MIN_SHOWN]
    spreads = [2 * (max(share * (1 - share), 1e-4) / count) ** 0.5 for _, share, count in shown]
    shares = [share for _, share, _ in shown]
    bars = (
        [min(share, spread) for share, spread in zip(shares, spreads, strict=True)],
        [min(1 - share, spread) for share, spread in zip(shares, spreads, strict=True)],
    )
    reaches = [reach for reach, _, _ in shown]
    axes.errorbar(reaches, shares, bars, fmt="o", color=colour, markersize=5, label=row.source)
