"""What figures show: percentiles, intervals of paired ratios, and the verdict that an interval allows.

All benchmarks judge by these. Knows numbers, not what was measured.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

AS_GOOD = 0.97
"""Who surely reaches this share of the other is as good as it."""
_LEVEL = 0.95
_MANY, _DRAWS = 32, 10_000


class Verdict(str, Enum):
    """What the interval of a ratio allows to say of the one above the line."""

    BETTER = "better"
    AS_GOOD = "as good"
    WORSE = "worse"
    NOT_SHOWN = "not shown"

    def __str__(self) -> str:
        """For tables."""
        return self.value


@dataclass(frozen=True, slots=True)
class Interval:
    """Ratios of pairs: their median, their geometric mean, and the 95 % interval of the latter."""

    median: float
    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> Verdict:
        """Better: all of it lies above 1. As good: above 0.97. Worse: below 1. Else the noise is large."""
        if self.low > 1:
            return Verdict.BETTER
        if self.low >= AS_GOOD:
            return Verdict.AS_GOOD
        return Verdict.WORSE if self.high < 1 else Verdict.NOT_SHOWN

    def scaled(self, factor: float) -> "Interval":
        """The interval of ratios that are all `factor` times as high."""
        return Interval(*(factor * value for value in (self.median, self.mean, self.low, self.high)))

    def __str__(self) -> str:
        """For tables."""
        return f"{self.mean:.2f}x ({self.low:.2f} to {self.high:.2f})"


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, interpolated linearly. `values` is not empty."""
    return float(np.percentile(values, percent))


def quartiles(values: Sequence[float]) -> list[float]:
    """The three of them."""
    return [percentile(values, part) for part in (25, 50, 75)]


def ratio_interval(ratios: Sequence[float]) -> Interval | None:
    """The interval of the mean of the log ratios, as ratios. None for fewer than two pairs.

    Of many pairs by drawing them anew (bootstrap), which assumes that pairs are independent. Of few by
    Student's t, which assumes about normal logarithms too: drawing few anew gives too narrow an interval.
    """
    if len(ratios) < 2:
        return None
    logs = np.log(ratios)
    low, high = _drawn(logs) if len(logs) >= _MANY else _students(logs)
    found = statistics.median(ratios), math.exp(logs.mean()), math.exp(low), math.exp(high)
    return Interval(*(round(value, 9) for value in found))  # 0.97 is as good as 0.97


def _drawn(values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> tuple[float, float]:
    drawn = np.random.default_rng(1).integers(len(values), size=(_DRAWS, len(values)))
    low, high = np.percentile(values[drawn].mean(1), (50 * (1 - _LEVEL), 50 * (1 + _LEVEL)))
    return float(low), float(high)


def _students(values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> tuple[float, float]:
    from scipy.stats import t  # of the extra: percentiles and sums do without

    mean, count = float(values.mean()), len(values)
    half = float(t.ppf((1 + _LEVEL) / 2, count - 1) * values.std(ddof=1) / math.sqrt(count))
    return mean - half, mean + half
