"""The conformance suite of tree attention: every shape that a backend must compute correctly, on any device.

The self-test at start is a small part of it; the whole takes a minute on a CPU.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from ssd_serve.base.errors import UserError, in_a_line
from ssd_serve.base.settings import Settings
from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV
from ssd_serve.kernels.attention.backends import Candidate, candidates
from ssd_serve.kernels.attention.contract import AttentionBackend, Maker
from ssd_serve.kernels.attention.sdpa import SdpaAttention
from ssd_serve.kernels.attention.self_test import (
    RATIOS,
    SMALL,
    Heads,
    RequestShape,
    Trial,
    largest_error,
)
from ssd_serve.kernels.device import dtype_name, layout_order
from ssd_serve.kernels.native.library import native_library
from ssd_serve.models.sizes import kv_dtype

HEAD_DIMS = (64, 96, 128, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BATCHES: dict[str, tuple[RequestShape, ...]] = {
    "trees and a chunk": SMALL[0],
    "single rows": SMALL[1],
    "more than is read at once": SMALL[2],
    "parts of a long prefix": (RequestShape(1100, 6), RequestShape(513, 1), RequestShape(512, 2)),
    "one row, nothing before it": (RequestShape(0, 1),),
    "a root without nodes and a deep tree": (RequestShape(300, 1), RequestShape(40, 17, depth=16)),
    "128 nodes": (RequestShape(200, 128, in_order=True),),
    "64 requests": tuple(RequestShape(7 * index, 1 + index % 4) for index in range(64)),
    "prompts": (
        RequestShape(0, 128, depth=0),
        RequestShape(130, 65, depth=0, in_order=True),
        RequestShape(31, 12),
    ),
    "8,192 tokens": (RequestShape(8192 - 16, 16), RequestShape(3, 4)),
    "padding rows": (RequestShape(90, 8), *(RequestShape(0, 1),) * 7),
}
"""The requests of one forward, by name. A padding row is a request that sees only itself."""
LARGE = ("64 requests", "8,192 tokens")
"""Batches that take long in an interpreter."""
_FEW_HEADS = ((4, 1), (2, 2), (4, 2))
"""Query and key-value heads of a quick run."""


@dataclass(frozen=True, slots=True)
class ConformanceRow:
    """The result of a batch with a shape of heads."""

    batch: str
    trial: Trial


def conformance(
    make: Maker, device: str, dtypes: Sequence[torch.dtype] = DTYPES, *, quick: bool = False
) -> Iterator[ConformanceRow]:
    """Try every batch with one shape of heads, and one batch with all shapes, for each dtype.

    `quick` uses few heads and leaves out the largest batches. Errors of the backend are passed on.
    """
    ratios = _FEW_HEADS if quick else RATIOS
    first = next(iter(BATCHES))
    for dtype in dtypes:
        shapes = [
            (name, Heads(*(_FEW_HEADS[0] if quick else (8, 2)), 64, dtype))
            for name in BATCHES
            if not (quick and name in LARGE)
        ]
        shapes += [(first, Heads(*ratio, size, dtype)) for size, ratio in product(HEAD_DIMS, ratios)]
        for name, heads in shapes:
            yield ConformanceRow(name, Trial(heads, largest_error(make, heads, BATCHES[name], device)))


def check_conformance(device: str, say: Callable[[str], None], *, quick: bool = False) -> dict[str, object]:
    """Try every backend of this device and return the result file.

    A row is a result, or `{"unsupported": reason}` if the backend refuses a shape, or `{"raised": message}`,
    which counts as wrong.
    """
    native = native_library(Settings().engine_config())
    dtype = kv_dtype(device, torch.bfloat16, native)
    cache = KVCache(KVLayout((LayerKV(2, 64),), dtype, order=layout_order(device)), 64, device)
    rows: list[dict[str, object]] = []
    for each in candidates(cache, native, Settings().cache_dir.expanduser()):
        if each.missing:
            say(f"{each.name}: {each.missing}")
            continue
        for tried in (torch.float32,) if quick else DTYPES[:2] if each.name == "native" else DTYPES:
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
    """Try one backend with one dtype; an exception becomes a row, so that others are still tried."""
    name = candidate.name
    kind = {"backend": name, "dtype": dtype_name(dtype)}
    make = _FallbackMaker(candidate.make)
    rows: list[dict[str, object]] = []
    refused: set[str] = set()
    try:
        for result in conformance(make, device, (dtype,)):
            if make.refusal:
                refused.add(make.refusal)
                continue
            say(f"{name}, {result.batch}, {result.trial}{'' if result.trial.right else ', wrong'}")
            heads, error = str(result.trial.heads), result.trial.error
            found = {"batch": result.batch, "heads": heads, "error": error, "right": result.trial.right}
            rows.append({**kind, **found})
    except UserError as error:
        refused.add(str(error))
    except Exception as error:  # foreign kernels and compilers raise anything
        raised = in_a_line(error)
        say(f"{name}, {kind['dtype']}: {raised}")
        rows.append({**kind, "raised": raised, "right": False})
    for why in sorted(refused):
        say(f"{name}, {kind['dtype']}: unsupported: {why}")
        rows.append({**kind, "unsupported": why})
    return rows


class _FallbackMaker:
    """Makes a backend, or torch's attention if the backend refuses the shape.

    `refusal` is the reason of the last refusal; empty if the backend was made.
    """

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
