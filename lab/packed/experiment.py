"""Weight reads a second of few-row products: by the compiled kernels, by oneDNN, by torch's own `linear`.

Streams a set of matrices that no cache holds through each of them, interleaved. Run it alone on the machine:
whatever else reads memory is measured too.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ssd_serve.bench.tables import text_table
from ssd_serve.errors import UserError
from ssd_serve.kernels.native.int8 import NativeInt8Matrix
from ssd_serve.kernels.native.int8 import can_multiply_int8 as native_multiplies_int8
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.native.products import NativeMatrix, can_multiply_bf16
from ssd_serve.kernels.products.int8 import Int8Matrix, can_multiply_int8, quantise
from ssd_serve.kernels.products.packed import PackedMatrix, can_pack
from ssd_serve.models.weights.linear import DenseLinear, Linear

INT8 = "int8"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, INT8: torch.int8}
_PAUSE_S = 0.01

Make = Callable[[torch.Tensor], Linear]


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """What is measured. `outputs` and `inputs` are the shape of each matrix."""

    dtypes: Sequence[str] = ("bf16", INT8)
    threads: Sequence[int] = (1, 2)
    rows: Sequence[int] = (1, 4, 8, 16)
    matrices: int = 64
    outputs: int = 2816
    inputs: int = 1024
    repeats: int = 7


def measure(plan: PackedPlan, native: NativeLibrary | None) -> dict[str, object]:
    """Time one pass over all matrices for each kernel, numbers of threads and rows; medians and bests."""
    results: list[dict[str, object]] = []
    for dtype in plan.dtypes:
        kernels = kernels_of(dtype, native)
        if not kernels:
            raise UserError(f"this machine has no {dtype} products of few rows; there is nothing to measure")
        with torch.inference_mode():
            results += _compare(dtype, kernels, plan)
    return {
        "bench": "packed",
        "matrices": plan.matrices,
        "shape": [plan.outputs, plan.inputs],
        "repeats": plan.repeats,
        "results": results,
    }


def kernels_of(dtype: str, native: NativeLibrary | None) -> dict[str, Make]:
    """The kernels that this machine has for a dtype, by name; each makes a layer of a float32 weight."""
    if dtype == INT8:
        found: dict[str, Make] = {}
        if can_multiply_int8():
            found["onednn"] = lambda weight: Int8Matrix(quantise(weight))
        if native is not None and native_multiplies_int8(native):
            found["compiled"] = lambda weight: NativeInt8Matrix(native, quantise(weight))
        return found
    kind = DTYPES[dtype]
    found = {"torch": lambda weight: DenseLinear(weight.to(kind))}
    if can_pack(kind):
        found["onednn"] = lambda weight: PackedMatrix(weight.to(kind))
    if kind is torch.bfloat16 and native is not None and can_multiply_bf16(native):
        found["compiled"] = lambda weight: NativeMatrix(native, weight.to(kind))
    return found


def _compare(dtype: str, kernels: dict[str, Make], plan: PackedPlan) -> list[dict[str, object]]:
    generator = torch.Generator().manual_seed(0)
    shape = (plan.outputs, plan.inputs)
    layers: dict[str, list[Linear]] = {name: [] for name in kernels}
    for _ in range(plan.matrices):
        weight = torch.randn(shape, generator=generator)
        for name, make in kernels.items():
            layers[name].append(make(weight))
    size = plan.matrices * plan.outputs * plan.inputs * DTYPES[dtype].itemsize
    results: list[dict[str, object]] = []
    before = torch.get_num_threads()
    try:
        for threads in plan.threads:
            torch.set_num_threads(threads)
            for rows in plan.rows:
                x = torch.randn((rows, plan.inputs), generator=generator).to(_rows_dtype(dtype))
                times = _interleaved([partial(_pass, each, x) for each in layers.values()], plan.repeats)
                where = {"dtype": dtype, "threads": threads, "rows": rows}
                results += [
                    {**where, "kernel": name, **_figures(seconds, size)}
                    for name, seconds in zip(kernels, times, strict=True)
                ]
    finally:
        torch.set_num_threads(before)
    return results


def _rows_dtype(dtype: str) -> torch.dtype:
    return torch.bfloat16 if dtype == INT8 else DTYPES[dtype]


def _figures(seconds: Sequence[float], size: int) -> dict[str, object]:
    median, best = statistics.median(seconds), min(seconds)
    return {
        "ms": round(median * 1e3, 3),
        "best_ms": round(best * 1e3, 3),
        "gb_per_s": round(size / median / 1e9, 2),
        "best_gb_per_s": round(size / best / 1e9, 2),
    }


def _pass(layers: Sequence[Linear], x: torch.Tensor) -> None:
    for layer in layers:
        layer(x)


def _interleaved(passes: Sequence[Callable[[], None]], repeats: int) -> list[list[float]]:
    """Seconds of every repeat of every pass, taken in turn after one warm-up of each."""
    times: list[list[float]] = [[] for _ in passes]
    for repeat in range(repeats + 1):
        for run, seen in zip(passes, times, strict=True):
            time.sleep(_PAUSE_S)
            started = time.perf_counter()
            run()
            if repeat:
                seen.append(time.perf_counter() - started)
    return times


def table(result: Mapping[str, Any]) -> str:
    """The result for people."""
    rows = (
        (*(row[name] for name in ("dtype", "threads", "rows", "kernel")), row["ms"], row["gb_per_s"])
        for row in result["results"]
    )
    head = ("dtype", "threads", "rows", "kernel", "ms", "GB/s")
    return f"{result['matrices']} matrices {result['shape']}: medians\n{text_table(head, rows)}"
