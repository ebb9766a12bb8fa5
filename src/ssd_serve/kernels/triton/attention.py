"""Tree attention by our own Triton kernels: CUDA, ROCm, and slowly any machine under Triton's interpreter.

A forward is two launches a layer: parts of the context for tiles of rows, and their merge. Tiles depend on
the batch, the order in which a row's context is added up does not: parts have a fixed length. Knows how a
batch becomes indices on the device; the mathematics is in `kernel.py`.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import triton

from ssd_serve.cache.kv import KVCache
from ssd_serve.kernels.attention.contract import CacheAttention
from ssd_serve.kernels.batch import Batch, Int32Array
from ssd_serve.kernels.device import MAX_CAPTURED_ROWS, captured_rows
from ssd_serve.kernels.triton.kernel import attend_parts, merge_parts
from ssd_serve.kernels.triton.shapes import (
    FEW_PARTS,
    SPLIT,
    STAGES,
    WARPS,
    BatchCapacity,
    BatchMemory,
    ancestry_words,
    block_n,
    cut,
    merged,
    power_of_four,
    power_of_two,
    tile_of,
)

SCRATCH_BYTES = 512 << 20
"""Most memory for the results of parts; a batch that would need more is attended in several launches."""
_FIXED_ROWS = 256
_FIXED_WORDS = 128
"""Ancestry words of 32 bits a row: trees of 4,096 nodes."""
_SHARED = 4
"""Average number of prefixes that may share a slot in a batch that fits into fixed memory."""


@dataclass(frozen=True, slots=True)
class _Launch:
    """Tiles that one launch attends, and their rows."""

    first_tile: int
    tiles: int
    first_row: int
    rows: int


@dataclass(frozen=True, slots=True)
class _Shape:
    """Launch parameters besides addresses; a captured forward repeats them for batches of this shape."""

    rows: int
    tile: int
    """Stacked rows of a tile."""
    parts: int
    words: int
    """Ancestry words of 32 bits a row."""
    launches: tuple[_Launch, ...]


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """Plan of a forward: launches, and the memory of the batch. Valid until the next plan is made."""

    shape: _Shape
    memory: BatchMemory
    write_slots: torch.Tensor  # [rows], int64
    fixed: bool
    """True if it lies where every plan of this shape does."""


class TritonAttention(CacheAttention):
    """`AttentionBackend` by Triton kernels, which can be captured.

    `widen` computes in float32 for every dtype of the cache, as the interpreter must.
    """

    def __init__(
        self, cache: KVCache, heads: int, widen: bool = False, scratch_bytes: int = SCRATCH_BYTES
    ) -> None:
        super().__init__(cache, heads)
        self._widen = widen
        self._scratch_bytes = scratch_bytes
        self._largest_group = max(heads // layer.heads for layer in self._layers)
        self._largest_head = max(layer.head_dim for layer in self._layers)
        capacity = BatchCapacity(
            _FIXED_ROWS, _FIXED_ROWS * _FIXED_WORDS, cache.slots + _FIXED_ROWS, _SHARED * cache.slots
        )
        self._memory = BatchMemory(capacity, self._device)
        self._write_slots = torch.zeros(_FIXED_ROWS, dtype=torch.int64, device=self._device)

    def plan(self, batch: Batch) -> TritonPlan:
        """Cut every request's rows into tiles and copy the indices.

        What a graph may be captured of has a tile for each row. Words are rounded up to powers of two, and
        parts to powers of four: so few shapes are met.
        """
        counts = np.diff(batch.request_offsets)  # [requests]
        longest = int(counts.max())
        stacked = (captured_rows(longest) or longest) * self._largest_group
        tile = tile_of(stacked, self.dtype, self._largest_group)
        tiles = cut(batch, max(1, tile // self._largest_group))
        parts = 1 + -(-np.diff(batch.prefix_offsets) // SPLIT)  # [requests]
        ancestry = ancestry_words(batch)  # [rows, words]
        capacity = BatchCapacity(batch.rows, ancestry.size, len(batch.tree_slots), len(batch.prefix_slots))
        fixed = self._memory.capacity.holds(capacity)
        memory = self._memory if fixed else BatchMemory(capacity, self._device)
        programs, most = batch.rows, int(parts.max())  # no row is in two tiles
        if batch.rows <= MAX_CAPTURED_ROWS:
            most = 1 + power_of_four(max(FEW_PARTS, most - 1))
        else:
            programs = min(batch.rows, power_of_two(len(tiles)))
        empty = np.zeros(programs - len(tiles), dtype=np.int32)  # a tile of no rows does nothing
        memory.fill(
            {
                "tile_requests": np.concatenate((tiles[:, 0], empty)),
                "tile_rows": np.concatenate((tiles[:, 1], empty)),
                "tile_counts": np.concatenate((tiles[:, 2], empty)),
                "row_parts": np.repeat(parts, counts),
                "ancestry": ancestry,
                **{name: getattr(batch, name) for name in _AS_THEY_ARE},
            }
        )
        launches = self._launches(tiles, programs, most, batch.rows)
        shape = _Shape(batch.rows, tile, most, ancestry.shape[1], launches)
        write_slots = memory["write_slots"][: batch.rows]
        if fixed:
            write_slots = self._write_slots[: batch.rows].copy_(write_slots)
        return TritonPlan(shape, memory, write_slots.long(), fixed and len(launches) == 1)

    def plan_to_capture(self, batch: Batch) -> TritonPlan | None:
        """Plan in fixed memory; None where the batch does not fit."""
        plan = self.plan(batch)
        return plan if plan.fixed else None

    def captured_as(self, plan: TritonPlan) -> Hashable | None:
        return plan.shape if plan.fixed else None

    def run(self, layer: int, queries: torch.Tensor, plan: TritonPlan) -> torch.Tensor:
        return self.run_with_lse(layer, queries, plan)[0]

    def run_with_lse(
        self, layer: int, queries: torch.Tensor, plan: TritonPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        lse = torch.empty(queries.shape[:2], device=self._device)
        for launch in plan.shape.launches:
            self._attend(layer, queries, plan, launch, out, lse)
        return out.flatten(1), lse

    def _attend(
        self,
        layer: int,
        queries: torch.Tensor,
        plan: TritonPlan,
        launch: _Launch,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        keys, values, memory = self._cache.keys(layer), self._cache.values(layer), plan.memory
        _, heads, head_dim = queries.shape
        shape, parts, rows = self._layers[layer], plan.shape.parts, launch.rows
        partial = torch.empty((parts, rows, heads, head_dim), device=self._device)
        partial_lse = torch.empty((parts, rows, heads), device=self._device)
        block_d = triton.next_power_of_2(head_dim)
        # Triton's own types know nothing of launches.
        attend, merge = cast(Any, attend_parts), cast(Any, merge_parts)
        attend[launch.tiles, shape.heads, parts](
            queries,
            keys,
            values,
            partial,
            partial_lse,
            *(memory[name] for name in _ATTENDED),
            queries.stride(0),
            queries.stride(1),
            keys.stride(0),
            keys.stride(1),
            launch.first_tile,
            launch.first_row,
            rows,
            heads,
            plan.shape.words,
            shape.window or 0,
            shape.scale,
            GROUP=heads // shape.heads,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_M=plan.shape.tile,
            BLOCK_N=block_n(self.dtype, head_dim),
            SPLIT=SPLIT,
            WINDOWED=shape.window is not None,
            WIDEN=self._widen,
            num_warps=WARPS,
            num_stages=STAGES,
        )
        merge[rows, heads](
            partial,
            partial_lse,
            out,
            lse,
            memory["row_parts"],
            launch.first_row,
            rows,
            heads,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_P=merged(head_dim),
        )

    def _launches(self, tiles: Int32Array, programs: int, parts: int, rows: int) -> tuple[_Launch, ...]:
        row_bytes = 4 * parts * self._heads * (self._largest_head + 1)
        most = max(1, self._scratch_bytes // row_bytes)
        if rows <= most:
            return (_Launch(0, programs, 0, rows),)
        launches: list[_Launch] = []
        first = 0
        while first < len(tiles):
            start = int(tiles[first, 1])
            ends = tiles[first:, 1] + tiles[first:, 2] - start
            count = max(1, int(np.searchsorted(ends, most, side="right")))
            launches.append(_Launch(first, count, start, int(ends[count - 1])))
            first += count
        return tuple(launches)


_AS_THEY_ARE = (
    "positions",
    "write_slots",
    "prefix_offsets",
    "tree_offsets",
    "tree_slots",
    "tree_positions",
    "prefix_slots",
)
"""A batch's arrays that go to the device unchanged."""
_ATTENDED = (
    "tile_requests",
    "tile_rows",
    "tile_counts",
    "positions",
    "prefix_slots",
    "prefix_offsets",
    "tree_slots",
    "tree_offsets",
    "tree_positions",
    "ancestry",
)
"""Arrays that `attend_parts` takes, in its order."""
