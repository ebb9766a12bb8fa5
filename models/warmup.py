"""Measures the step times of a model by running it. Knows slots and rows, not requests."""

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.models.interface import Model

_PREFIX = 128


def measure_steps(
    model: Model,
    row_counts: Sequence[int],
    seen: Callable[[int, float], object] | None = None,
    repeats: int = 3,
) -> float:
    """Time forwards of each number of rows over a short context; `seen(rows, seconds)` gets each median.

    Writes only garbage into KV slots: call it before any request runs. Returns the median for the first
    count.
    """
    prefix = min(_PREFIX, model.slots // 2)
    first = 0.0
    for index, rows in enumerate(row_counts):
        if prefix + rows > min(model.slots, model.facts.context):
            break
        seconds = _time(model, prefix, rows, repeats + (2 if index == 0 else 0))
        if seen is not None:
            seen(rows, seconds)
        first = first or seconds
    return first


def _time(model: Model, prefix: int, rows: int, repeats: int) -> float:
    part = RequestRows(
        tokens=[1] * rows,
        positions=list(range(prefix, prefix + rows)),
        write_slots=list(range(prefix, prefix + rows)),
        prefix_slots=np.arange(prefix, dtype=np.int32),
        wanted=list(range(rows)),
    )
    batch = build_batch([part])
    seconds: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        seconds.append(model.forward(batch).completion.wait() - started)
    return statistics.median(seconds)
