"""The load benchmark's plot: throughput and time per token by concurrency, a line for each mode, as SVG.

Drawn by hand, with nothing but the standard library. Knows rows of numbers, not how they came about.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_COLOURS = {
    "ar": "#7f7f7f",
    "sd": "#e69f00",
    "ssd": "#0072b2",
    "auto": "#d55e00",
}
"""Told apart without colour vision too (after Okabe and Ito); others are black."""
_DASH, _AUTO_DASH = "2 3", "7 4"
_WIDTH, _HEIGHT = 860, 404
_TOP, _BOTTOM, _GUTTER = 44, 108, 64
_LEGEND = 4
_PANEL = (_WIDTH - 2 * _GUTTER - 24) / 2
_MAX_TICKS = 6


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram: a title and for each mode its points (concurrency, value)."""

    title: str
    lines: Mapping[str, Sequence[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where a panel lies, and how values become places. x grows by doublings, y from zero."""

    left: float
    concurrencies: tuple[int, ...]
    top_value: float

    def x(self, concurrency: int) -> float:
        low, high = math.log2(self.concurrencies[0]), math.log2(self.concurrencies[-1])
        share = (math.log2(concurrency) - low) / (high - low) if high > low else 0.5
        return round(self.left + 12 + share * (_PANEL - 24), 1)

    def y(self, value: float) -> float:
        return round(_HEIGHT - _BOTTOM - value / self.top_value * (_HEIGHT - _TOP - _BOTTOM), 1)


def draw(panels: Sequence[Panel]) -> str:
    """Up to two panels side by side with one legend. Concurrencies are at least 1, values not negative."""
    modes = list(dict.fromkeys(mode for panel in panels for mode in panel.lines))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
    ]
    for index, panel in enumerate(panels):
        parts += _panel(panel, _GUTTER + index * (_PANEL + _GUTTER))
    for index, mode in enumerate(modes):
        x, y = _GUTTER + 12 + index % _LEGEND * 180, _HEIGHT - 38 + index // _LEGEND * 20
        parts.append(f'<line x1="{x}" y1="{y - 4}" x2="{x + 26}" y2="{y - 4}" {_stroke(mode)}/>')
        parts.append(f'<text x="{x + 32}" y="{y}">{escape(mode)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def nice_step(value: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is not below `value` (which is positive)."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= value * (1 - 1e-9))


def _panel(panel: Panel, left: float) -> list[str]:
    points = [point for line in panel.lines.values() for point in line]
    if not points:
        return []
    highest = max(value for _, value in points)
    step = nice_step(highest / _MAX_TICKS or 1.0)
    ticks = max(1, math.ceil(highest / step))
    frame = _Frame(left, tuple(sorted({each for each, _ in points})), step * ticks)
    parts = [f'<text x="{left}" y="{_TOP - 20}" font-weight="bold">{escape(panel.title)}</text>']
    for tick in range(ticks + 1):
        y = frame.y(tick * step)
        parts.append(f'<line x1="{left}" y1="{y}" x2="{left + _PANEL}" y2="{y}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{tick * step:g}</text>')
    for concurrency in frame.concurrencies:
        x, y = frame.x(concurrency), _HEIGHT - _BOTTOM + 18
        parts.append(f'<text x="{x}" y="{y}" text-anchor="middle">{concurrency}</text>')
    middle = left + _PANEL / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 70}" text-anchor="middle">requests at once</text>')
    for mode, line in panel.lines.items():
        places = [(frame.x(concurrency), frame.y(value)) for concurrency, value in sorted(line)]
        path = " ".join(f"{x},{y}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" {_stroke(mode)}/>')
        colour = _colour(mode)
        parts += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in places]
    return parts


def _stroke(mode: str) -> str:
    """A mode on more devices has its colour and dots."""
    dash = "" if mode in _COLOURS else _DASH
    dash = _AUTO_DASH if mode == "auto" else dash
    return f'stroke="{_colour(mode)}" stroke-width="2"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _colour(mode: str) -> str:
    return _COLOURS.get(mode.partition("-")[0], "#000")
