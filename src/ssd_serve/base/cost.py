"""The measured cost model: seconds of a forward by its rows and contexts, and of the host's work.

It uses numpy only and depends on no models or trees.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from statistics import median

import numpy as np
import numpy.typing as npt

POINTS = (
    *range(1, 8),
    *range(8, 16, 2),
    *range(16, 32, 4),
    32,
    40,
    48,
    64,
    96,
    128,
    192,
    256,
    384,
    512,
    1024,
)
MAX_ROWS = POINTS[-1]
_LEVEL_BLEND = 0.05
_LOCAL_BLEND = 0.1
_READ_BLEND = 0.1
_LOCAL_DECAY = 0.998
_MAX_OFF = 2.0
FIRST_ROUNDS = 8
"""Live rounds whose median is the level of a table of expected times."""
_HOST_MEMORY = 0.995
_HOST_SLACK_S = 0.5e-3
_HOST_EVERY = 64
_HOST_HELD = (1.0, 30.0, 10_000.0)
"""Strength of each weight's prior, as the sum of squares of its input."""

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Timing:
    """A forward of `rows` rows of one request after `context` tokens took `seconds`."""

    rows: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Reading:
    """KV that attention reads in a forward: `context` tokens over all requests, `row_context` over all
    rows."""

    context: int = 0
    row_context: int = 0


class CostTable:
    """`T(rows, context)`: a shape measured at start, with a level that follows live rounds.

    The shape is a time by rows, never falling, linear between its points, plus a time for each token of
    context that a request and a row read. Live rounds move the level of
    all points, and that of their own rows slightly more. So the shape stays consistent when rounds visit only
    some points, and outliers decay. The cost of context has its own level, updated by its share in a round:
    measured at start on a busy machine, it can be ten times too high.
    """

    def __init__(
        self, timings: Sequence[Timing] = (), prior_s: float = 0.02, *, first_rounds: int | None = None
    ) -> None:
        """`first_rounds`: the number of first live rounds whose median is the table's level, where `timings`
        were not measured on this machine just now."""
        self._points = np.asarray(POINTS, dtype=np.float64)
        self._context_s, self._row_context_s = _context_costs(timings)
        # Lists: in most rounds one row count is asked for, and cold numpy calls would take longer.
        self._shape: list[float] = _shape(timings, self._context_s, self._row_context_s, prior_s).tolist()
        self._local = [1.0] * len(POINTS)
        self._level = 1.0
        self._read_level = 1.0
        self.rounds = 0
        """Live rounds observed."""
        self.same_source: Sequence[CostTable] = ()
        """Tables whose timings come from the same source: they share an error of the level."""
        self._first_rounds = (0 if timings else 1) if first_rounds is None else first_rounds
        self._first_ratios: list[float] = []

    def span(
        self, first: int, last: int, reading: Reading | None = None, each: float = 0.0, live: bool = True
    ) -> FloatArray:
        """Seconds of forwards of `first` to `last` rows: [last - first + 1]; no rows take no time.

        `reading` is that of the first; every further row reads `each` tokens. Without `live`, later observations
        do not count, as in `first_seconds`.
        """
        reading = reading or Reading()
        rows = np.arange(first, last + 1, dtype=np.float64)
        shape = np.array(self._shape)
        values = np.maximum.accumulate(shape * self._local) if live else shape
        seconds = np.interp(rows, self._points, values)
        if last > MAX_ROWS:
            seconds *= np.maximum(rows / MAX_ROWS, 1.0)
        read_s = self._read_s(reading) + self._row_context_s * each * (rows - first)
        seconds = self._level * (seconds + self._read_level * read_s) if live else seconds + read_s
        if first <= 0:
            seconds[rows <= 0] = 0.0
        return seconds

    def timings(self) -> list[Timing]:
        """The table as timings, live rounds included: from them it can be made again."""
        short, long = 0, 1024
        return [
            Timing(rows, context, self.seconds(rows, Reading(context, rows * context)))
            for rows in POINTS
            for context in ((short, long) if rows in (1, 8, 32) else (short,))
        ]

    def seconds(self, rows: int, reading: Reading | None = None) -> float:
        """Seconds of a forward of `rows` rows."""
        if rows > MAX_ROWS:
            return float(self.span(rows, rows, reading)[0])
        if rows <= 0:
            return 0.0
        index = bisect_left(POINTS, rows)
        below_s = max(map(mul, self._shape[:index], self._local[:index]), default=0.0)
        row_s = max(below_s, self._shape[index] * self._local[index])
        if POINTS[index] > rows:
            below = POINTS[index - 1]
            row_s -= (row_s - below_s) * (POINTS[index] - rows) / (POINTS[index] - below)
        return self._level * (row_s + self._read_level * self._read_s(reading or Reading()))

    def first_seconds(self, rows: int, reading: Reading) -> float:
        """`seconds` as measured at start, without later observations: a unit that does not drift."""
        return float(np.interp(rows, self._points, self._shape)) + self._read_s(reading)

    def observe(self, rows: int, seconds: float, reading: Reading | None = None) -> None:
        """Update the table: a forward of `rows` rows took `seconds`."""
        if not 0 < rows <= MAX_ROWS or seconds <= 0:
            return
        expected_s = self.seconds(rows, reading)
        ratio = seconds / expected_s
        self.rounds += 1
        if self.rounds <= self._first_rounds:
            self._first_ratios.append(self._level * ratio)
            self._level = median(self._first_ratios)  # the very first rounds are slow
            if 1 < self.rounds == self._first_rounds:
                # The level of the first rounds belongs to the table's start: `first_seconds` has it, too.
                for table in (self, *(each for each in self.same_source if not each.rounds)):
                    table.scale(self._level)
                self._level = 1.0
            return
        # A descheduled process is not a slow device.
        ratio = min(max(ratio, 1 / _MAX_OFF), _MAX_OFF)
        index = bisect_left(POINTS, rows)
        if index and rows - POINTS[index - 1] < POINTS[index] - rows:
            index -= 1
        share = self._level * self._read_level * self._read_s(reading or Reading()) / expected_s
        self._level *= ratio ** (_LEVEL_BLEND * (1 - share))
        self._read_level *= ratio ** (_READ_BLEND * share)
        self._local = [1 + _LOCAL_DECAY * (each - 1) for each in self._local]
        self._local[index] *= ratio**_LOCAL_BLEND

    def scale(self, factor: float) -> None:
        """Multiply the times of the table's start."""
        self._shape = [factor * each for each in self._shape]
        self._context_s *= factor
        self._row_context_s *= factor

    def _read_s(self, reading: Reading) -> float:
        """The time measured at start."""
        return self._context_s * reading.context + self._row_context_s * reading.row_context


