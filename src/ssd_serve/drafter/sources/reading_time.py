"""Measures how fast a draft reads a new text. Knows slots and rows, not requests."""

import time

import numpy as np

from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.models.interface import Model

_ROWS, _MOST_S, _TURNS = 256, 0.1, 3
"""Rows that are read at a time, or fewer that should take so long; the first turn warms up."""


def measure_reading(model: Model, row_s: float) -> float:
    """Seconds a token of a new text that is read some hundred tokens at a time, which give no logits but the
    last; `row_s` is what a row of a smaller forward takes, for models so slow that fewer are read. Writes
    garbage into KV slots: call it before any request runs."""
    rows = min(_ROWS, max(1, int(_MOST_S / row_s)), model.slots, model.facts.context)
    places = list(range(rows))
    text = RequestRows([1] * rows, places, places, np.arange(0, dtype=np.int32), wanted=[rows - 1])
    batch = build_batch([text])
    taken: list[float] = []
    for _ in range(_TURNS):
        started = time.perf_counter()
        taken.append(model.forward(batch).completion.wait() - started)
    return min(taken[1:]) / rows
