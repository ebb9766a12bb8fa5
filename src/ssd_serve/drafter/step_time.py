"""Times of draft steps: the average sent to verifiers, and the width that they allow.

A step expands as many nodes as the device computes for little more than the price of a few. Times are
measured at start, on CPUs expected, and updated live, since other work on the device changes what a wide step costs.
"""

from collections.abc import Mapping

from ssd_serve.base.cost import CostTable, Timing

_BLEND = 0.1
_MAX_RATIO = 4.0
"""Longer steps on a busy machine count as this multiple of the average."""


class StepTime:
    """A running average, which starts at a measured value; 0: unknown."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def observe(self, seconds: float) -> None:
        """Add the time of a step, host time included."""
        if not self.seconds:
            self.seconds = seconds
        self.seconds += _BLEND * (min(seconds, _MAX_RATIO * self.seconds) - self.seconds)


_TOLERANCE = 1.35
"""Cost of a step relative to the narrowest one at most: a wide step grows more, but later."""
_OBSERVE_EVERY, _UPDATE_EVERY = 3, 64


def widths_to_measure(most: int) -> list[int]:
    """Widths to measure: powers of two from 4 below `most`, and `most`."""
    widths = [width for width in (4, 8, 16, 32, 64, 128, 256) if width < most]
    return [*widths, most]


def choose_width(seconds: Mapping[int, float]) -> int:
    """Return the largest width with a step time of at most 1.35 times that of the narrowest."""
    narrowest = seconds[min(seconds)]
    return max(width for width, step_s in seconds.items() if step_s <= _TOLERANCE * narrowest)


class LiveWidth:
    """The largest number of nodes of the next step, from step times by width, measured and updated."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._cost = CostTable([Timing(width, 0, each) for width, each in seconds.items()])
        self._widths = tuple(seconds)
        self._steps = 0
        self.width = choose_width(seconds)

    def observe(self, nodes: int, seconds: float) -> None:
        """Add the time of a step that expanded `nodes` nodes, host time included. Every third counts."""
        self._steps += 1
        if self._steps % _OBSERVE_EVERY:
            return
        self._cost.observe(nodes, seconds)
        if self._steps % (_OBSERVE_EVERY * _UPDATE_EVERY) == 0:
            self.width = choose_width({width: self._cost.seconds(width) for width in self._widths})