def _context_costs(timings: Sequence[Timing]) -> tuple[float, float]:
    """Seconds a token of context, for a request and for each of its rows: least squares over pairs of timings
    of equal rows."""
    shortest: dict[int, Timing] = {}
    for timing in timings:
        known = shortest.get(timing.rows)
        if known is None or timing.context < known.context:
            shortest[timing.rows] = timing
    pairs = [(each, shortest[each.rows]) for each in timings if each.context > shortest[each.rows].context]
    if not pairs:
        return 0.0, 0.0
    longer = np.array([float(a.context - b.context) for a, b in pairs])
    more_s = np.array([a.seconds - b.seconds for a, b in pairs]) / longer
    rows = np.array([float(a.rows) for a, _ in pairs])
    weight = 1.0 / rows  # many rows take longer and are timed less exactly
    design = np.stack((weight, weight * rows), axis=1)
    request_s, row_s = np.linalg.lstsq(design, weight * more_s, rcond=None)[0]
    if row_s < 0 or request_s < 0:
        both = max(0.0, float(np.average(more_s / rows, weights=rows)))
        return 0.0, both
    return float(request_s), float(row_s)


def _shape(timings: Sequence[Timing], context_s: float, row_context_s: float, prior_s: float) -> FloatArray:
    """Seconds at the points without any context; beyond the last timing, along the slope from the first.

    What disturbs a measurement only lengthens it: rows take no longer than more rows did, nor than the same
    rows in several forwards.
    """
    best: dict[int, float] = {}
    for each in timings:
        bare = max(0.1 * each.seconds, each.seconds - (context_s + row_context_s * each.rows) * each.context)
        best[each.rows] = min(bare, best.get(each.rows, bare))
    if not best:
        return np.full(len(POINTS), prior_s)
    rows = np.array(sorted(best), dtype=np.float64)
    values = np.array([best[int(row)] for row in rows])
    values = np.minimum.accumulate(values[::-1])[::-1]
    for index in range(1, len(rows)):
        parts = np.ceil(rows[index] / rows[:index]) * values[:index]
        values[index] = min(values[index], parts.min())
    points = np.asarray(POINTS, dtype=np.float64)
    shape: FloatArray = np.interp(points, rows, values)
    if len(rows) > 1:
        shape += (values[-1] - values[0]) / (rows[-1] - rows[0]) * np.maximum(points - rows[-1], 0.0)
    return shape


class HostCost:
    """Host time of rounds in seconds for each round, request and node, fitted online.

    Averages that forget over some hundred rounds, held to a prior as far as rounds do not vary. A node's
    share is what the budget must add to its row: on a fast target it is the larger part.
    """

    def __init__(
        self, node_s: float = 20e-6, request_s: float | None = None, round_s: float | None = None
    ) -> None:
        others = (10 * node_s if each is None else each for each in (round_s, request_s))
        self._prior = np.array([*others, node_s])
        self._products = np.zeros((3, 3))
        self._seen = np.zeros(3)
        self._weights = self._prior
        self.node_s = node_s
        """Seconds that one more node adds to a round."""
        self._latest: list[tuple[float, int, int, float]] = []
        self._mean_s = 0.0
        self._rounds = 0

    def seconds(self, requests: int, nodes: int) -> float:
        """Seconds of a round without its forward and its waits."""
        return max(0.0, float(self._weights @ (1.0, requests, nodes)))

    def observe(self, requests: int, nodes: int, seconds: float) -> None:
        """Update the costs: a round of `requests` requests and `nodes` nodes took `seconds` without its forward."""
        if self._rounds:  # a pause is not the cost of nodes
            seconds = min(seconds, 3 * self._mean_s + _HOST_SLACK_S)
        self._rounds += 1
        self._mean_s += max(1 / self._rounds, 1 - _HOST_MEMORY) * (seconds - self._mean_s)
        self._latest.append((1.0, requests, nodes, seconds))
        if len(self._latest) == _HOST_EVERY:
            rows = np.array(self._latest)
            faded = rows[:, :3].T * _HOST_MEMORY ** np.arange(_HOST_EVERY - 1, -1, -1)
            self._latest.clear()
            self._products = _HOST_MEMORY**_HOST_EVERY * self._products + faded @ rows[:, :3]
            self._seen = _HOST_MEMORY**_HOST_EVERY * self._seen + faded @ rows[:, 3]
            held = np.diag(_HOST_HELD)
            weights = np.linalg.solve(self._products + held, self._seen + held @ self._prior)
            self._weights = np.maximum(weights, (0.0, 0.0, self._prior[2] / 10))
            self.node_s = float(self._weights[2])
