"""The tensor KV cache: what every layer stores of a token, one slot a token, and the states of recurrent
layers.

Knows how keys and values lie in memory (as an architecture declares them, in the order that the attention
backend reads best). Knows no requests, prefixes or reference counts: slots are numbers here. Pages are views
of slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ssd_serve.cache.lazy_memory import LazyTensor

KVKind = Literal["kv", "latent", "state"]


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Describes what one layer stores, and how its attention reads it.

    `kv`: a key and a value for each of `heads`. `latent`: one vector of `head_dim` numbers that all query
    heads share (`heads` is 1); it is the key, and its first `value_dim` numbers are the value. `state`: a
    recurrent state of `heads` matrices [head_dim, value_dim], one for each sequence or tree node and not for
    each token.
    """

    heads: int
    head_dim: int
    """Numbers of a key (`state`: rows of its matrix)."""
    window: int | None = None
    """Number of positions that a row attends to, its own included; None: all."""
    kind: KVKind = "kv"
    value_dim: int = 0
    """Numbers of a value; 0: as many as of a key."""
    scale: float = 0.0
    """Factor of the scores; 0: head_dim ** -0.5."""

    def __post_init__(self) -> None:
        """Fill in the defaults. Raises ValueError for a latent that cannot be one."""
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)
        object.__setattr__(self, "scale", self.scale or self.head_dim**-0.5)
        if self.kind == "latent" and (self.heads != 1 or self.value_dim > self.head_dim):
            raise ValueError("a latent layer has one head, and values that are part of its keys")

    @property
    def is_plain(self) -> bool:
        """True for keys and values of one width and the usual scale, which every backend serves."""
        return self.kind == "kv" and self.value_dim == self.head_dim and self.scale == self.head_dim**-0.5

    @property
    def stored(self) -> tuple[int, int]:
        """Shape of what is written for one token (`state`: for one sequence).

        Plain: all keys, then all values, [2 * heads, head_dim]. Other `kv`: each head's key, then its value,
        [heads, head_dim + value_dim]. `latent`: [1, head_dim]. `state`: [heads, head_dim * value_dim].
        """
        if self.kind == "latent":
            return 1, self.head_dim
        if self.kind == "state":
            return self.heads, self.head_dim * self.value_dim
        if self.value_dim == self.head_dim:
            return 2 * self.heads, self.head_dim
        return self.heads, self.head_dim + self.value_dim

    @property
    def elements(self) -> int:
        """Numbers stored in a slot (`state`: in a state)."""
        return self.stored[0] * self.stored[1]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layers of a model, and how their KV is stored."""

    layers: tuple[LayerKV, ...]
    dtype: torch.dtype
    order: Literal["heads", "slots"] = "heads"
    """First dimension in memory. `heads`: a head's slots lie together, as CPUs read them best. `slots`: all
    heads of a slot lie together, so that pages of slots can be handed to kernels for GPUs."""

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot over all layers; recurrent states do not grow with the text."""
        return sum(each.elements for each in self.layers if each.kind != "state") * self.dtype.itemsize

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one recurrent state over all layers, in float32."""
        return sum(each.elements for each in self.layers if each.kind == "state") * torch.float32.itemsize


class KVCache:
    """Keys and values of all slots of all layers, and `states` recurrent states, on one device.

    Zero where nothing was written, so that a masked slot holds finite numbers. On CPUs pages become resident
    when they are written, and `release` gives them back.
    """

    def __init__(self, layout: KVLayout, slots: int, device: str, states: int = 0) -> None:
        self.layout = layout
        self.slots = slots
        self.states = states
        self.device = torch.device(device)
        self._slot_axis = 1 if layout.order == "heads" else 0
        self._lazy: list[LazyTensor] = []
        # What a layer stores of a token is one tensor, so that one operator writes it.
        self._layers = [
            self._zeros(self._shape(layer))
            if layer.kind != "state"
            else torch.zeros((states, layer.heads, layer.head_dim, layer.value_dim), device=device)
            for layer in layout.layers
        ]
        views = [_views(layer, self._by_heads(i)) for i, layer in enumerate(layout.layers)]
        self._keys, self._values = [each[0] for each in views], [each[1] for each in views]

    def write(self, layer: int, slots: torch.Tensor, stored: torch.Tensor) -> None:
        """Write `stored` [rows, *LayerKV.stored] to `slots`, int64 [rows]."""
        if self._slot_axis:
            stored = stored.transpose(0, 1)
        self._layers[layer].index_copy_(self._slot_axis, slots, stored.to(self.layout.dtype))

    def release(self, spans: Sequence[range]) -> None:
        """Give the memory of these slots back to the machine, where it can be."""
        for each in self._lazy:
            each.release(spans)

    def keys(self, layer: int) -> torch.Tensor:
        """Return a view of all keys: [heads, slots, head_dim]."""
        return self._keys[layer]

    def values(self, layer: int) -> torch.Tensor:
        """Return a view of all values: [heads, slots, value_dim]; of a latent layer a part of the keys."""
        return self._values[layer]

    def state(self, layer: int) -> torch.Tensor:
        """Return the states of a recurrent layer: float32 [states, heads, head_dim, value_dim]."""
        return self._layers[layer]

    def pages(self, layer: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as two views [pages, page_size, kv_heads, head_dim] of equal strides (NHD).

        Slot s lies in page s // page_size; slots behind the last whole page are in none. Raises ValueError
        unless slots come first in the layout and the layer is plain.
        """
        shape = self.layout.layers[layer]
        if self.layout.order != "slots" or not shape.is_plain:
            raise ValueError('only plain layers of a layout with order "slots" have pages')
        whole = self.slots - self.slots % page_size
        data = self._layers[layer][:whole].view(-1, page_size, *shape.stored)
        return data[:, :, : shape.heads], data[:, :, shape.heads :]

    def _zeros(self, shape: tuple[int, int, int]) -> torch.Tensor:
        if self.device.type != "cpu" or not self.slots:
            return torch.zeros(shape, dtype=self.layout.dtype, device=self.device)
        self._lazy.append(LazyTensor(shape, self.layout.dtype, self._slot_axis))
        return self._lazy[-1].data

    def _by_heads(self, layer: int) -> torch.Tensor:
        data = self._layers[layer]
        return data if self._slot_axis else data.transpose(0, 1)

    def _shape(self, layer: LayerKV) -> tuple[int, int, int]:
        heads, width = layer.stored
        return (heads, self.slots, width) if self.layout.order == "heads" else (self.slots, heads, width)


def _views(layer: LayerKV, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values in `data` [stored heads, slots, stored width]."""
    if layer.kind == "latent":
        return data, data[..., : layer.value_dim]
    if layer.kind == "kv" and layer.value_dim != layer.head_dim:
        return data[..., : layer.head_dim], data[..., layer.head_dim :]
    return data[: layer.heads], data[layer.heads :]
