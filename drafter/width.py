"""How many nodes a draft step expands: as many as the device computes for nearly the price of a few.

Knows step times, not trees.
"""

from collections.abc import Mapping

_TOLERANCE = 1.35
"""A step may cost this much more than a narrow one: a wide step grows more, but its growth arrives later."""


def widths_to_measure(most: int) -> list[int]:
    """Widths worth measuring, at most `most`: powers of two from 4, and `most` itself."""
    widths = [width for width in (4, 8, 16, 32, 64, 128, 256) if width < most]
    return [*widths, most]


def choose_width(seconds: Mapping[int, float]) -> int:
    """The widest of the measured widths whose step is at most 1.35 times as long as the narrowest's."""
    narrowest = seconds[min(seconds)]
    return max(width for width, step_s in seconds.items() if step_s <= _TOLERANCE * narrowest)
