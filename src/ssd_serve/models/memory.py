"""Free memory, and the check before anything is loaded."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil  # type: ignore[import-untyped]
import torch

from ssd_serve.base.errors import DeviceMemoryError, MemoryShortError, in_a_line

T = TypeVar("T")

_CGROUP = Path("/sys/fs/cgroup")
_RESERVE = 256 << 20
"""Bytes kept for activations, the interpreter and the rest of the machine."""


def available_memory(device: str) -> int:
    """Bytes that can still be allocated on a device, container limits included."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info(device)[0])
    free: int = psutil.virtual_memory().available
    limit = _container_free()
    return free if limit is None else min(free, limit)


def require_memory(name: str, need: int, free: int) -> None:
    """Raise `MemoryShortError` unless `need` bytes and a reserve fit into `free` bytes."""
    if need + _RESERVE > free:
        raise MemoryShortError(
            f"{name} needs {need / 2**30:.1f} GiB for weights and KV cache, and "
            f"{free / 2**30:.1f} GiB are free; choose a smaller model or context, or less "
            "KV memory"
        )


def within_memory(compute: Callable[[], T]) -> T:
    """Return the result of `compute`. If its device has too little memory, all that it made is freed before
    `DeviceMemoryError` is raised."""
    try:
        return compute()
    except torch.OutOfMemoryError as error:
        reason = in_a_line(error)
    # The error is gone here, and with it the frames that referenced the tensors.
    raise DeviceMemoryError(reason)


def release_memory() -> None:
    """Free unused cached memory, so that allocations of another size succeed."""
    gc.collect()
    torch.cuda.empty_cache()  # nothing where there is no GPU


def _container_free() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return int(limit) - used + int(statistics.get("inactive_file", 0))
