"""`ssd bench kernels`: the time of every tree attention backend that works here, by the shape of the batch.

The benchmark times attention over the KV caches of many layers, with backends interleaved, and compares a layer
with the roofline. That is the larger of two times: reading keys and values once for each request, and the
products. On GPUs the layers exceed every hardware cache; on CPUs there are eight, which a large cache may hold.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ssd_serve.base.errors import in_a_line
from ssd_serve.base.settings import Settings
from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV
from ssd_serve.kernels.attention.backends import candidates
from ssd_serve.kernels.attention.contract import AttentionBackend
from ssd_serve.kernels.attention.self_test import RequestShape, first_failure, random_batch
from ssd_serve.kernels.batch import Batch
from ssd_serve.kernels.device import dtype_name, layout_order
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.roof import Effort, Roof, measure_roof
from ssd_serve.models.sizes import kv_dtype

SHAPES: dict[str, tuple[RequestShape, ...]] = {
    "1 row after 512": (RequestShape(512, 1),),
    "1 row after 4,096": (RequestShape(4096, 1),),
    "16 nodes after 512": (RequestShape(512, 17),),
    "16 nodes after 4,096": (RequestShape(4096, 17),),
    "64 nodes after 4,096": (RequestShape(4096, 65),),
    "8 x 8 nodes after 1,024": (RequestShape(1024, 9),) * 8,
    "32 x 1 row after 1,024": (RequestShape(1024, 1),) * 32,
    "512 rows of a prompt": (RequestShape(0, 512, depth=0),),
}
_MIN_LAYERS = 8
_MAX_LAYERS = 256
_KEPT_BYTES = 512 * 2**20
"""Bytes of keys and values on GPUs: several times the size of their caches."""
COLUMNS = ("shape", "backend", "ms", "quartiles", "gb_per_s", "of_roof")


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """Heads of the model, repeats (at least two), and torch's name of the device."""

    device: str = "cpu"
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    repeats: int = 7


def run_kernels(
    plan: KernelPlan, native: NativeLibrary | None, say: Callable[[str], None]
) -> dict[str, object]:
    """Time every backend on every shape and return the result file, with the reasons of skipped backends."""
    dtype = kv_dtype(plan.device, torch.bfloat16, native)
    say("measuring the device's roof")
    roof = measure_roof(plan.device, dtype_name(dtype), effort=Effort((1, 4), 9), native=native)
    rows: list[dict[str, object]] = []
    skipped: list[dict[str, str]] = []
    for name, asked in SHAPES.items():
        with torch.inference_mode():
            found, reasons = _time_shape(plan, dtype, asked, native, roof)
        rows += [{"shape": name, **row} for row in found]
        skipped += [{"shape": name, "backend": each, "reason": reason} for each, reason in reasons.items()]
        for each, reason in reasons.items():
            say(f"{name}: {each} is skipped: {reason}")
        say(f"{name}: " + (", ".join(f"{row['backend']} {row['ms']} ms" for row in found) or "no backend"))
    return {
        "benchmark": "kernels",
        "device": plan.device,
        "dtype": dtype_name(dtype),
        "heads": [plan.heads, plan.kv_heads, plan.head_dim],
        "bandwidth_gb_per_s": round(roof.bandwidth / 1e9, 1),
        "gflops": round(roof.flops / 1e9),
        "threads": torch.get_num_threads(),
        "results": rows,
        "skipped": skipped,
    }


