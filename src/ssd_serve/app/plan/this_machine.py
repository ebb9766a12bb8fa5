"""This machine for `ssd plan`: measured in some seconds, on the cores or the GPU that a model would use."""

from collections.abc import Sequence
from dataclasses import replace

from ssd_serve.app.plan.devices import MeasuredRoofs
from ssd_serve.app.plan.roof import QUICK, Roof, last_level_cache, measure_roof
from ssd_serve.models.memory import available_memory


def this_cpu(cores: Sequence[int], dtype: str) -> MeasuredRoofs:
    """Cores as devices: all of them, one, and all but one, which a drafter beside would take."""
    counts = {1, max(1, len(cores) - 1), len(cores)}
    memory = available_memory("cpu")
    roofs = [measure_roof("cpu", dtype, cores[:count], QUICK) for count in sorted(counts)]
    by_cores = {roof.cores: roof for roof in never_slower(roofs)}
    return MeasuredRoofs("CPU core", len(cores), by_cores, memory, True, last_level_cache())


def never_slower(roofs: Sequence[Roof]) -> list[Roof]:
    """Roofs of ever more cores, each at least as good as those before: a core that is busy with something
    else at the moment is no property of the machine."""
    found: list[Roof] = []
    for roof in roofs:
        if found:
            last = found[-1]
            faster = {
                rows: min(each, last.seconds_per_byte[rows]) for rows, each in roof.seconds_per_byte.items()
            }
            roof = replace(roof, seconds_per_byte=faster, flops=max(roof.flops, last.flops))
        found.append(roof)
    return found


def this_gpu(count: int, dtype: str) -> MeasuredRoofs:
    """The first GPU stands for all."""
    import torch

    memory = available_memory("cuda:0")
    roofs = {1: measure_roof("cuda:0", dtype, (), QUICK)}
    return MeasuredRoofs(torch.cuda.get_device_name(0), count, roofs, memory, False, 0)
