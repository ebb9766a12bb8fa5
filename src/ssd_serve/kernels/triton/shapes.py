"""Shapes and memory of batches for the Triton kernels: tiles of rows, parts of contexts, words of ancestry.

Numbers chosen on devices, and numpy: knows no kernel and no memory.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton

from ssd_serve.kernels.batch import Batch, Int32Array

SPLIT = 256
"""Entries of the prefix that one program reads: enough programs for one request, few merges. On an H100 the
fastest or nearly so of 64 to 512 for contexts of 512 to 4,096 tokens."""
_BLOCK_N, _BLOCK_N_HALF = 16, 32
_HALF_HEADS = 128
"""The widest heads that leave capacity for more than the least."""
_MERGED, _MERGED_WIDE = 8, 4
TILES = (16, 32, 64)
"""Stacked rows of a program in half precision."""
WARPS = 4
STAGES = 2
"""Loads of tree attention in flight. With three, the default on NVIDIA GPUs, some shapes spill registers on sm90."""
FEW_PARTS, _FEW_WORDS = 4, 4
"""Least parts of a prefix, and words a row, that are launched. Programs that find no
part end at once, and trees up to 128 nodes after up to 1,024 tokens are one shape."""


def cut(batch: Batch, most: int) -> Int32Array:
    """Request, first row and number of rows of each tile of at most `most` rows: int32 [tiles, 3]."""
    return np.asarray(
        [
            (request, first, min(most, stop - first))
            for request, (start, stop) in enumerate(pairwise(batch.request_offsets.tolist()))
            for first in range(start, stop, most)
        ],
        dtype=np.int32,
    )


def ancestry_words(batch: Batch) -> Int32Array:
    """The ancestry in words of 32 bits, a power of two of them a row, and no fewer than four: int32 [rows,
    words]."""
    words = np.ascontiguousarray(batch.ancestry, dtype="<u8").view(np.int32)
    width = max(_FEW_WORDS, power_of_two(words.shape[1]))
    return np.pad(words, ((0, 0), (0, width - words.shape[1])))


def power_of_two(count: int) -> int:
    """The least that is not below `count`; 0 for 0."""
    return 1 << (count - 1).bit_length() if count else 0


def power_of_four(count: int) -> int:
    """The least that is not below `count`."""
    return 1 << 2 * -(-(count - 1).bit_length() // 2)


def tiles_of(dtype: torch.dtype) -> tuple[int, ...]:
    """Return the tile sizes that compile without register spills; in float32 only the smallest does."""
    return TILES if dtype.itemsize == 2 else TILES[:1]


def block_n(dtype: torch.dtype, head_dim: int) -> int:
    """Entries that are scored together: as many as spill no registers. One number for all tiles, so that a
    row's sums have one order in every batch."""
    return _BLOCK_N_HALF if dtype.itemsize == 2 and head_dim <= _HALF_HEADS else _BLOCK_N


def merged(head_dim: int) -> int:
    """Parts of a row that are read at once where they are merged, for the same reason."""
    return _MERGED if head_dim <= _HALF_HEADS else _MERGED_WIDE


def tile_of(stacked: int, dtype: torch.dtype, group: int = 1) -> int:
    """Stacked rows of a program for requests of at most `stacked` ones, `group` of them to a row."""
    tiles = tiles_of(dtype)
    fitting = next((tile for tile in tiles if tile >= stacked), tiles[-1])
    return max(fitting, int(triton.next_power_of_2(group)))


_ALIGNED = 64
"""Entries to a multiple of which every place is rounded up: kernels are compiled for aligned pointers."""
_LONG = ("tree_slots", "tree_positions", "prefix_slots")
"""Arrays with far more capacity than most batches need: only what is used of them is copied."""


class BatchCapacity(NamedTuple):
    """Sizes of a block of memory for batches."""

    rows: int
    words: int
    """Ancestry words of 32 bits, all rows together."""
    tree: int
    prefix: int

    def holds(self, other: "BatchCapacity") -> bool:
        """Return True if a batch of this size fits."""
        return all(needed <= there for needed, there in zip(other, self, strict=True))


class BatchMemory:
    """BatchCapacity for the arrays of one batch on `device`, all int32."""

    def __init__(self, capacity: BatchCapacity, device: torch.device) -> None:
        self.capacity = capacity
        sizes = {
            "tile_requests": capacity.rows,
            "tile_rows": capacity.rows,
            "tile_counts": capacity.rows,
            "positions": capacity.rows,
            "prefix_offsets": capacity.rows + 1,
            "tree_offsets": capacity.rows + 1,
            "row_parts": capacity.rows,
            "write_slots": capacity.rows,
            "ancestry": capacity.words,
            "tree_slots": capacity.tree,
            "tree_positions": capacity.tree,
            "prefix_slots": capacity.prefix,
        }
        self._places: dict[str, slice] = {}
        end = 0
        for name, size in sizes.items():
            self._places[name] = slice(end, end + size)
            end += -(-size // _ALIGNED) * _ALIGNED
        self._short = self._places[_LONG[0]].start
        self._host = torch.zeros(end, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._block = torch.zeros(end, dtype=torch.int32, device=device)

    def __getitem__(self, name: str) -> torch.Tensor:
        """An array by its name: int32, as long as there is capacity."""
        return self._block[self._places[name]]

    def fill(self, arrays: Mapping[str, npt.NDArray[np.integer]]) -> None:
        """Write all arrays, each at the beginning of its place; what is behind it is left as it is.

        Waits for what the device does with the batch before.
        """
        host = self._host.numpy()
        spans = [slice(0, self._short)]
        for name, array in arrays.items():
            start = self._places[name].start
            span = slice(start, start + array.size)
            host[span] = array.ravel()
            if name in _LONG:
                spans.append(span)
        for span in spans:
            self._block[span].copy_(self._host[span])
