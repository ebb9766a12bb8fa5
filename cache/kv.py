"""The tensor KV cache: one slot a token, for every layer at once.

Knows how keys and values lie in memory (the layout that an architecture declares). Knows nothing of requests,
prefixes, reference counts or who may use which slot: slots are numbers here. Nothing outside `cache/` and
`kernels/` knows the page size.
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
    page_size: int = 1

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
        # Keys and values of a layer share one tensor, so that one operator writes both.
        self._layers = [
            torch.zeros((2 * layer.heads, slots, layer.head_dim), dtype=layout.dtype, device=device)
            for layer in layout.layers
        ]  # [2 * kv_heads, slots, head_dim]
        self._keys = [data[: data.shape[0] // 2] for data in self._layers]
        self._values = [data[data.shape[0] // 2 :] for data in self._layers]

    def write(self, layer: int, slots: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Store `keys_values` [rows, 2 * kv_heads, head_dim] (keys first) in `slots` [rows] int64."""
        self._layers[layer].index_copy_(1, slots, keys_values.transpose(0, 1))

    def keys(self, layer: int) -> torch.Tensor:
        """All keys of a layer: [kv_heads, slots, head_dim]."""
        return self._keys[layer]

    def values(self, layer: int) -> torch.Tensor:
        """All values of a layer: [kv_heads, slots, head_dim]."""
        return self._values[layer]
