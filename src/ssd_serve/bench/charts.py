"""Charts as SVG by matplotlib: the same bytes for the same figures. Knows no result.

Imported late: matplotlib is in the extra `bench`.
"""

from io import StringIO

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Told apart without colour vision too (after Okabe and Ito)."""
_NO_ORIGIN: dict[str, None] = {"Date": None, "Creator": None}


def panels(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of `count` diagrams side by side, at least one; its size is in hundreds of pixels."""
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    axes = [figure.add_subplot(1, max(1, count), place + 1) for place in range(max(1, count))]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def legend(figure: Figure, columns: int = 4) -> None:
    """Name what has a label, each once, below the diagrams."""
    found = [each.get_legend_handles_labels() for each in figure.axes]
    named = {
        str(name): handle for handles, names in found for handle, name in zip(handles, names, strict=True)
    }
    figure.legend(
        named.values(), named.keys(), loc="outside lower left", ncols=columns, frameon=False, fontsize=9
    )


def as_svg(figure: Figure) -> str:
    """Text stays text, in the reader's own font."""
    file = StringIO()
    with rc_context({"svg.hashsalt": "ssd-serve", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata=_NO_ORIGIN)
    return file.getvalue()
