"""A result of `ssd bench peers` as a bar chart. Knows the result, not how it was measured."""

from collections.abc import Mapping
from statistics import median

from matplotlib.figure import Figure

from ssd_serve.bench.charts import as_svg
from ssd_serve.bench.peers.result import Row, read
from ssd_serve.bench.peers.ways import BF16, OURS

_OUR_COLOUR, _PEER_COLOUR, _WHISKER = "#3fa37c", "#a9b1bc", "#1f2328"
_BAR, _REST = 0.25, 0.55
"""Inches: of a bar, and of what stands above the bars of a group, and around all."""


def bar_chart(result: Mapping[str, object]) -> str:
    """The chart as SVG."""
    return as_svg(plot(result))


def plot(result: Mapping[str, object]) -> Figure:
    """One bar a way, grouped by weights and temperature; whiskers from the slowest to the fastest launch."""
    found = read(result)
    groups: dict[tuple[bool, float], list[Row]] = {}
    for row in sorted(found.results, key=lambda row: (row.group, median(row.launches))):
        groups.setdefault(row.group, []).append(row)
    bars = [len(rows) for rows in groups.values()] or [1]
    figure = Figure(figsize=(9.2, _BAR * sum(bars) + _REST * (len(bars) + 1)), layout="constrained")
    title = f"Whole requests: tokens/s with the first token, {found.plan.cores} cores in all"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    machine = f"{found.hardware.get('cpu')}; whiskers: slowest and fastest of {found.plan.launches} launches"
    figure.supxlabel(machine, x=0.01, ha="left", fontsize=10)
    axes = figure.subplots(len(bars), 1, sharex=True, squeeze=False, height_ratios=bars)[:, 0]
    for each, ((eight_bits, temperature), rows) in zip(axes, groups.items(), strict=False):
        speeds = [median(row.launches) for row in rows]
        spread = [
            [speed - min(row.launches) for speed, row in zip(speeds, rows, strict=True)],
            [max(row.launches) - speed for speed, row in zip(speeds, rows, strict=True)],
        ]
        colours = [_OUR_COLOUR if row.engine == OURS else _PEER_COLOUR for row in rows]
        drawn = each.barh(
            [_name(row) for row in rows], speeds, 0.7, xerr=spread, color=colours, ecolor=_WHISKER, capsize=3
        )
        each.bar_label(drawn, fmt="%.1f", padding=4, fontsize=10)
        weights = "weights of 8 bits" if eight_bits else BF16
        each.set_title(f"temperature {temperature:g}, {weights}", loc="left", fontsize=10, fontweight="bold")
        each.spines[:].set_visible(False)
        each.tick_params(bottom=False, labelbottom=False, left=False)
        each.set_ylim(-0.6, len(rows) - 0.4)
        each.margins(x=0.1)
    return figure


def _name(row: Row) -> str:
    return row.name if row.dtype == BF16 else f"{row.name}, {row.weights}"
