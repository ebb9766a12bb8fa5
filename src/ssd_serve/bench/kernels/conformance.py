"""The conformance suite of tree attention: every shape that a backend must get right, on whatever device.

The self-test at start is a small part of it; the whole takes a minute on a CPU and runs in the tests and on
users' hardware. Knows backends by how they are made.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ssd_serve.kernels.attention.contract import Maker
from ssd_serve.kernels.attention.self_test import RATIOS, SMALL, Heads, RequestShape, Trial, largest_error

HEAD_DIMS = (64, 96, 128, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BATCHES: dict[str, tuple[RequestShape, ...]] = {
    "trees beside a chunk": SMALL[0],
    "single rows": SMALL[1],
    "more than is read at once": SMALL[2],
    "parts of a long prefix": (RequestShape(1100, 6), RequestShape(513, 1), RequestShape(512, 2)),
    "one row, nothing before it": (RequestShape(0, 1),),
    "a root without nodes beside a deep tree": (RequestShape(300, 1), RequestShape(40, 17, depth=16)),
    "128 nodes": (RequestShape(200, 128, in_order=True),),
    "a crowd": tuple(RequestShape(7 * index, 1 + index % 4) for index in range(64)),
    "prompts": (
        RequestShape(0, 128, depth=0),
        RequestShape(130, 65, depth=0, in_order=True),
        RequestShape(31, 12),
    ),
    "8,192 tokens": (RequestShape(8192 - 16, 16), RequestShape(3, 4)),
    "padding rows": (RequestShape(90, 8), *(RequestShape(0, 1),) * 7),
}
"""What is asked of one forward, by name. A padding row is a request that sees only itself."""
LARGE = ("a crowd", "8,192 tokens")
"""What takes long in an interpreter."""
_FEW_HEADS = ((4, 1), (2, 2), (4, 2))
"""Query and key-value heads where it must not take long."""


@dataclass(frozen=True, slots=True)
class ConformanceRow:
    """One batch with one shape of heads."""

    batch: str
    trial: Trial


def conformance(
    make: Maker, device: str, dtypes: Sequence[torch.dtype] = DTYPES, *, quick: bool = False
) -> Iterator[ConformanceRow]:
    """Every batch with one shape of heads, and one batch with all shapes, for each dtype; `quick`: with
    few heads, and without the largest. Errors that the backend raises are the caller's."""
    for dtype in dtypes:
        yield from every_batch(make, device, dtype, quick=quick)
        yield from every_shape(make, device, dtype, quick=quick)


def every_batch(make: Maker, device: str, dtype: torch.dtype, *, quick: bool) -> Iterator[ConformanceRow]:
    """The first part: all batches, with one shape of heads."""
    for name, asked in BATCHES.items():
        if quick and name in LARGE:
            continue
        heads = Heads(*(_FEW_HEADS[0] if quick else (8, 2)), 64, dtype)
        yield ConformanceRow(name, Trial(heads, largest_error(make, heads, asked, device)))


def every_shape(make: Maker, device: str, dtype: torch.dtype, *, quick: bool) -> Iterator[ConformanceRow]:
    """The second part: all shapes of heads, with one batch."""
    name, asked = next(iter(BATCHES.items()))
    for head_dim in HEAD_DIMS:
        for query_heads, kv_heads in _FEW_HEADS if quick else RATIOS:
            heads = Heads(query_heads, kv_heads, head_dim, dtype)
            yield ConformanceRow(name, Trial(heads, largest_error(make, heads, asked, device)))
