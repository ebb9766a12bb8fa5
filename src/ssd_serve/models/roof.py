"""Roofs of a device: bandwidth of reading weights, throughput of multiplying matrices, and time of a layer beside them.

Measured: matrices that no cache holds are streamed through products of few rows, as a decoding step does. One is
multiplied with many rows, and packed layers of a small model run. All use the engine's own products, in bf16 or in
packed blocks. The best repeat counts. Expected, without measuring: figures of a usual processor.
"""

import contextlib
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np
import torch

from ssd_serve.base.devices import processor_name
from ssd_serve.base.errors import UserError
from ssd_serve.base.stored import read_stored, stored_path, write_stored
from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV
from ssd_serve.kernels.cpu_products import cpu_has_fast_bf16
from ssd_serve.kernels.device import dtype_name
from ssd_serve.kernels.native.attention import NativeAttention
from ssd_serve.kernels.native.layers import LayerPlaces, NativeLayers
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.native.packed import NativePackedLinear, StoredBlocks, WeightMemory
from ssd_serve.kernels.rows import RmsNorm
from ssd_serve.models.memory import available_memory
from ssd_serve.models.sizes import DTYPES, INT8, PACKED
from ssd_serve.models.warmup import one_tree
from ssd_serve.models.weights.linear import matrix_kind

_SIDE = 4096
_BLOCK, _BLOCK_BYTES = 32, 20
"""Numbers and bytes of a block of Q4_1, which stands for the other packed types: they differ by their bytes."""
_LAYER_S = 100e-6
"""Seconds of a layer that is not packed, beside its matrices: its operators are called one by one."""
_CACHES = 4
"""The matrices are at least this many times as large as the last-level cache."""
_MIN_BYTES = {"cpu": 512 << 20, "cuda": 4 << 30}
_MAX_MEMORY = 0.25
_READ_ROWS = 16
"""Most rows of a product that reading the matrix bounds."""
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


QUICK = Effort((1, 4, 16, 64), 5, 0.12, 256 << 20)
"""Measures all cores of an idle CPU within 5 s."""
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
    layer_s: Mapping[int, float] = field(default_factory=lambda: {1: _LAYER_S})
    """Seconds of a layer by number of rows, beside reading its matrices."""

    def __str__(self) -> str:
        """Describe bandwidth and products in a line."""
        return f"{self.bandwidth / 1e9:.1f} GB/s of weights, {self.flops / 1e12:.2g} TFLOPS in {self.dtype}"

    @property
    def bandwidth(self) -> float:
        """Weight bytes a second of the fastest product of few rows."""
        return 1 / min(self.seconds_per_byte.values())

    def product_s(self, weight_bytes: float, rows: int) -> float:
        """Seconds of the products of so many rows with matrices of so many bytes."""
        return weight_bytes * _at(rows, self.seconds_per_byte) * max(1.0, rows / max(self.seconds_per_byte))

    def layers_s(self, layers: int, rows: int) -> float:
        """Seconds of so many layers beside their matrices."""
        return layers * _at(rows, self.layer_s)


def _at(rows: int, known: Mapping[int, float]) -> float:
    counts = sorted(known)
    return float(np.interp(rows, counts, [known[each] for each in counts]))


def roof_dtype(served: str) -> str:
    """Return the `Roof.dtype` for a model's `ModelFacts.dtype`: weights of few bits are multiplied packed."""
    return PACKED if served in (PACKED, INT8) else dtype_name(DTYPES[served])


def measure_roof(
    device: str,
    dtype: str,
    cores: Sequence[int] = (),
    effort: Effort = THOROUGH,
    native: NativeLibrary | None = None,
) -> Roof:
    """Measure a GPU, or these cores. `device` and `dtype` are names of torch, or the dtype is `packed`."""
    kind = torch.bfloat16 if dtype == PACKED else getattr(torch, dtype)
    with torch.inference_mode(), _bound_to(cores):
        layers = _layers(device, dtype, effort.most_bytes, native)
        per_byte = _seconds_per_byte(layers, device, dtype, effort)
        many = _operand(_MANY_ROWS[_kind(device)], device, kind)
        product_s = min(_times(_pass(layers[:1], many), device, effort))
        roof = Roof(len(cores), dtype, per_byte, 2 * len(many) * _SIDE**2 / product_s)
        return replace(roof, layer_s=_layer_s(roof, effort, native)) if native and dtype == PACKED else roof


