"""The tensor KV cache: one slot a token, for every layer at once.

Knows how keys and values lie in memory (the layout that an architecture declares, in the order that the
attention backend reads best). Knows nothing of requests, prefixes, reference counts or who may use which
slot: slots are numbers here. Pages are a way to look at slots: nobody hands them out.
"""

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer remembers of a token."""

    heads: int
    head_dim: int
    window: int | None = None
    """A row attends to this many positions, its own included; None: to all."""
    kind: Literal["kv"] = "kv"
    """`kv`: a key and a value a head. Other kinds (a shared latent) are not built."""

    @property
    def elements(self) -> int:
        """Numbers stored a slot."""
        return 2 * self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What all layers remember of a token."""

    layers: tuple[LayerKV, ...]
    dtype: torch.dtype
    order: Literal["heads", "slots"] = "heads"
    """What comes first in memory. `heads`: a head's slots lie together, as CPUs read them best. `slots`: all
    heads of a slot lie together, and pages of slots can be handed to kernels for GPUs."""

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot over all layers."""
        return sum(layer.elements for layer in self.layers) * self.dtype.itemsize


class KVCache:
    """Keys and values of all slots of all layers, on one device.

    Initialised to zero, so that a masked slot that nobody wrote holds finite numbers.
    """

    def __init__(self, layout: KVLayout, slots: int, device: str) -> None:
        self.layout = layout
        self.slots = slots
        self.device = torch.device(device)
        self._slot_axis = 1 if layout.order == "heads" else 0
        # Keys and values of a layer share one tensor, so that one operator writes both.
        self._layers = [
            torch.zeros(self._shape(layer), dtype=layout.dtype, device=device) for layer in layout.layers
        ]
        by_heads = [data if layout.order == "heads" else data.transpose(0, 1) for data in self._layers]
        self._keys = [data[: data.shape[0] // 2] for data in by_heads]
        self._values = [data[data.shape[0] // 2 :] for data in by_heads]

    def write(self, layer: int, slots: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Store `keys_values` [rows, 2 * kv_heads, head_dim] (keys first) in `slots` [rows] int64."""
        if self._slot_axis:
            keys_values = keys_values.transpose(0, 1)
        self._layers[layer].index_copy_(self._slot_axis, slots, keys_values)

    def keys(self, layer: int) -> torch.Tensor:
        """All keys of a layer: [kv_heads, slots, head_dim]; a strided view where slots come first."""
        return self._keys[layer]

    def values(self, layer: int) -> torch.Tensor:
        """All values of a layer: [kv_heads, slots, head_dim]; a strided view where slots come first."""
        return self._values[layer]

    def pages(self, layer: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer as two views [pages, page_size, kv_heads, head_dim] of equal strides.

        Slot s lies in page s // page_size; slots behind the last whole page are in none. Kernels' libraries
        call this order NHD. Raises ValueError unless slots come first in the layout.
        """
        if self.layout.order != "slots":
            raise ValueError('only a layout with order "slots" has pages')
        heads, head_dim = self.layout.layers[layer].heads, self.layout.layers[layer].head_dim
        whole = self.slots - self.slots % page_size
        data = self._layers[layer][:whole].view(-1, page_size, 2 * heads, head_dim)
        return data[:, :, :heads], data[:, :, heads:]

    def _shape(self, layer: LayerKV) -> tuple[int, int, int]:
        """[2 * kv_heads, slots, head_dim], or slots first."""
        heads = 2 * layer.heads
        if self.layout.order == "heads":
            return heads, self.slots, layer.head_dim
        return self.slots, heads, layer.head_dim
