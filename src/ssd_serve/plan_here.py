"""This machine for `ssd plan`: measured in some seconds, on the cores or the GPU that a model would use."""

from collections.abc import Sequence

from ssd_serve.bench.roofline_probe import QUICK, last_level_cache, measure_roof
from ssd_serve.models.memory import available_memory
from ssd_serve.plan_devices import Measured


def this_cpu(cores: Sequence[int], dtype: str) -> Measured:
    """Cores as devices: all of them, one, and all but one, which a drafter beside would take."""
    counts = {1, max(1, len(cores) - 1), len(cores)}
    memory = available_memory("cpu")
    roofs = {count: measure_roof("cpu", dtype, cores[:count], QUICK) for count in sorted(counts)}
    return Measured("CPU core", len(cores), roofs, memory, True, last_level_cache())


def this_gpu(count: int, dtype: str) -> Measured:
    """The first GPU stands for all."""
    import torch

    memory = available_memory("cuda:0")
    roofs = {1: measure_roof("cuda:0", dtype, (), QUICK)}
    return Measured(torch.cuda.get_device_name(0), count, roofs, memory, False, 0)
