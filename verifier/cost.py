"""The measured cost model: seconds of one forward by number of rows. Plain numpy; knows no models and no
requests."""

from collections.abc import Sequence

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
_BLEND = 0.1


class CostTable:
    """`T(rows)`: a moving average at fixed points, linear between them, never falling.

    Points never seen take the value of the line through their measured neighbours, or of the slope beyond
    them.
    """

    def __init__(self, prior_s: float = 0.02) -> None:
        self._seconds: npt.NDArray[np.float64] = np.full(len(POINTS), np.nan)
        self._prior_s = prior_s
        self._curve: npt.NDArray[np.float64] | None = None

    def observe(self, rows: int, seconds: float) -> None:
        """A forward of `rows` rows took `seconds`."""
        index = int(np.searchsorted(POINTS, rows))
        if index >= len(POINTS) or rows <= 0 or seconds <= 0:
            return
        if index and rows - POINTS[index - 1] < POINTS[index] - rows:
            index -= 1
        old = float(self._seconds[index])
        # A descheduled process is not a slow device: one outlier moves the average by at most a tenth of it.
        self._seconds[index] = seconds if np.isnan(old) else old + _BLEND * (min(seconds, 2 * old) - old)
        self._curve = None

    def curve(self) -> npt.NDArray[np.float64]:
        """Seconds for 1 .. `POINTS[-1]` rows; index 0 stands for no rows and is 0. Do not write to it."""
        if self._curve is None:
            self._curve = self._fit()
        return self._curve

    def seconds(self, rows: int) -> float:
        """Seconds of a forward of `rows` rows."""
        curve = self.curve()
        if rows < len(curve):
            return float(curve[rows])
        return float(curve[-1]) * rows / (len(curve) - 1)

    def _fit(self) -> npt.NDArray[np.float64]:
        known = np.flatnonzero(~np.isnan(self._seconds))
        rows = np.arange(POINTS[-1] + 1)
        if not len(known):
            flat = np.full(len(rows), self._prior_s)
            flat[0] = 0.0
            return flat
        points = np.asarray(POINTS, dtype=np.float64)[known]
        values = np.maximum.accumulate(self._seconds[known])
        curve = np.interp(rows, points, values)
        beyond = rows > points[-1]
        curve[beyond] += self._slope(points, values) * (rows[beyond] - points[-1])
        curve[0] = 0.0
        return curve

    @staticmethod
    def _slope(points: Sequence[float] | npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> float:
        """Seconds a row beyond the last measured point."""
        if len(points) < 2:
            return 0.0
        return float((values[-1] - values[0]) / (points[-1] - points[0]))
