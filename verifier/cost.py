"""The measured cost model: seconds of a forward by its rows, and of the host's work beside it.

Plain numpy; knows no models and no trees.
"""

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

POINTS = (
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    10,
    12,
    14,
    16,
    20,
    24,
    28,
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
MOST_ROWS = POINTS[-1]
_BLEND = 0.1
_HOST_MEMORY = 0.995
_HOST_SLACK_S = 0.5e-3


class CostTable:
    """`T(rows)`: a moving average at fixed points, linear between them, never falling.

    Points never seen take the value of the line through their measured neighbours, or of the slope beyond
    them.
    """

    def __init__(self, prior_s: float = 0.02) -> None:
        self._seconds: npt.NDArray[np.float64] = np.full(len(POINTS), np.nan)
        self._prior_s = prior_s
        self._points: npt.NDArray[np.float64] | None = None
        self._values: npt.NDArray[np.float64] = np.zeros(0)

    def observe(self, rows: int, seconds: float) -> None:
        """A forward of `rows` rows took `seconds`."""
        index = bisect_left(POINTS, rows)
        if index >= len(POINTS) or rows <= 0 or seconds <= 0:
            return
        if index and rows - POINTS[index - 1] < POINTS[index] - rows:
            index -= 1
        old = float(self._seconds[index])
        # A descheduled process is not a slow device: one outlier moves the average by at most a tenth of it.
        self._seconds[index] = seconds if np.isnan(old) else old + _BLEND * (min(seconds, 2 * old) - old)
        self._points = None

    def span(self, first: int, last: int) -> npt.NDArray[np.float64]:
        """Seconds of forwards of `first` to `last` rows: [last - first + 1]; no rows take no time."""
        points = self._fit()
        rows = np.arange(first, last + 1, dtype=np.float64)
        if not len(points):
            return np.where(rows > 0, self._prior_s, 0.0)
        seconds = np.interp(rows, points, self._values)
        if last > points[-1]:
            seconds += self._slope() * np.maximum(rows - points[-1], 0.0)
        if first <= 0:
            seconds[rows <= 0] = 0.0
        return seconds

    def seconds(self, rows: int) -> float:
        """Seconds of a forward of `rows` rows."""
        return float(self.span(rows, rows)[0])

    def _fit(self) -> npt.NDArray[np.float64]:
        """The measured points; their values, made monotone, are kept beside them."""
        if self._points is None:
            known = np.flatnonzero(~np.isnan(self._seconds))
            self._points = np.asarray(POINTS, dtype=np.float64)[known]
            self._values = np.maximum.accumulate(self._seconds[known])
        return self._points

    def _slope(self) -> float:
        """Seconds a row beyond the last measured point."""
        points, values = self._fit(), self._values
        return float((values[-1] - values[0]) / (points[-1] - points[0])) if len(points) > 1 else 0.0


class HostCost:
    """What rounds cost beside their forwards: seconds a round, a request and a node, fitted online.

    Recursive least squares that forgets over some hundred rounds. A node's share is what the budget must add
    to its row: on a fast target it is the larger part.
    """

    def __init__(self, node_s: float = 20e-6) -> None:
        self._weights = [0.0, 10 * node_s, node_s]
        self._spread = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.01]]

    @property
    def node_s(self) -> float:
        """Seconds that one more node adds to a round."""
        return max(0.0, self._weights[2])

    def seconds(self, requests: int, nodes: int) -> float:
        """Seconds of a round beside its forward and its waits."""
        weights = self._weights
        return max(0.0, weights[0] + weights[1] * requests + weights[2] * nodes)

    def observe(self, requests: int, nodes: int, seconds: float) -> None:
        """A round of `requests` decoding requests and `nodes` nodes took `seconds` beside its forward."""
        seen = (1.0, float(requests), float(nodes))
        expected = self.seconds(requests, nodes)
        error = min(seconds, 3 * expected + _HOST_SLACK_S) - expected  # a pause is not the cost of nodes
        # Plain numbers: for three of them numpy's calls cost ten times the arithmetic.
        along = [sum(a * b for a, b in zip(row, seen, strict=True)) for row in self._spread]
        scale = _HOST_MEMORY + sum(a * b for a, b in zip(seen, along, strict=True))
        self._weights = [
            weight + each / scale * error for weight, each in zip(self._weights, along, strict=True)
        ]
        spread = [
            [(value - a * b / scale) / _HOST_MEMORY for value, b in zip(row, along, strict=True)]
            for row, a in zip(self._spread, along, strict=True)
        ]
        # What is not excited must not grow without bound.
        shrink = min(1.0, 4.0 / (spread[0][0] + spread[1][1] + spread[2][2]))
        self._spread = [[shrink * value for value in row] for row in spread]
