"""Whether the library by which GPUs talk to each other works here: one sum in a group of one process.

Such a library can hang where no exception ends it, so it is tried in a process of its own, which may be
ended. Has not run on a GPU. Knows torch's process groups; not models, and not which devices serve.
"""

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

from ssd_serve.trying import tried

_TIMEOUT_S = 90.0
_PROGRAM = (sys.executable, "-m", "ssd_serve.collective")


def failure(
    backend: str, device: str, timeout_s: float = _TIMEOUT_S, program: Sequence[str] = _PROGRAM
) -> str:
    """What is wrong with `backend` (torch's name of it) on `device` (torch's too); empty when nothing is."""
    return tried((*program, backend, device), timeout_s).failure


def all_reduce(backend: str, device: str) -> bool:
    """Whether the sum over a group of one is what was put in. Raises whatever the library raises."""
    import torch
    import torch.distributed as dist

    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    patience = timedelta(seconds=_TIMEOUT_S)
    store = cast(Any, dist).HashStore()  # torch does not say that it exports it
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=patience)
    try:
        numbers = torch.arange(4, dtype=torch.float32, device=place)
        dist.all_reduce(numbers)
        return numbers.tolist() == [0.0, 1.0, 2.0, 3.0]
    finally:
        dist.destroy_process_group()


def main(arguments: Sequence[str]) -> int:
    """`BACKEND DEVICE`; 1 for a wrong sum."""
    if all_reduce(*arguments):
        return 0
    print("the sum is wrong", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
