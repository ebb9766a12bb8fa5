"""How true probabilities were: expected calibration error, Brier score, and the points of a reliability
diagram.

Plain numpy: a reliability diagram needs the counts of its bins, which packages leave out. Knows predicted
probabilities and what happened, not what was predicted.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
BINS = 15
"""Equal intervals of probability; each counts by the number of predictions in it."""


@dataclass(frozen=True, slots=True)
class Reliability:
    """Figures of some predictions. `gain`: how much better the Brier score is than `base_brier`, that of
    always predicting the share that happened, known only afterwards; 0 where nothing varies."""

    count: int
    happened: float
    predicted: float
    expected_calibration_error: float
    brier: float
    base_brier: float
    gain: float
    bins: tuple[tuple[float, float, int], ...]
    """Mean prediction, share that happened and number of predictions of every bin that is not empty."""


def reliability(predicted: Floats, happened: Floats, bins: int = BINS) -> Reliability:
    """Figures of predictions [n] in 0..1 and what happened [n], 0 or 1.

    Brier (1950): mean squared difference. Expected calibration error (Naeini, Cooper, Hauskrecht 2015): mean
    over bins, weighted by count, of |mean prediction - share that happened|.
    """
    count = len(predicted)
    if count == 0:
        return Reliability(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, ())
    places = np.minimum((predicted * bins).astype(int), bins - 1)
    points: list[tuple[float, float, int]] = []
    error = 0.0
    for place in range(bins):
        inside = places == place
        size = int(inside.sum())
        if size:
            mean, share = float(predicted[inside].mean()), float(happened[inside].mean())
            points.append((mean, share, size))
            error += size / count * abs(mean - share)
    rate = float(happened.mean())
    brier, base = float(((predicted - happened) ** 2).mean()), rate * (1 - rate)
    gain = 1 - brier / base if base > 0 else 0.0
    return Reliability(count, rate, float(predicted.mean()), error, brier, base, gain, tuple(points))
