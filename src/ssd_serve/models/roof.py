"""Roofs of a device: bandwidth of reading weights, throughput of multiplying matrices.

Measured: matrices that no cache holds are streamed through products of few rows, as a decoding step does, and one
is multiplied with many rows. Both use the engine's own products. The best repeat counts. Expected, without
measuring: figures of a usual processor.
"""

import contextlib
import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np
import torch

from ssd_serve.base.devices import processor_name
from ssd_serve.base.settings import Settings
from ssd_serve.base.stored import read_stored, stored_path, write_stored
from ssd_serve.kernels.cpu_products import cpu_has_fast_bf16
from ssd_serve.kernels.native.library import native_library
from ssd_serve.models.memory import available_memory
from ssd_serve.models.weights.linear import matrix_kind

_SIDE = 4096
_CACHES = 4
"""The matrices are at least this many times as large as the last-level cache."""
_MIN_BYTES = {"cpu": 512 << 20, "cuda": 4 << 30}
_MAX_MEMORY = 0.25
_MANY_ROWS = {"cpu": 256, "cuda": 8192}
"""Rows of the product by which the throughput is measured."""
_TASKS = Path("/proc/self/task")
_LAST_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


@dataclass(frozen=True, slots=True)
class Effort:
    """Thoroughness of a measurement. `rows` begins with 1."""

    rows: Sequence[int]
    repeats: int
    most_s: float = 1.0
    """Seconds after which no further repeat of one product is measured."""
    most_bytes: int = 1 << 62


QUICK = Effort((1, 4, 16, 64), 3, 0.2, 256 << 20)
"""All cores of a CPU within 5 s, where other work leaves them free."""
THOROUGH = Effort((1, 2, 4, 8, 16, 32, 64), 15)


@dataclass(frozen=True, slots=True)
class Roof:
    """Roofs of a device, or of some cores of a CPU. `seconds_per_byte`: seconds of a product of so many rows
    for each byte of its matrix."""

    cores: int
    """0: a GPU."""
    dtype: str
    seconds_per_byte: dict[int, float]
    flops: float
    """Floating-point operations a second of a large matrix product."""

    @property
    def bandwidth(self) -> float:
        """Weight bytes a second of the fastest product of few rows."""
        return 1 / min(self.seconds_per_byte.values())

    def product_s(self, weight_bytes: float, rows: int) -> float:
        """Seconds of the products of so many rows with matrices of so many bytes."""
        known = sorted(self.seconds_per_byte)
        per_byte = float(np.interp(rows, known, [self.seconds_per_byte[each] for each in known]))
        return weight_bytes * per_byte * max(1.0, rows / known[-1])