def _time_shape(
    plan: KernelPlan,
    dtype: torch.dtype,
    asked: Sequence[RequestShape],
    native: NativeLibrary | None,
    roof: Roof,
) -> tuple[list[dict[str, object]], dict[str, str]]:
    """Return a row for each backend that works, and the reasons of the others."""
    slots = 64 + sum(each.prefix + each.rows for each in asked)
    size = _bytes(plan, dtype, asked)
    layers = layers_for(plan.device, size)
    shapes = (LayerKV(plan.kv_heads, plan.head_dim),) * layers
    cache = KVCache(KVLayout(shapes, dtype, order=layout_order(plan.device)), slots, plan.device)
    batch = random_batch(random.Random(0), slots, asked, scattered=False)
    queries = torch.randn((batch.rows, plan.heads, plan.head_dim), device=plan.device).to(dtype)
    backends: dict[str, AttentionBackend[Any]] = {}
    skipped: dict[str, str] = {}
    for each in candidates(cache, native, Settings().cache_dir.expanduser()):
        if each.missing:
            continue
        heads = ((plan.heads, plan.kv_heads),)
        wrong = first_failure(each.make, dtype, plan.head_dim, plan.device, heads)
        if wrong:
            skipped[each.name] = wrong
            continue
        try:
            backends[each.name] = each.make(cache, plan.heads)
        except Exception as error:  # foreign kernels and compilers raise any exception
            skipped[each.name] = in_a_line(error)
    seconds = _interleaved(backends, batch, queries, plan.repeats, layers, skipped)
    least = min_seconds(plan, dtype, asked, batch, roof)
    return [_row(name, each, size, least) for name, each in seconds.items()], skipped


def layers_for(device: str, size: int) -> int:
    """Return the number of layers of `size` bytes that are read in turn."""
    if device == "cpu":
        return _MIN_LAYERS
    return min(max(_MIN_LAYERS, -(-_KEPT_BYTES // size)), _MAX_LAYERS)


def _interleaved(
    backends: dict[str, AttentionBackend[Any]],
    batch: Batch,
    queries: torch.Tensor,
    repeats: int,
    layers: int,
    skipped: dict[str, str],
) -> dict[str, list[float]]:
    """Return the seconds of a layer, planning included; backends that raise are added to `skipped`."""
    seconds: dict[str, list[float]] = {name: [] for name in backends}
    for turn in range(repeats + 1):
        for name, backend in backends.items():
            if name in skipped:
                continue
            try:
                taken = _forward(backend, batch, queries, layers)
            except Exception as error:  # foreign kernels and compilers raise anything
                skipped[name] = in_a_line(error)
                continue
            if turn:
                seconds[name].append(taken / layers)
    return {name: found for name, found in seconds.items() if name not in skipped}


def _forward(backend: AttentionBackend[Any], batch: Batch, queries: torch.Tensor, layers: int) -> float:
    started = time.perf_counter()
    planned = backend.plan(batch)
    for layer in range(layers):
        backend.run(layer, queries, planned)
    if queries.device.type != "cpu":
        torch.cuda.synchronize(queries.device)
    return time.perf_counter() - started


def _bytes(plan: KernelPlan, dtype: torch.dtype, asked: Sequence[RequestShape]) -> int:
    entries = sum(each.prefix + each.rows for each in asked)
    return entries * 2 * plan.kv_heads * plan.head_dim * dtype.itemsize


def min_seconds(
    plan: KernelPlan, dtype: torch.dtype, asked: Sequence[RequestShape], batch: Batch, roof: Roof
) -> float:
    """Return the lower bound of the device: only entries that a token sees need products."""
    products = sum(each.rows * each.prefix for each in asked) + int(batch.ancestry_bits().sum())
    flops = 4.0 * products * plan.heads * plan.head_dim
    return max(_bytes(plan, dtype, asked) / roof.bandwidth, flops / roof.flops)


def _row(name: str, seconds: Sequence[float], size: int, least: float) -> dict[str, object]:
    low, middle, high = statistics.quantiles(seconds, n=4)
    return {
        "backend": name,
        "ms": round(1e3 * middle, 3),
        "quartiles": [round(1e3 * low, 3), round(1e3 * high, 3)],
        "gb_per_s": round(size / middle / 1e9, 1),
        "of_roof": round(least / middle, 2),
    }
