"""Measures a target when it is loaded: its cost table. Knows models by their forwards only."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version

import torch

from ssd_serve.models.interface import Model
from ssd_serve.models.warmup import LONG_CONTEXT, SHORT_CONTEXT, measure_steps
from ssd_serve.base.cost import CostTable, Timing
from ssd_serve.verifier.planning.timing_files import TimingFiles, least

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_LONG_ROWS = (1, 8, 32)
_PROBED_ROWS = (1, 8)
_CONTEXTS = (SHORT_CONTEXT, LONG_CONTEXT)
_LEAST_S, _PROBE_S = 0.3, 0.05
"""A device of half a millisecond a step is asked more often: a busy moment is as long as many of its
steps."""
_MOST_S = 2.0
"""Of each of both measurements: a start need not wait for several long steps of each kind, as a busy moment
is short beside them."""


def measure_cost(model: Model) -> CostTable:
    """Time forwards of some rows after a short context, and of a few after a long one."""
    return CostTable(_measure(model))


def remembered_timings(model: Model, device: str, files: TimingFiles) -> list[Timing]:
    """The same timings, from an earlier start where a few forwards agree with them. `device` names the cores
    in use."""
    return list(files.timings(identity(model, device), lambda: _measure(model), lambda: _probe(model)))


def identity(model: Model, device: str) -> dict[str, object]:
    """What step times depend on."""
    return {
        **asdict(model.facts),
        "device": device,
        "step": type(model).__name__,  # whatever stands before a model may change its times
        "processor": platform.processor() or platform.machine(),
        "gpu": torch.cuda.get_device_name() if device.startswith("cuda") else "",
        "torch": torch.__version__,
        "ssd-serve": version("ssd-serve"),
    }


def _measure(model: Model) -> list[Timing]:
    short = measure_steps(model, ROWS, least_s=_LEAST_S, most_s=_MOST_S)
    longer = measure_steps(model, _LONG_ROWS, _CONTEXTS, least_s=_LEAST_S, most_s=_MOST_S)
    return least((*_timings(short), *_timings(longer)))


def _probe(model: Model) -> list[Timing]:
    return least(
        _timings(measure_steps(model, _PROBED_ROWS, _CONTEXTS, 2, least_s=_PROBE_S, most_s=_LEAST_S))
    )


def _timings(seconds: Mapping[tuple[int, int], Sequence[float]]) -> list[Timing]:
    return [Timing(*key, each) for key, repeats in seconds.items() for each in repeats]
