"""The result of `python -m lab.calibration` as a Markdown table and as a reliability diagram in SVG.

Drawn by hand, with nothing but the standard library. Knows the shape of the result, not how it came about.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

import msgspec

from lab.calibration.figures import Reliability
from ssd_serve.bench.document import read_as

_HEAD = (
    "| T | source | nodes | guesses | happened | mean reach | calibration error | Brier | base rate's Brier "
    "| better by |"
)
_NODES = {
    "all": "all candidates",
    "likely": "of reach 0.05 or more",
    "verified": "verified by a round",
}
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Told apart without colour vision too (after Okabe and Ito), one for each source."""
_SIDE, _GUTTER, _TOP, _BOTTOM = 220, 52, 40, 76
_MIN_SHOWN = 20
"""A bin of fewer guesses is left out of the diagram: its share is chance."""


class Row(msgspec.Struct, frozen=True):
    """One temperature and source."""

    temperature: float
    source: str
    warm_up_tokens: int
    tokens: int
    all: Reliability
    likely: Reliability
    verified: Reliability


class _Result(msgspec.Struct, frozen=True):
    results: list[Row]
    time: str


def calibration_table(result: Mapping[str, object]) -> str:
    """One line for each temperature, source and kind of node."""
    found = _read(result)
    lines = [_HEAD, "|" + "---|" * 10]
    for row in found.results:
        kinds = {"all": row.all, "likely": row.likely, "verified": row.verified}
        lines += [_line(row, _NODES[name], figures) for name, figures in kinds.items()]
    tokens = min((row.tokens for row in found.results), default=0)
    warm = min((row.warm_up_tokens for row in found.results), default=0)
    lines.append(f"\nAt least {tokens} tokens each, after {warm} that only calibrated. Time is {found.time}.")
    return "\n".join(lines)


def draw(result: Mapping[str, object]) -> str:
    """A panel for each temperature: mean reach against the share that happened, by source, of all
    candidates."""
    rows = _read(result).results
    temperatures = list(dict.fromkeys(row.temperature for row in rows))
    sources = list(dict.fromkeys(row.source for row in rows))
    width = _GUTTER + (_SIDE + _GUTTER) * max(1, len(temperatures))
    height = _TOP + _SIDE + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for place, temperature in enumerate(temperatures):
        left = _GUTTER + place * (_SIDE + _GUTTER)
        parts += _axes(left, f"temperature {temperature:g}")
        for row in rows:
            if row.temperature == temperature:
                parts += _points(left, row.all.bins, _COLOURS[sources.index(row.source) % len(_COLOURS)])
    for place, source in enumerate(sources):
        x, y = _GUTTER + 200 * place, height - 14
        colour = _COLOURS[place % len(_COLOURS)]
        parts.append(f'<circle cx="{x + 6}" cy="{y - 4}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="{y}">{escape(source)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _read(result: Mapping[str, object]) -> _Result:
    return read_as(_Result, result, "python -m lab.calibration")


def _line(row: Row, nodes: str, figures: Reliability) -> str:
    cells = (
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
    return "| " + " | ".join(cells) + " |"


def _axes(left: float, title: str) -> list[str]:
    bottom, right = _TOP + _SIDE, left + _SIDE
    parts = [
        f'<text x="{left}" y="{_TOP - 14}" font-weight="bold">{escape(title)}</text>',
        f'<line x1="{left}" y1="{bottom}" x2="{right}" y2="{_TOP}" stroke="#999" stroke-dasharray="4 4"/>',
        f'<rect x="{left}" y="{_TOP}" width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#bbb"/>',
        f'<text x="{left + _SIDE / 2}" y="{bottom + 36}" text-anchor="middle">reach (up: happened)</text>',
    ]
    for tick in (0.0, 0.5, 1.0):
        x, y = _place(left, tick, tick)
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    return parts


def _points(left: float, bins: Sequence[tuple[float, float, int]], colour: str) -> list[str]:
    """A dot for each bin; its bar spans two standard errors of the share, as if guesses were independent."""
    parts: list[str] = []
    for reach, share, count in bins:
        if count < _MIN_SHOWN:
            continue
        spread = 2 * math.sqrt(max(share * (1 - share), 1e-4) / count)
        x, y = _place(left, reach, share)
        _, low = _place(left, reach, max(0.0, share - spread))
        _, high = _place(left, reach, min(1.0, share + spread))
        parts.append(f'<line x1="{x}" y1="{low}" x2="{x}" y2="{high}" stroke="{colour}"/>')
        parts.append(
            f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}">'
            f"<title>reach {reach:.3f}, happened {share:.3f}, {count} guesses</title></circle>"
        )
    return parts


def _place(left: float, reach: float, share: float) -> tuple[float, float]:
    return round(left + reach * _SIDE, 1), round(_TOP + (1 - share) * _SIDE, 1)
