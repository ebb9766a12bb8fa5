"""Weight reads a second of few-row products: packed by oneDNN against torch's own `linear`.

Streams a set of matrices that no cache holds through both, interleaved, on one thread unless told otherwise.
Run it alone on the machine: whatever else reads memory is measured too.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ssd_serve.bench.machine import hardware, versions
from ssd_serve.errors import UserError
from ssd_serve.kernels.packed import PackedMatrix, can_pack
from ssd_serve.models.linear import DenseLinear

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ROWS = (1, 2, 4, 8, 16, 32)
_PAUSE_S = 0.01


def measure(
    *,
    dtype: str = "bf16",
    rows: Sequence[int] = _ROWS,
    matrices: int = 64,
    outputs: int = 2816,
    inputs: int = 1024,
    repeats: int = 7,
    threads: int = 1,
) -> dict[str, object]:
    """Time one pass over all matrices for each number of rows; medians, bests, GB/s of the medians."""
    kind = _DTYPES[dtype]
    if not can_pack(kind):
        raise UserError(f"this machine cannot pack {dtype} matrices; there is nothing to compare")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            results = _compare(kind, rows, (matrices, outputs, inputs), repeats)
    finally:
        torch.set_num_threads(before)
    return {
        "bench": "packed",
        "dtype": dtype,
        "matrices": matrices,
        "shape": [outputs, inputs],
        "threads": threads,
        "repeats": repeats,
        "results": results,
        "hardware": hardware(),
        "versions": versions(),
    }


def _compare(
    dtype: torch.dtype, rows: Sequence[int], shape: tuple[int, int, int], repeats: int
) -> list[dict[str, object]]:
    matrices, outputs, inputs = shape
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn((outputs, inputs), generator=generator).to(dtype) for _ in range(matrices)]
    dense = [DenseLinear(weight) for weight in weights]
    packed = [PackedMatrix(weight) for weight in weights]
    size = matrices * outputs * inputs * dtype.itemsize
    results: list[dict[str, object]] = []
    for count in rows:
        x = torch.randn((count, inputs), generator=generator).to(dtype)
        equal = all(torch.equal(p(x), d(x)) for p, d in zip(packed[:4], dense[:4], strict=True))
        times = _interleaved([partial(_pass, packed, x), partial(_pass, dense, x)], repeats)
        medians = [statistics.median(each) for each in times]
        results.append(
            {
                "rows": count,
                "packed_ms": round(medians[0] * 1e3, 3),
                "packed_best_ms": round(min(times[0]) * 1e3, 3),
                "packed_gb_per_s": round(size / medians[0] / 1e9, 2),
                "packed_best_gb_per_s": round(size / min(times[0]) / 1e9, 2),
                "dense_ms": round(medians[1] * 1e3, 3),
                "dense_gb_per_s": round(size / medians[1] / 1e9, 2),
                "bit_identical": equal,
            }
        )
    return results


def _pass(layers: Sequence[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor) -> None:
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


def table(result: dict[str, object]) -> str:
    """The result for people."""
    lines = [
        f"{result['matrices']} matrices {result['shape']}, {result['dtype']}, {result['threads']} thread(s)",
        f"{'rows':>5}{'packed ms':>11}{'GB/s':>7}{'dense ms':>10}{'GB/s':>7}  bit-identical",
    ]
    rows = result["results"]
    lines += [
        f"{row['rows']:>5}{row['packed_ms']:>11.2f}{row['packed_gb_per_s']:>7.1f}"
        f"{row['dense_ms']:>10.2f}{row['dense_gb_per_s']:>7.1f}  {row['bit_identical']}"
        for row in (rows if isinstance(rows, list) else [])
    ]
    return "\n".join(lines)
