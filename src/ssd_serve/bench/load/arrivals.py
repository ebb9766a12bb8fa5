"""When the requests of an open loop arrive. Knows times, not requests."""

import math

import numpy as np


def arrival_times(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds from the start at which `count` requests arrive, `rate` of them a second.

    Pauses are drawn from a gamma distribution of the shape `burstiness`: 1 is a Poisson process, less comes
    in bursts, more is evener. The last one arrives at `count / rate`, so that every seed offers the same
    rate. An infinite rate sends all at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    pauses = np.random.default_rng(seed).gamma(burstiness, size=count)
    times = np.cumsum(pauses)
    return [float(at) for at in times * (count / rate / times[-1])]
