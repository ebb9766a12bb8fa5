"""What a result was measured on: hardware, versions, and how busy the machine is."""

import contextlib
import ctypes
import mmap
import os
import platform
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_PACKAGES = ("ssd-serve", "torch", "triton", "flashinfer-python", "numpy", "tokenizers", "transformers")
_VECTORS = {
    "amx_bf16": "AMX with bf16",
    "avx512_bf16": "AVX-512 with bf16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "sve": "SVE",
    "asimd": "NEON",
}
"""Flags of a core and their names, the widest first."""
_COPIED_BYTES, _PASSES, _MOST_THREADS = 128 << 20, 4, 16
"""Of all threads together: more than caches hold, and a tenth of a second."""


def hardware() -> dict[str, object]:
    """Processor, cores, memory and GPUs of this machine."""
    import torch  # reads the environment that a benchmark sets before it measures

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "cpu": processor(_info()),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus,
        "system": f"{platform.system()} {platform.release()}",
    }


def processor(info: str) -> str:
    """The processor's name and its widest vectors, of `/proc/cpuinfo`: makers give one name to several
    generations."""
    told = _told(info)
    name = told.get("model name") or platform.processor() or platform.machine()
    flags = told.get("flags", told.get("Features", "")).split()
    return name + next((f" ({words})" for flag, words in _VECTORS.items() if flag in flags), "")


def versions() -> dict[str, str]:
    """Python and the packages that decide speed."""
    found = {"python": platform.python_version()}
    found.update({package: installed for package in _PACKAGES if (installed := _version(package))})
    return found


def load_averages() -> list[float]:
    """Processes that ran or wanted to, over one, five and fifteen minutes."""
    return [round(load, 2) for load in os.getloadavg()]


def usable_cores() -> tuple[int, ...]:
    """The cores that this process may use, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def copy_speed(cores: tuple[int, ...]) -> float:
    """GB/s that a thread on each of the cores reads and writes, all copying at once; the best of some passes.

    Without torch and numpy, which must not start before a benchmark has set their variables.
    """
    threads = cores[:_MOST_THREADS]
    size = _COPIED_BYTES // len(threads)
    copies = [_Copy(core, size) for core in threads]
    best = min(_together(copies) for _ in range(_PASSES))
    for copy in copies:
        copy.close()
    return round(2 * size * len(copies) / best / 1e9, 1)


class _Copy:
    """Two pieces of memory of a thread, one of which is copied onto the other."""

    def __init__(self, core: int, size: int) -> None:
        self._core = core
        self._size = size
        self._maps = mmap.mmap(-1, size), mmap.mmap(-1, size)
        self._buffers = [(ctypes.c_char * size).from_buffer(each) for each in self._maps]
        ctypes.memset(self._buffers[0], 1, size)  # untouched pages would all be the same page of zeros

    def run(self, start: threading.Barrier, seconds: list[float]) -> None:
        """Copy once, on the core where that is allowed, and add how long it took."""
        if hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, {self._core})  # of this thread
        start.wait()
        started = time.perf_counter()
        ctypes.memmove(self._buffers[1], self._buffers[0], self._size)
        seconds.append(time.perf_counter() - started)

    def close(self) -> None:
        """Give the memory back."""
        self._buffers.clear()
        for each in self._maps:
            each.close()


def _together(copies: list[_Copy]) -> float:
    """Seconds of the slowest."""
    start, seconds = threading.Barrier(len(copies)), list[float]()
    threads = [threading.Thread(target=copy.run, args=(start, seconds)) for copy in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(seconds)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _told(info: str) -> dict[str, str]:
    """What Linux says of the first core."""
    lines = (line.split(":", 1) for line in info.partition("\n\n")[0].splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in lines}


def _info() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""
