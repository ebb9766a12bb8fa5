"""What memory does over time: a robust slope, how sure it is, and who has grown too much.

Samples of one process are averaged into equal stretches; the slope is the median of the slopes of all pairs
of stretches (Theil-Sen), and its interval comes from drawing the stretches' residuals anew (bootstrap).
Stretches of some seconds make residuals nearly independent; what cycles more slowly than that makes the
interval too narrow, and what grows in steps makes it wide. Knows numbers, not processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import bootstrap

STRETCHES = 40
_MIN_SAMPLES = 12
_DRAWS = 1000
_LEVEL = 0.95

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth in units an hour, with its 95 % interval, over so many hours of samples."""

    value: float
    low: float
    high: float
    hours: float


def slope(seconds: Sequence[float], values: Sequence[float], seed: int = 1) -> Slope | None:
    """The slope of samples in the order of time; None where there are too few to say anything."""
    if len(seconds) < _MIN_SAMPLES or seconds[-1] <= seconds[0]:
        return None
    hours = (np.asarray(seconds, dtype=np.float64) - seconds[0]) / 3600
    times, levels = _stretches(hours, np.asarray(values, dtype=np.float64))
    value = float(_theil_sen(times, levels))
    line = value * times
    drawn = bootstrap(
        (levels - line,),
        lambda residuals, axis: _theil_sen(times, line + residuals, axis),
        vectorized=True,
        n_resamples=_DRAWS,
        confidence_level=_LEVEL,
        method="percentile",
        rng=seed,
    ).confidence_interval
    return Slope(value, float(drawn.low), float(drawn.high), float(hours[-1]))


def after_warm_up(seconds: Sequence[float], warm_up_s: float) -> int:
    """Index of the first sample that counts: caches fill at the beginning of a process."""
    return next((index for index, each in enumerate(seconds) if each - seconds[0] >= warm_up_s), len(seconds))


def _stretches(hours: FloatArray, values: FloatArray) -> tuple[FloatArray, FloatArray]:
    count = min(STRETCHES, len(hours) // 3)
    parts = zip(np.array_split(hours, count), np.array_split(values, count), strict=True)
    means = np.array([(when.mean(), level.mean()) for when, level in parts])
    return means[:, 0], means[:, 1]


def _theil_sen(times: FloatArray, values: FloatArray, axis: int = -1) -> FloatArray:
    """The slope of each series along the last axis. By hand: scipy's takes one series, and a second for all
    the draws."""
    first, second = np.triu_indices(len(times), 1)
    slopes = (values[..., second] - values[..., first]) / (times[second] - times[first])
    return np.asarray(np.median(slopes, axis), dtype=np.float64)
