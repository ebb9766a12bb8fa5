"""Attention of one row at a time with torch's scaled_dot_product_attention: the same bits in any batch.

The operator's order of additions depends on the number of rows, on the length and, on CPUs, on the number of
threads. So it gets one row, exactly the context that the row sees, in order of position, and one thread. A
context is read in place or from a copy that several rows share. On GPUs, where the kernel may depend on how
the context lies, it is always a copy of its own. Takes unrolled batches only (`kernels.unrolled`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from ssd_serve.cache.kv import KVCache
from ssd_serve.kernels.attention.sdpa import log_sum_exp
from ssd_serve.kernels.batch import Batch, Int64Array
from ssd_serve.kernels.rows.fixed_rows import threads


@dataclass(frozen=True, slots=True)
class _Context:
    """Slots that some rows see, each a part of them."""

    slots: slice | torch.Tensor
    """A span of slots, or the slots to gather: int64 [context]."""
    rows: tuple[tuple[int, slice], ...]
    """Rows of the batch, and which part of the context each sees."""


@dataclass(frozen=True, slots=True)
class SdpaRowsPlan:
    """Plan of a forward: write slots on the device, and the contexts for each distinct window."""

    write_slots: torch.Tensor  # [rows], int64
    contexts: dict[int | None, list[_Context]]


class SdpaRows:
    """`AttentionBackend` for unrolled batches. `heads` is the number of query heads."""

    def __init__(self, cache: KVCache, heads: int) -> None:
        self._cache = cache
        self._device = cache.device
        self._heads = heads
        self._layers = cache.layout.layers
        self._layer_windows = [layer.window for layer in cache.layout.layers]

    @property
    def dtype(self) -> torch.dtype:
        """The cache's, and that of queries and results."""
        return self._cache.layout.dtype

    def plan(self, batch: Batch) -> SdpaRowsPlan:
        """Find the rows' contexts, and which of them are parts of others. Raises ValueError for a batch that
        is not unrolled."""
        if not batch.requests == batch.rows == len(batch.tree_slots):
            raise ValueError("rows must come one by one: unroll the batch")
        shared = list(self._shared(batch))
        contexts = {
            window: [self._context(batch, slots, rows, window) for slots, rows in shared]
            for window in dict.fromkeys(self._layer_windows)
        }
        return SdpaRowsPlan(torch.from_numpy(batch.write_slots).to(self._device), contexts)

    def write(self, layer: int, stored: torch.Tensor, plan: SdpaRowsPlan) -> None:
        """Store keys and values of all rows."""
        self._cache.write(layer, plan.write_slots, stored)

    def run(self, layer: int, queries: torch.Tensor, plan: SdpaRowsPlan) -> torch.Tensor:
        """Attend: [rows, heads, head_dim] -> [rows, heads * head_dim]."""
        result = queries.new_empty(queries.shape[0], queries.shape[1] * self._layers[layer].value_dim)
        with threads(1):
            for row, keys, values in self._seen(layer, plan):
                query = queries[row].view(1, keys.shape[0], -1, queries.shape[2])
                attended = F.scaled_dot_product_attention(
                    query, keys.unsqueeze(0), values.unsqueeze(0), scale=self._layers[layer].scale
                )
                result[row] = attended.view(-1)
        return result

    def run_with_lse(
        self, layer: int, queries: torch.Tensor, plan: SdpaRowsPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and the log-sum-exp of each row's scores: float32 [rows, heads]."""
        lse = torch.empty(queries.shape[:2], device=self._device)
        for row, keys, _ in self._seen(layer, plan):
            mask = keys.new_zeros((1, keys.shape[1]))
            lse[row] = log_sum_exp(queries[row : row + 1], keys, mask, self._layers[layer].scale)[0]
        return self.run(layer, queries, plan), lse

    def _seen(self, layer: int, plan: SdpaRowsPlan) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Each row, and the keys and values that it sees: [kv_heads, context, head_dim]."""
        keys, values = self._cache.keys(layer), self._cache.values(layer)
        for context in plan.contexts[self._layer_windows[layer]]:
            slots = context.slots
            if isinstance(slots, slice):
                k, v = keys[:, slots], values[:, slots]
            else:
                k, v = keys.index_select(1, slots), values.index_select(1, slots)
            for row, part in context.rows:
                yield row, k[:, part], v[:, part]

    def _shared(self, batch: Batch) -> Iterator[tuple[Int64Array, list[int]]]:
        """Contexts, and the rows that see the beginning of each: a chunk's rows see that of its last one."""
        longest, rows = np.empty(0, dtype=np.int64), list[int]()
        for row in reversed(range(batch.rows)):
            prefix = batch.prefix_slots[batch.prefix_offsets[row] : batch.prefix_offsets[row + 1]]
            slots = np.append(prefix, batch.tree_slots[row]).astype(np.int64)
            alone = self._device.type != "cpu" or not np.array_equal(slots, longest[: len(slots)])
            if alone:
                if rows:
                    yield longest, rows
                longest, rows = slots, []
            rows.append(row)
        yield longest, rows

    def _context(self, batch: Batch, slots: Int64Array, rows: list[int], window: int | None) -> _Context:
        ends = [int(batch.prefix_offsets[row + 1] - batch.prefix_offsets[row]) + 1 for row in rows]
        firsts = [0] * len(rows)
        if window is not None:
            firsts = [
                min(max(0, int(batch.positions[row]) - window + 1), end - 1)
                for row, end in zip(rows, ends, strict=True)
            ]
        low = min(firsts)
        slots = slots[low:]
        parts = tuple(
            (row, slice(first - low, end - low)) for row, first, end in zip(rows, firsts, ends, strict=True)
        )
        start = int(slots[0])
        if self._device.type == "cpu" and np.array_equal(slots, np.arange(start, start + len(slots))):
            return _Context(slice(start, start + len(slots)), parts)
        return _Context(torch.from_numpy(slots).to(self._device), parts)
