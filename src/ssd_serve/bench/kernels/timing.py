"""`ssd bench kernels`: every tree attention backend that works here, by the shape of the batch.

Times attention over the caches of many layers, backends interleaved, and compares a layer with the roof:
keys and values read once for each request, or the products, whichever takes longer. On GPUs there are so many
layers that no processor cache holds them all; on CPUs there are eight, which a large cache may hold where the
shape is small. Run it alone on the machine. Knows backends and batches, not models.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ssd_serve.app.plan.roof import Effort, Roof, measure_roof
from ssd_serve.base.errors import UserError, in_a_line
from ssd_serve.base.settings import Settings
from ssd_serve.bench.kernels.conformance import DTYPES, conformance
from ssd_serve.bench.tables import markdown_table
from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV
from ssd_serve.kernels.attention.backends import Candidate, candidates
from ssd_serve.kernels.attention.contract import AttentionBackend, Maker
from ssd_serve.kernels.attention.sdpa import SdpaAttention
from ssd_serve.kernels.attention.self_test import RequestShape, first_failure, random_batch
from ssd_serve.kernels.batch import Batch
from ssd_serve.kernels.device import dtype_name, layout_order
from ssd_serve.kernels.native.library import NativeLibrary, native_library
from ssd_serve.models.sizes import attention_dtype

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
"""Keys and values that are read in turn on GPUs: a few times what their caches hold."""


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """The model's shape and how often each is timed, at least twice. `device` is torch's name."""

    device: str = "cpu"
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    repeats: int = 7


def run_kernels(
    plan: KernelPlan, native: NativeLibrary | None, say: Callable[[str], None]
) -> dict[str, object]:
    """`{"benchmark", "results", "skipped", ...}`: a row for each shape and backend that works, and why
    others do not."""
    dtype = attention_dtype(plan.device, torch.bfloat16)
    say("measuring the device's roof")
    roof = measure_roof(plan.device, dtype_name(dtype), effort=Effort((1, 4), 9))
    rows: list[dict[str, object]] = []
    skipped: list[dict[str, str]] = []
    for name, asked in SHAPES.items():
        with torch.inference_mode():
            found, reasons = _shape(plan, dtype, asked, native, roof)
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


def check_conformance(device: str, say: Callable[[str], None], *, quick: bool = False) -> dict[str, object]:
    """`{"right", "results", ...}`: every backend that this device has through the conformance suite.

    A row is a result, or `{"unsupported": why}` where the backend refuses, or `{"raised": what}`, which is
    not right.
    """
    native = native_library(Settings().engine_config())
    dtype = attention_dtype(device, torch.bfloat16)
    cache = KVCache(KVLayout((LayerKV(2, 64),), dtype, order=layout_order(device)), 64, device)
    rows: list[dict[str, object]] = []
    for each in candidates(cache, native, Settings().cache_dir.expanduser()):
        if each.missing:
            say(f"{each.name}: {each.missing}")
            continue
        for tried in (torch.float32,) if quick or each.name == "native" else DTYPES:
            rows += _conforms(each, device, tried, say)
    judged = [row["right"] for row in rows if "right" in row]
    return {
        "benchmark": "conformance",
        "device": device,
        "right": bool(judged) and all(judged),
        "results": rows,
    }


def _conforms(
    candidate: Candidate, device: str, dtype: torch.dtype, say: Callable[[str], None]
) -> list[dict[str, object]]:
    """One backend with one dtype; whatever it raises is a row, so that the others are still tried."""
    name = candidate.name
    kind = {"backend": name, "dtype": dtype_name(dtype)}
    make = _Willing(candidate.make)
    rows: list[dict[str, object]] = []
    refused: set[str] = set()
    try:
        for result in conformance(make, device, (dtype,)):
            if make.refusal:
                refused.add(make.refusal)
                continue
            wrong = "" if result.trial.right else ", wrong"
            say(f"{name}, {result.batch}, {result.trial}{wrong}")
            heads, error = str(result.trial.heads), result.trial.error
            found = {"batch": result.batch, "heads": heads, "error": error, "right": result.trial.right}
            rows.append({**kind, **found})
    except UserError as error:
        refused.add(str(error))
    except Exception as error:  # whatever a foreign kernel or its compiler raises
        raised = in_a_line(error)
        say(f"{name}, {kind['dtype']}: {raised}")
        rows.append({**kind, "raised": raised, "right": False})
    for why in sorted(refused):
        say(f"{name}, {kind['dtype']}: unsupported: {why}")
        rows.append({**kind, "unsupported": why})
    return rows


class _Willing:
    """Makes a backend, or torch's attention where that one refuses the shape, so that the suite goes on to
    the shapes that it takes. `refusal` says why it did, for the newest one; empty: it did not."""

    def __init__(self, make: Maker) -> None:
        self._make = make
        self.refusal = ""

    def __call__(self, cache: KVCache, heads: int) -> AttentionBackend[Any]:
        self.refusal = ""
        try:
            return self._make(cache, heads)
        except UserError as error:
            self.refusal = str(error)
            return SdpaAttention(cache, heads)


def table(result: Mapping[str, Any]) -> str:
    """Markdown."""
    heads, kv_heads, head_dim = result["heads"]
    rows = (
        (
            row["shape"],
            row["backend"],
            f"{row['ms']} ({row['quartiles'][0]} to {row['quartiles'][1]})",
            row["gb_per_s"],
            row["of_roof"],
        )
        for row in result["results"]
    )
    return (
        markdown_table(("batch", "backend", "ms a layer (quartiles)", "GB/s", "of the roof"), rows)
        + f"\n\n{heads} query heads, {kv_heads} KV heads of {head_dim}, {result['dtype']}, "
        f"{result['threads']} threads; the device reads {result['bandwidth_gb_per_s']} GB/s and computes "
        f"{result['gflops']} GFLOP/s in torch's product of large matrices, which a kernel may beat."
    )


def _shape(
    plan: KernelPlan,
    dtype: torch.dtype,
    asked: Sequence[RequestShape],
    native: NativeLibrary | None,
    roof: Roof,
) -> tuple[list[dict[str, object]], dict[str, str]]:
    """A row for each backend that works, and why others do not."""
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
        except Exception as error:  # whatever a foreign kernel or its compiler raises
            skipped[each.name] = in_a_line(error)
    seconds = _interleaved(backends, batch, queries, plan.repeats, layers, skipped)
    least = min_seconds(plan, dtype, asked, batch, roof)
    return [_row(name, each, size, least) for name, each in seconds.items()], skipped


def layers_for(device: str, size: int) -> int:
    """How many layers of `size` bytes are read in turn. On CPUs products make more layers slow."""
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
    """Seconds a layer, planning included once for all of them. Those that raise are put into `skipped`."""
    seconds: dict[str, list[float]] = {name: [] for name in backends}
    for turn in range(repeats + 1):
        for name, backend in backends.items():
            if name in skipped:
                continue
            try:
                taken = _forward(backend, batch, queries, layers)
            except Exception as error:  # whatever a foreign kernel or its compiler raises
                skipped[name] = in_a_line(error)
                continue
            if turn:
                seconds[name].append(taken / layers)
    return {name: found for name, found in seconds.items() if name not in skipped}


def _forward(backend: AttentionBackend[Any], batch: Batch, queries: torch.Tensor, layers: int) -> float:
    """Seconds of one plan and all layers."""
    started = time.perf_counter()
    planned = backend.plan(batch)
    for layer in range(layers):
        backend.run(layer, queries, planned)
    if queries.device.type != "cpu":
        torch.cuda.synchronize(queries.device)
    return time.perf_counter() - started


def _bytes(plan: KernelPlan, dtype: torch.dtype, asked: Sequence[RequestShape]) -> int:
    """Keys and values of all requests, each read once."""
    entries = sum(each.prefix + each.rows for each in asked)
    return entries * 2 * plan.kv_heads * plan.head_dim * dtype.itemsize


def min_seconds(
    plan: KernelPlan, dtype: torch.dtype, asked: Sequence[RequestShape], batch: Batch, roof: Roof
) -> float:
    """What the device cannot beat: only entries that a row sees need products."""
    products = sum(each.rows * each.prefix for each in asked) + int(batch.ancestry_bits().sum())
    return roof.seconds(_bytes(plan, dtype, asked), 4.0 * products * plan.heads * plan.head_dim)


def _row(name: str, seconds: Sequence[float], size: int, least: float) -> dict[str, object]:
    low, middle, high = statistics.quantiles(seconds, n=4)
    return {
        "backend": name,
        "ms": round(1e3 * middle, 3),
        "quartiles": [round(1e3 * low, 3), round(1e3 * high, 3)],
        "gb_per_s": round(size / middle / 1e9, 1),
        "of_roof": round(least / middle, 2),
    }
