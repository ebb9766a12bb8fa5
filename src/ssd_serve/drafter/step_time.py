"""What a draft step takes, as drafters tell it to verifiers. Knows no steps, only their seconds."""

from collections.abc import Mapping
from typing import Protocol

from ssd_serve.base.cost import CostTable, Timing

_BLEND = 0.1
_MAX_RATIO = 4.0
"""A step that a busy machine stretched further counts as stretched so far."""


class StepTime:
    """A running average. `seconds`: what a step took at start; 0: unknown."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def observe(self, seconds: float) -> None:
        """A step took `seconds`, host time included."""
        if not self.seconds:
            self.seconds = seconds
        self.seconds += _BLEND * (min(seconds, _MAX_RATIO * self.seconds) - self.seconds)


_TOLERANCE = 1.35
"""A step may cost this much more than a narrow one: a wide step grows more, but its growth arrives later."""
_LOOK_EVERY = 64


class StepWidth(Protocol):
    """Chooses how many nodes the next step expands at most."""

    width: int

    def observe(self, nodes: int, seconds: float) -> None:
        """A step that expanded `nodes` nodes took so long, host time included."""
        ...


def widths_to_measure(most: int) -> list[int]:
    """Widths worth measuring, at most `most`: powers of two from 4, and `most` itself."""
    widths = [width for width in (4, 8, 16, 32, 64, 128, 256) if width < most]
    return [*widths, most]


def choose_width(seconds: Mapping[int, float]) -> int:
    """The widest of the measured widths whose step is at most 1.35 times as long as the narrowest's."""
    narrowest = seconds[min(seconds)]
    return max(width for width, step_s in seconds.items() if step_s <= _TOLERANCE * narrowest)


class LiveWidth:
    """The width of the next step. `seconds`: what steps of some widths took at start."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._cost = CostTable([Timing(width, 0, each) for width, each in seconds.items()])
        self._widths = tuple(seconds)
        self._steps = 0
        self.width = choose_width(seconds)

    def observe(self, nodes: int, seconds: float) -> None:
        self._cost.observe(nodes, seconds)
        self._steps += 1
        if self._steps % _LOOK_EVERY == 0:
            self.width = choose_width({width: self._cost.seconds(width) for width in self._widths})
