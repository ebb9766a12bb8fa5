"""Tree attention by our own Triton kernels: CUDA, ROCm, and slowly any machine under Triton's interpreter.

A forward is two launches a layer: parts of the context for tiles of rows, and their merge. Tiles depend on
the batch, the order in which a row's context is added up does not: parts have a fixed length. Knows how a
batch becomes indices on the device; the mathematics is in `kernel.py`.
"""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import triton

from ssd_serve.cache.kv import KVCache
from ssd_serve.kernels.batch import Batch, Int32Array
from ssd_serve.kernels.triton.kernel import attend_parts, merge_parts

SPLIT = 512
"""Entries of the prefix that one program reads: enough programs for one long request, few merges."""
BLOCK_N = 16
"""Entries that are scored together: more spill registers. One number for all tiles, so that a row's sums have
one order whatever else is in the batch."""
TILES = (16, 32, 64)
"""Stacked rows of a program in half precision."""
WARPS = 4


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """One forward: the batch's arrays on the device, and the tiles of rows."""

    indices: tuple[torch.Tensor, ...]
    """Tiles' requests, first rows and numbers of rows; positions; slots and offsets; ancestry."""
    write_slots: torch.Tensor  # [rows], int64
    row_parts: torch.Tensor  # [rows], int32
    rows: int
    tiles: int
    tile: int
    """Stacked rows of a tile."""
    parts: int
    words: int


class TritonAttention:
    """`AttentionBackend` by Triton kernels. `heads` is the number of query heads; `widen` computes in float32
    whatever the cache holds, as the interpreter must."""

    def __init__(self, cache: KVCache, heads: int, widen: bool = False) -> None:
        self._cache = cache
        self._device = cache.keys(0).device
        self._heads = heads
        self._widen = widen
        self._largest_group = max(heads // layer.heads for layer in cache.layout.layers)

    @property
    def dtype(self) -> torch.dtype:
        """The cache's, and that of queries and results."""
        return self._cache.layout.dtype

    def plan(self, batch: Batch) -> TritonPlan:
        """Cut every request's rows into tiles and copy the indices."""
        counts = np.diff(batch.request_offsets)  # [requests]
        tile = tile_of(int(counts.max()) * self._largest_group, self.dtype, self._largest_group)
        most = max(1, tile // self._largest_group)
        tiles = [
            (request, first, min(most, int(count) - skipped))
            for request, count in enumerate(counts)
            for skipped in range(0, int(count), most)
            for first in (int(batch.request_offsets[request]) + skipped,)
        ]
        prefixes = np.diff(batch.prefix_offsets)
        parts: Int32Array = (1 + -(-prefixes // SPLIT)).astype(np.int32)  # [requests]
        words = np.ascontiguousarray(batch.ancestry, dtype="<u8").view(np.int32)  # [rows, 2 * words]
        indices = (
            *np.asarray(tiles, dtype=np.int32).T,
            batch.positions,
            batch.prefix_slots,
            batch.prefix_offsets,
            batch.tree_slots,
            batch.tree_offsets,
            batch.tree_positions,
            words,
        )
        return TritonPlan(
            tuple(self._put(array) for array in indices),
            self._put(batch.write_slots),
            self._put(np.repeat(parts, counts)),
            batch.rows,
            len(tiles),
            tile,
            int(parts.max()),
            words.shape[1],
        )

    def write(self, layer: int, keys_values: torch.Tensor, plan: TritonPlan) -> None:
        """Store keys and values of all rows."""
        self._cache.write(layer, plan.write_slots, keys_values)

    def run(self, layer: int, queries: torch.Tensor, plan: TritonPlan) -> torch.Tensor:
        """Attend: [rows, heads, head_dim] -> [rows, heads * head_dim]."""
        return self.run_with_lse(layer, queries, plan)[0]

    def run_with_lse(
        self, layer: int, queries: torch.Tensor, plan: TritonPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and the log-sum-exp of each row's scores: float32 [rows, heads]."""
        keys, values = self._cache.keys(layer), self._cache.values(layer)
        rows, heads, head_dim = queries.shape
        shape = self._cache.layout.layers[layer]
        partial = torch.empty((plan.parts, rows, heads, head_dim), device=self._device)
        partial_lse = torch.empty((plan.parts, rows, heads), device=self._device)
        out, lse = torch.empty_like(queries, memory_format=torch.contiguous_format), partial_lse[0].clone()
        block_d = triton.next_power_of_2(head_dim)
        # Triton's own types know nothing of launches.
        attend, merge = cast(Any, attend_parts), cast(Any, merge_parts)
        attend[plan.tiles, shape.heads, plan.parts](
            queries,
            keys,
            values,
            partial,
            partial_lse,
            *plan.indices,
            queries.stride(0),
            queries.stride(1),
            keys.stride(0),
            keys.stride(1),
            rows,
            heads,
            plan.words,
            shape.window or 0,
            head_dim**-0.5,
            GROUP=heads // shape.heads,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_M=plan.tile,
            BLOCK_N=BLOCK_N,
            SPLIT=SPLIT,
            WIDEN=self._widen,
            num_warps=WARPS,
        )
        merge[rows, heads](
            partial, partial_lse, out, lse, plan.row_parts, rows, heads, HEAD_DIM=head_dim, BLOCK_D=block_d
        )
        return out.flatten(1), lse

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(array)).to(self._device)  # a copy: some are read-only


def tiles_of(dtype: torch.dtype) -> tuple[int, ...]:
    """Tiles without register spills, `compiling.py` shows which: in float32 only the smallest."""
    return TILES if dtype.itemsize == 2 else TILES[:1]


def tile_of(stacked: int, dtype: torch.dtype, group: int = 1) -> int:
    """Stacked rows of a program for requests of at most `stacked` ones, `group` of them to a row."""
    tiles = tiles_of(dtype)
    fitting = next((tile for tile in tiles if tile >= stacked), tiles[-1])
    return max(fitting, int(triton.next_power_of_2(group)))
