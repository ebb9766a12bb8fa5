"""The contract of tree attention, which every backend fulfils.

A backend is built for one model's cache. Once a forward it turns a batch into a *plan* (on the host, shared
by all layers). Then, for every layer, the keys and values of all rows are written and the rows attend.
`Batch` in `kernels/batch.py` defines which slots a row may read; `kernels/attention/self_test.py` spells it
out. Knows no request, no architecture and no weights.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from ssd_serve.base.logs import Logger
from ssd_serve.cache.kv import KVCache, KVKind
from ssd_serve.kernels.batch import Batch
from ssd_serve.kernels.native.library import NativeLibrary

PlanT = TypeVar("PlanT")


class AttentionBackend(Protocol[PlanT]):
    """Tree attention over one KV cache; the cache's layout describes each layer (`LayerKV`).

    In a layer with a window a row at position p attends only to positions above p - window. A prefix slot's
    position is its index in the prefix, a tree slot's is its entry in `tree_positions`.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of queries and of results; on CPUs the cache may be narrower."""
        ...

    def plan(self, batch: Batch) -> PlanT:
        """Prepare one forward. Reads the batch only; costs no work on the device but copies of indices."""
        ...

    def write(self, layer: int, stored: torch.Tensor, plan: PlanT) -> None:
        """Write `stored` [rows, *LayerKV.stored], for plain layers all keys, then all values."""
        ...

    def run(self, layer: int, queries: torch.Tensor, plan: PlanT) -> torch.Tensor:
        """Attend: `queries` [rows, heads, head_dim] -> [rows, heads * value_dim], in their dtype.

        Scores are multiplied by the layer's scale. Query head h reads KV head h // (heads / kv_heads). Must
        follow `write` of the same layer.
        """
        ...

    def run_with_lse(
        self, layer: int, queries: torch.Tensor, plan: PlanT
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend; also return each row's log-sum-exp of scaled scores: float32 [rows, heads], natural
        logarithm.

        Results over parts of a context are merged with it.
        """
        ...


class PlanWithSlots(Protocol):
    """A plan of a `CacheAttention`."""

    @property
    def write_slots(self) -> torch.Tensor:
        """Slots of the rows, on the device: int64 [rows]."""
        ...


class CacheAttention:
    """The part of a backend that concerns its cache alone. `heads` is the number of query heads."""

    def __init__(self, cache: KVCache, heads: int) -> None:
        self._cache = cache
        self._heads = heads
        self._device = cache.device
        self._layers = cache.layout.layers

    @property
    def dtype(self) -> torch.dtype:
        return self._cache.layout.dtype

    def write(self, layer: int, stored: torch.Tensor, plan: PlanWithSlots) -> None:
        self._cache.write(layer, plan.write_slots, stored)


@runtime_checkable
class Capturable(Protocol):
    """A backend that can be captured and replayed as part of a forward."""

    def plan_to_capture(self, batch: Batch) -> Any:
        """Plan in fixed memory, outside any capture; a replay reads the newest plan of its capture key.

        None: a forward of this batch cannot be captured.
        """
        ...

    def captured_as(self, plan: Any) -> Hashable | None:
        """Return the capture key besides the number of rows: a graph serves every later plan of the same
        value.

        None: a forward of this plan cannot be captured.
        """
        ...


Maker = Callable[[KVCache, int], AttentionBackend[Any]]
"""Makes a backend over a cache, for a number of query heads."""


@dataclass(frozen=True, slots=True)
class BackendContext:
    """Inputs of a backend besides the cache and the heads."""

    native: NativeLibrary | None
    """Kernels compiled for this CPU."""
    folder: Path
    """Folder of kernels that are compiled at their first use."""
    log: Logger | None = None
    invariant: bool = False
    """A row's result must be the same to the bit in any batch, tree or chunk."""


def _nothing(_cache: KVCache, _context: BackendContext) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class AttentionFactory:
    """Makes a backend; `base/attention_backends.py` names it."""

    maker: Callable[[BackendContext], Maker]
    missing: Callable[[KVCache, BackendContext], str] = _nothing
    """Reports what the backend lacks here besides device and package, and what to do about it; empty:
    nothing."""
    rows_alone: bool = False
    """A row's result never depends on its batch. Other backends get rows one by one where that is required.
    """
    kinds: frozenset[KVKind] = frozenset({"kv"})
    """Kinds of layers that it serves."""
    any_shape: bool = False
    """True if it serves values narrower than keys, and scales other than head_dim ** -0.5."""

    def refuses(self, cache: KVCache) -> str:
        """Return the reason why a layer of this cache cannot be served; empty: all can."""
        for index, layer in enumerate(cache.layout.layers):
            if layer.kind not in self.kinds:
                return f"it does not serve layer {index}, of kind {layer.kind!r}"
            if not (layer.is_plain or self.any_shape):
                return f"it does not serve layer {index}, whose value_dim or scale is unusual"
        return ""