def measure_roof(device: str, dtype: str, cores: Sequence[int] = (), effort: Effort = THOROUGH) -> Roof:
    """Measure a GPU, or these cores. `device` and `dtype` are torch's names."""
    kind = getattr(torch, dtype)
    with torch.inference_mode(), _bound_to(cores):
        layers = _layers(device, kind, effort.most_bytes)
        per_byte: dict[int, float] = {}
        for rows in effort.rows:
            # On cores many rows are bound by arithmetic: fewer matrices show it in less time.
            some = layers[: max(2, len(layers) // rows)] if device == "cpu" else layers
            seconds = min(_times(_pass(some, _operand(rows, device, kind)), device, effort))
            per_byte[rows] = seconds / (len(some) * _SIDE * _SIDE * kind.itemsize)
        many = _operand(_MANY_ROWS[_kind(device)], device, kind)
        product_s = min(_times(_pass(layers[:1], many), device, effort))
    return Roof(len(cores), dtype, per_byte, 2 * len(many) * _SIDE**2 / product_s)


_CORE_BYTES_S, _MOST_BYTES_S = 12e9, 30e9
"""Bytes a second that one core reads of usual memory, and that all cores do."""
_CORE_FLOPS, _CORE_FLOPS_BF16 = 20e9, 80e9
"""Operations a second of one core, and of one with instructions for bf16 products."""


def expected_roof(cores: int, dtype: torch.dtype) -> Roof:
    """Return the roof of so many cores of a usual processor with this one's instructions. Measures nothing."""
    flops = cores * (_CORE_FLOPS_BF16 if dtype is torch.bfloat16 and cpu_has_fast_bf16() else _CORE_FLOPS)
    bandwidth = min(cores * _CORE_BYTES_S, _MOST_BYTES_S)
    per_byte = {rows: max(1 / bandwidth, 2 * rows / dtype.itemsize / flops) for rows in QUICK.rows}
    return Roof(cores, str(dtype).removeprefix("torch."), per_byte, flops)


def cpu_roofs(cores: Sequence[int], dtype: str, folder: Path) -> list[Roof]:
    """Return the roofs of one core, all but one and all of them: stored ones, else measured within seconds."""
    found: list[Roof] = []
    kind = getattr(torch, dtype)
    for count in sorted({1, max(1, len(cores) - 1), len(cores)}):
        roof = stored_roof(folder, kind, count)
        if roof is None:
            roof = measure_roof("cpu", dtype, cores[:count], QUICK)
            store_roof(folder, roof)
        found.append(roof)
    return found


class _StoredRoof(msgspec.Struct):
    seconds_per_byte: dict[int, float]
    flops: float


def stored_roof(folder: Path, dtype: torch.dtype, cores: int) -> Roof | None:
    """Return what `measure_roof` found on so many cores of this processor, if `store_roof` was called then."""
    found = read_stored(_stored_at(folder, str(dtype), cores), _StoredRoof)
    name = str(dtype).removeprefix("torch.")
    return None if found is None else Roof(cores, name, found.seconds_per_byte, found.flops)


def store_roof(folder: Path, roof: Roof) -> None:
    """Store a roof for `stored_roof`."""
    content = _StoredRoof(dict(roof.seconds_per_byte), roof.flops)
    write_stored(_stored_at(folder, f"torch.{roof.dtype}", roof.cores), content)


def _stored_at(folder: Path, dtype: str, cores: int) -> Path:
    own = {"torch": torch.__version__, "ssd-serve": version("ssd-serve")}
    return stored_path(folder, "roof", {"dtype": dtype, "cores": cores, "cpu": processor_name(), **own})


def last_level_cache() -> int:
    """Bytes of the processor's last cache; 0 where the system does not tell."""
    try:
        text = _LAST_CACHE.read_text().strip()
    except OSError:
        return 0
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[:-1].isdigit() and text[-1] in units else 0


def _kind(device: str) -> str:
    return "cpu" if device == "cpu" else "cuda"


def _layers(device: str, dtype: torch.dtype, most: int) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Square matrices in the format that models use on this device."""
    wanted = _MIN_BYTES[_kind(device)]
    if device == "cpu":
        wanted = max(wanted, _CACHES * last_level_cache())
    wanted = min(wanted, int(_MAX_MEMORY * available_memory(device)))
    each = _SIDE * _SIDE * dtype.itemsize
    count = max(2, min(wanted, most) // each)
    wrap = matrix_kind(dtype, device, native_library(Settings().engine_config()) if device == "cpu" else None)
    matrix = _operand(_SIDE, device, dtype)
    return [wrap(matrix.clone(), None) for _ in range(count)]


def _operand(rows: int, device: str, dtype: torch.dtype, columns: int = _SIDE) -> torch.Tensor:
    return torch.randn((rows, columns), dtype=torch.float32, device=device).to(dtype)


def _pass(layers: Sequence[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        for layer in layers:
            layer(x)

    return run


def _times(run: Callable[[], object], device: str, effort: Effort) -> list[float]:
    """Seconds of every repeat after a first run, which counts only where it takes too long to repeat."""
    times: list[float] = []
    begin = time.perf_counter()
    for repeat in range(effort.repeats + 1):
        started = time.perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize(device)
        if repeat or time.perf_counter() - begin > effort.most_s:
            times.append(time.perf_counter() - started)
        if time.perf_counter() - begin > effort.most_s:
            break
    return times


@contextlib.contextmanager
def _bound_to(cores: Sequence[int]) -> Generator[None]:
    """Compute on these cores meanwhile, with as many threads; the threads that torch keeps move along."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores_before, threads_before = os.sched_getaffinity(0), torch.get_num_threads()
    _move(cores)
    torch.set_num_threads(len(cores))
    try:
        yield
    finally:
        _move(cores_before)
        torch.set_num_threads(threads_before)


def _move(cores: Sequence[int] | set[int]) -> None:
    tasks = [int(task.name) for task in _TASKS.iterdir()] if _TASKS.is_dir() else [0]
    for task in tasks:
        with contextlib.suppress(OSError):  # a thread may end meanwhile
            os.sched_setaffinity(task, cores)
