"""Measures a target when it is loaded: its cost table. Knows models by their forwards only."""

from ssd_serve.models.interface import Model
from ssd_serve.models.warmup import LONG_CONTEXT, SHORT_CONTEXT, measure_steps
from ssd_serve.verifier.cost import CostTable, Timing

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_LONG_ROWS = (1, 8, 32)


def measure_cost(model: Model) -> CostTable:
    """Time forwards of some rows after a short context, and of a few after a long one.

    The least of some repeats is taken: what disturbs a moment is no property of the model.
    """
    seconds = measure_steps(model, ROWS) | measure_steps(model, _LONG_ROWS, (SHORT_CONTEXT, LONG_CONTEXT))
    return CostTable([Timing(rows, context, min(each)) for (rows, context), each in seconds.items()])