def _seconds_per_byte(
    layers: Sequence[Callable[[torch.Tensor], torch.Tensor]], device: str, dtype: str, effort: Effort
) -> dict[int, float]:
    per_byte: dict[int, float] = {}
    kind = torch.bfloat16 if dtype == PACKED else getattr(torch, dtype)
    for rows in effort.rows:
        # On cores many rows are bound by arithmetic: fewer matrices show it in less time. Those of few rows are all
        # read, as with one row: a part of them could stay in a cache.
        some = layers[: max(2, len(layers) // max(1, rows // _READ_ROWS))] if device == "cpu" else layers
        seconds = min(_times(_pass(some, _operand(rows, device, kind)), device, effort))
        per_byte[rows] = seconds / (len(some) * _matrix_bytes(dtype))
    return per_byte


def _layer_s(roof: Roof, effort: Effort, native: NativeLibrary) -> dict[int, float]:
    """Time packed layers, without the bytes of their matrices."""
    layers = _PackedLayers(native)
    return {
        rows: max(
            0.0, min(_times(layers.of(rows), "cpu", effort)) - roof.product_s(layers.matrix_bytes, rows)
        )
        / layers.count
        for rows in effort.rows
    }


class _PackedLayers:
    """Layers of a small decoder with packed matrices of no meaning, which one compiled call computes."""

    count = 24
    _hidden, _inner, _heads, _kv_heads, _head_dim, _context = 576, 1536, 9, 3, 64, 16

    def __init__(self, native: NativeLibrary) -> None:
        layer = LayerKV(self._kv_heads, self._head_dim)
        cache = KVCache(KVLayout((layer,) * self.count, torch.bfloat16), 256, "cpu")
        self._attention = NativeAttention(native, cache, self._heads)
        norm, memory = RmsNorm(torch.ones(self._hidden), 1e-5), WeightMemory()
        whole, kept = self._heads * self._head_dim, 2 * self._kv_heads * self._head_dim
        attention = (self._hidden, whole + kept), (whole, self._hidden)
        sizes = *attention, (self._hidden, 2 * self._inner), (self._inner, self._hidden)
        places: list[LayerPlaces] = []
        for _ in range(self.count):
            qkv, output, gate_up, down = (
                NativePackedLinear(native, [_blocks(outputs, inputs)], inputs, memory=memory)
                for inputs, outputs in sizes
            )
            places.append(LayerPlaces((qkv, output, gate_up, down), (norm, norm)))
        self._layers = NativeLayers(places, self._attention)
        self.matrix_bytes = sum(matrix.nbytes for each in places for matrix in each.matrices)

    def of(self, rows: int) -> Callable[[], object]:
        """Return what runs so many rows of one request."""
        batch = one_tree(rows, self._context)
        hidden = _operand(
            rows, "cpu", torch.bfloat16, self._hidden
        )  # zeros would be slow: their scales are denormal
        rotations = torch.ones((rows, 1, self._head_dim // 2), dtype=torch.complex64)
        plan = self._attention.plan(batch)
        return lambda: self._layers.run(range(self.count), hidden, None, rotations, plan)


_CORE_BYTES_S, _MOST_BYTES_S = 12e9, 30e9
"""Bytes a second that one core reads of usual memory, and that all cores do."""
_CORE_FLOPS, _CORE_FLOPS_BF16 = 20e9, 80e9
"""Operations a second of one core, and of one with instructions for bf16 products."""


def expected_roof(cores: int, dtype: str) -> Roof:
    """Return the roof of so many cores of a usual processor with this one's instructions. Measures nothing."""
    fast = dtype in (PACKED, "bfloat16") and cpu_has_fast_bf16()
    flops = cores * (_CORE_FLOPS_BF16 if fast else _CORE_FLOPS)
    bandwidth = min(cores * _CORE_BYTES_S, _MOST_BYTES_S)
    width = _matrix_bytes(dtype) / _SIDE**2
    per_byte = {rows: max(1 / bandwidth, 2 * rows / width / flops) for rows in QUICK.rows}
    return Roof(cores, dtype, per_byte, flops)


def cpu_roofs(
    cores: Sequence[int], dtype: str, folder: Path, native: NativeLibrary | None = None
) -> list[Roof]:
    """Return the roofs of one core, all but one and all of them: stored ones, else measured within seconds."""
    found: list[Roof] = []
    for count in sorted({1, max(1, len(cores) - 1), len(cores)}):
        roof = stored_roof(folder, dtype, count)
        if roof is None:
            roof = measure_roof("cpu", dtype, cores[:count], QUICK, native)
            store_roof(folder, roof)
        found.append(roof)
    return found


class _StoredRoof(msgspec.Struct):
    seconds_per_byte: dict[int, float]
    flops: float
    layer_s: dict[int, float]


def stored_roof(folder: Path, dtype: str, cores: int) -> Roof | None:
    """Return what `measure_roof` found on so many cores of this processor, if `store_roof` was called then."""
    found = read_stored(_stored_at(folder, dtype, cores), _StoredRoof)
    return None if found is None else Roof(cores, dtype, found.seconds_per_byte, found.flops, found.layer_s)


def store_roof(folder: Path, roof: Roof) -> None:
    """Store a roof for `stored_roof`."""
    content = _StoredRoof(dict(roof.seconds_per_byte), roof.flops, dict(roof.layer_s))
    write_stored(_stored_at(folder, roof.dtype, roof.cores), content)


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


def _matrix_bytes(dtype: str) -> int:
    """Bytes of one of the matrices."""
    if dtype == PACKED:
        return _SIDE * _SIDE // _BLOCK * _BLOCK_BYTES
    width: int = getattr(torch, dtype).itemsize
    return _SIDE * _SIDE * width


def _layers(
    device: str, dtype: str, most: int, native: NativeLibrary | None
) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Square matrices in the format that models use on this device."""
    wanted = _MIN_BYTES[_kind(device)]
    if device == "cpu":
        wanted = max(wanted, _CACHES * last_level_cache())
    wanted = min(wanted, int(_MAX_MEMORY * available_memory(device)))
    count = max(2, min(wanted, most) // _matrix_bytes(dtype))
    if dtype == PACKED:
        if native is None:
            raise UserError("packed products need the compiled kernels")
        stored = _blocks(_SIDE, _SIDE)
        return [NativePackedLinear(native, [stored], _SIDE) for _ in range(count)]
    kind = getattr(torch, dtype)
    wrap, matrix = matrix_kind(kind, device, native), _operand(_SIDE, device, kind)
    return [wrap(matrix.clone(), None) for _ in range(count)]


def _blocks(outputs: int, inputs: int) -> StoredBlocks:
    """Return a matrix of no meaning."""
    size = outputs, inputs // _BLOCK * _BLOCK_BYTES
    return StoredBlocks("Q4_1", np.random.default_rng(0).integers(0, 60, size, np.uint8))


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
        ended = time.perf_counter()
        too_long = ended - begin > effort.most_s
        if repeat or too_long:
            times.append(ended - started)
        if too_long:
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
