"""Where a batch lies on a GPU: its arrays in fixed places of one block of memory, filled by a few copies.

Fixed places are what a captured forward needs: it reads the same addresses at every replay. Knows names and
sizes of arrays, not what kernels do with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_ALIGNED = 64
"""Entries to a multiple of which every place is rounded up: kernels are compiled for aligned pointers."""
_LONG = ("tree_slots", "tree_positions", "prefix_slots")
"""Arrays with far more room than most batches need: only what is used of them is copied."""


@dataclass(frozen=True, slots=True)
class Room:
    """How much a block of memory holds."""

    rows: int
    words: int
    """Ancestry words of 32 bits, all rows together."""
    tree: int
    prefix: int

    def holds(self, other: "Room") -> bool:
        """Whether a batch of this size fits."""
        return (
            other.rows <= self.rows
            and other.words <= self.words
            and other.tree <= self.tree
            and other.prefix <= self.prefix
        )


class BatchMemory:
    """Room for the arrays of one batch on `device`, all int32."""

    def __init__(self, room: Room, device: torch.device) -> None:
        self.room = room
        sizes = {
            "tile_requests": room.rows,
            "tile_rows": room.rows,
            "tile_counts": room.rows,
            "positions": room.rows,
            "prefix_offsets": room.rows + 1,
            "tree_offsets": room.rows + 1,
            "row_parts": room.rows,
            "write_slots": room.rows,
            "ancestry": room.words,
            "tree_slots": room.tree,
            "tree_positions": room.tree,
            "prefix_slots": room.prefix,
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
        """An array by its name: int32, as long as there is room."""
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
