"""The growth of memory over time: a robust slope with its confidence interval.

Samples are averaged into equal stretches, which makes their residuals nearly independent. The slope is the
median of the slopes of all pairs of stretches (Theil-Sen); its interval resamples the residuals (bootstrap).
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
    """Growth in units an hour with its 95 % interval, over `hours` of samples."""

    value: float
    low: float
    high: float
    hours: float


def slope(seconds: Sequence[float], values: Sequence[float], seed: int = 1) -> Slope | None:
    """Return the slope of samples in the order of time; None for too few samples."""
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


def _stretches(hours: FloatArray, values: FloatArray) -> tuple[FloatArray, FloatArray]:
    count = min(STRETCHES, len(hours) // 3)
    parts = zip(np.array_split(hours, count), np.array_split(values, count), strict=True)
    means = np.array([(when.mean(), level.mean()) for when, level in parts])
    return means[:, 0], means[:, 1]


def _theil_sen(times: FloatArray, values: FloatArray, axis: int = -1) -> FloatArray:
    """Return the slope of each series along an axis; scipy's function takes one series at a time."""
    first, second = np.triu_indices(len(times), 1)
    slopes = (values[..., second] - values[..., first]) / (times[second] - times[first])
    return np.asarray(np.median(slopes, axis), dtype=np.float64)
