"""Batch invariance: whether an attention backend gives a row the same bits alone and in any batch.

Tried before it serves, on this device: what a foreign kernel chooses by the shape of a batch is seen nowhere
else. Knows backends by how they are made; no model.
"""

import random
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, Generic

import numpy as np
import numpy.typing as npt
import torch

from ssd_serve.cache.kv import KVCache, KVLayout
from ssd_serve.kernels.attention.contract import AttentionBackend, Capturable, Maker, PlanT
from ssd_serve.kernels.attention.self_test import SMALL, Heads, RequestShape, random_batch
from ssd_serve.kernels.batch import Batch, Int64Array, offsets_of
from ssd_serve.kernels.device import layout_order

_WINDOW = 11
_BATCHES = ((*SMALL[0], RequestShape(1, 1)), (RequestShape(530, 20), RequestShape(600, 9, depth=0)))


def depends_on_batch(make: Maker, form: Heads, device: str) -> bool:
    """Return True if some row of trees, chunks and single rows changes when it is computed alone."""
    return any(_depends(make, form, device, asked) for asked in _BATCHES)


def _depends(make: Maker, form: Heads, device: str, asked: tuple[RequestShape, ...]) -> bool:
    slots = 64 + sum(each.prefix + each.rows for each in asked)
    layers = (form.layer(), form.layer(_WINDOW))
    cache = KVCache(KVLayout(layers, form.dtype, order=layout_order(device)), slots, device)
    generator = torch.Generator().manual_seed(form.heads)
    for layer in range(len(layers)):
        filled = torch.randn((slots, *layers[0].stored), generator=generator)
        cache.write(layer, torch.arange(slots, device=device), filled.to(device, form.dtype))
    backend = make(cache, form.heads)
    batch = random_batch(random.Random(slots), slots, asked)
    queries = torch.randn((batch.rows, form.heads, form.head_dim), generator=generator)
    queries = queries.to(device, form.dtype)
    return any(_differs(backend, layer, queries, batch) for layer in range(len(layers)))


def _differs(backend: AttentionBackend[Any], layer: int, queries: torch.Tensor, batch: Batch) -> bool:
    together = backend.run(layer, queries, backend.plan(batch))
    rows = unrolled(batch)
    return any(
        not torch.equal(
            backend.run(layer, queries[row : row + 1], backend.plan(single(rows, row)))[0], together[row]
        )
        for row in range(batch.rows)
    )


def unrolled(batch: Batch) -> Batch:
    """The same rows, each a request with a prefix and one tree slot; it attends to the same slots.

    Raises ValueError where a row's ancestors do not follow the prefix without a gap: their index would not be
    their position.
    """
    if batch.requests == batch.rows == len(batch.tree_slots):
        return batch  # plain decoding
    request = np.repeat(np.arange(batch.requests), np.diff(batch.request_offsets))  # [rows]
    ancestor_rows, slots = _ancestors(batch, request)
    ancestors = np.bincount(ancestor_rows, minlength=batch.rows)  # [rows], how many
    committed = np.diff(batch.prefix_offsets)[request]  # [rows]
    offsets = offsets_of(committed + ancestors)
    prefix = np.empty(offsets[-1], dtype=np.int32)
    prefix[_ranges(offsets[:-1], committed)] = batch.prefix_slots[
        _ranges(batch.prefix_offsets[:-1][request], committed)
    ]
    prefix[_ranges(offsets[:-1] + committed, ancestors)] = slots
    return replace(
        batch,
        request_offsets=np.arange(batch.rows + 1, dtype=np.int32),
        prefix_slots=prefix,
        prefix_offsets=offsets,
        tree_slots=batch.write_slots.astype(np.int32),
        tree_positions=batch.positions,
        tree_offsets=np.arange(batch.rows + 1, dtype=np.int32),
        ancestry=np.ones((batch.rows, 1), dtype=np.uint64),
    )


def single(batch: Batch, row: int) -> Batch:
    """Return one row of an unrolled batch as a batch."""
    prefix = batch.prefix_slots[batch.prefix_offsets[row] : batch.prefix_offsets[row + 1]]
    own = slice(row, row + 1)
    return replace(
        batch,
        tokens=batch.tokens[own],
        positions=batch.positions[own],
        write_slots=batch.write_slots[own],
        request_offsets=offsets_of([1]),
        prefix_slots=prefix,
        prefix_offsets=offsets_of([len(prefix)]),
        tree_slots=batch.tree_slots[own],
        tree_positions=batch.tree_positions[own],
        tree_offsets=offsets_of([1]),
        ancestry=batch.ancestry[own],
        rows_wanted=np.zeros(1, dtype=np.int64),
    )


def _ancestors(batch: Batch, request: Int64Array) -> tuple[Int64Array, npt.NDArray[np.int32]]:
    """Rows and the slots of their ancestors, a row's own left out: by row, then by position."""
    rows, bits = np.nonzero(batch.ancestry_bits())
    entries = batch.tree_offsets[:-1][request[rows]] + bits
    others = batch.tree_slots[entries] != batch.write_slots[rows]
    rows, entries = rows[others], entries[others]
    order = np.lexsort((batch.tree_positions[entries], rows))
    rows, entries = rows[order], entries[order]
    starts = np.searchsorted(rows, rows)  # where each one's row begins
    expected = np.diff(batch.prefix_offsets)[request[rows]] + np.arange(len(rows)) - starts
    if not np.array_equal(batch.tree_positions[entries], expected):
        raise ValueError("a row's ancestors must follow its prefix, one for each position")
    return rows, batch.tree_slots[entries]


def _ranges(starts: npt.NDArray[np.integer], lengths: npt.NDArray[np.integer]) -> Int64Array:
    """`starts[i]`, `starts[i]` + 1, ... `lengths[i]` of them, one i after the other."""
    before = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return before + np.arange(len(before), dtype=np.int64)


class UnrolledAttention(Generic[PlanT]):
    """`AttentionBackend` that hands every row to `inner` as a request of its own."""

    def __init__(self, inner: AttentionBackend[PlanT]) -> None:
        self._inner = inner

    @property
    def dtype(self) -> torch.dtype:
        return self._inner.dtype

    def plan(self, batch: Batch) -> PlanT:
        return self._inner.plan(unrolled(batch))

    def plan_to_capture(self, batch: Batch) -> PlanT | None:
        inner = self._inner
        plan: PlanT | None = inner.plan_to_capture(unrolled(batch)) if isinstance(inner, Capturable) else None
        return plan

    def captured_as(self, plan: PlanT) -> Hashable | None:
        return self._inner.captured_as(plan) if isinstance(self._inner, Capturable) else None

    def write(self, layer: int, stored: torch.Tensor, plan: PlanT) -> None:
        self._inner.write(layer, stored, plan)

    def run(self, layer: int, queries: torch.Tensor, plan: PlanT) -> torch.Tensor:
        return self._inner.run(layer, queries, plan)

    def run_with_lse(
        self, layer: int, queries: torch.Tensor, plan: PlanT
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inner.run_with_lse(layer, queries, plan)
