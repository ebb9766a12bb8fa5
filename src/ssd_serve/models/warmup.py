"""Measures the step times of a model by running it. Knows slots and rows, not requests."""

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from ssd_serve.kernels.batch import Batch, RequestRows, build_batch
from ssd_serve.models.interface import Model

SHORT_CONTEXT, LONG_CONTEXT = 128, 1024
_MOST_REPEATS = 32


def measure_steps(
    model: Model,
    row_counts: Sequence[int],
    contexts: Sequence[int] = (SHORT_CONTEXT,),
    repeats: int = 4,
    least_s: float = 0.0,
    most_s: float = math.inf,
    report: Callable[[str], None] = lambda _text: None,
) -> dict[tuple[int, int], list[float]]:
    """Seconds of forwards by (rows, context), `repeats` of each, more of them in the first `least_s` seconds,
    and after `most_s` seconds no more than one of each.

    All counts take turns, so that a busy moment of the machine does not distort one of them. Writes only
    garbage into KV slots: call it before any request runs. What does not fit the model is left out. `report`
    receives the progress of the first two turns, which always complete.
    """
    most = min(model.slots, model.facts.context)
    batches = {
        (rows, context): _batch(rows, context)
        for context in dict.fromkeys(min(context, most // 2) for context in contexts)
        for rows in row_counts
        if context + rows <= most
    }
    seconds: dict[tuple[int, int], list[float]] = {key: [] for key in batches}
    began, turn, passed = time.perf_counter(), 0, 0.0
    while turn < 2 or (passed < most_s and (turn <= repeats or (passed < least_s and turn <= _MOST_REPEATS))):
        for place, (key, batch) in enumerate(batches.items(), 1 + turn * len(batches)):
            if turn < 2:
                report(f"forward {place} of at least {2 * len(batches)}, {passed:.1f} s")
            started = time.perf_counter()
            taken = model.forward(batch).completion.wait() - started
            if turn:  # the first turn warms up
                seconds[key].append(taken)
            passed = time.perf_counter() - began
        turn += 1
    return seconds


def one_tree(rows: int, context: int = 1) -> Batch:
    """A root and its children."""
    part = RequestRows(
        tokens=[1] * rows,
        positions=[context, *[context + 1] * (rows - 1)],
        write_slots=list(range(context, context + rows)),
        prefix_slots=np.arange(context, dtype=np.int32),
        wanted=list(range(rows)),
        ancestry=[1, *(1 | 1 << row for row in range(1, rows))],
    )
    return build_batch([part])


def single_rows(rows: int, context: int = 1) -> Batch:
    """Return requests of one row each, the first after `context` tokens."""
    lengths = [context, *[1] * (rows - 1)]
    return build_batch(
        [
            RequestRows([1], [length], [context + row], np.arange(length, dtype=np.int32), [0])
            for row, length in enumerate(lengths)
        ]
    )


def _batch(rows: int, context: int) -> Batch:
    """A causal chunk of one request."""
    part = RequestRows(
        tokens=[1] * rows,
        positions=list(range(context, context + rows)),
        write_slots=list(range(context, context + rows)),
        prefix_slots=np.arange(context, dtype=np.int32),
        wanted=list(range(rows)),
    )
    return build_batch([part])
