"""The history of a training as a picture: loss on one side, agreement with the target on the other.

Knows the records of `training.run`; needs matplotlib, of the extra `bench`, and is imported late.
"""

from collections.abc import Mapping, Sequence
from io import StringIO

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_NO_ORIGIN: dict[str, None] = {"Date": None, "Creator": None}
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""Told apart without colour vision too (after Okabe and Ito)."""


def curve(history: Sequence[Mapping[str, float]]) -> str:
    """SVG of everything in the history that is a loss or an agreement, by millions of tokens seen."""
    figure = Figure(figsize=(8.6, 3.6), dpi=100, layout="constrained")
    for place, (word, label) in enumerate((("loss", "nats a token"), ("agreement", "share of places")), 1):
        axes = figure.add_subplot(1, 2, place)
        names = sorted({name for record in history for name in record if word in name})
        for name, colour in zip(names, _COLOURS * len(names), strict=False):
            _line(axes, history, name, colour)
        axes.set_title(word, loc="left", fontsize=11, fontweight="bold")
        axes.set_xlabel("million tokens seen")
        axes.set_ylabel(label)
        axes.grid(axis="y", color="#e5e5e5")
        axes.spines[["top", "right"]].set_visible(False)
        if names:
            axes.legend(frameon=False, fontsize=8)
    return _svg(figure)


def _line(axes: Axes, history: Sequence[Mapping[str, float]], name: str, colour: str) -> None:
    known = [(record["tokens"] / 1e6, record[name]) for record in history if name in record]
    axes.plot(*zip(*known, strict=True), label=name.replace("_", " "), color=colour, marker="o", markersize=2)


def _svg(figure: Figure) -> str:
    """Text stays text, and the same history gives the same bytes."""
    file = StringIO()
    with rc_context({"svg.hashsalt": "ssd-serve", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata=_NO_ORIGIN)
    return file.getvalue()
