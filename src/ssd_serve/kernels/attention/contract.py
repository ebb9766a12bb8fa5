"""The contract of tree attention, which every backend fulfils.

A backend is built for one model's cache. Once a forward it turns a batch into a *plan* (on the host, shared
by all layers); then, for every layer, the keys and values of all rows are written and the rows attend. Which
slots a row may read is defined in `ssd_serve.kernels.batch`; `kernels/attention/reference.py` spells it out.
Knows no request, no architecture and no weights.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from ssd_serve.base.logs import Logger
from ssd_serve.cache.kv import KVCache
from ssd_serve.kernels.batch import Batch
from ssd_serve.kernels.native.library import NativeLibrary

PlanT = TypeVar("PlanT")


class AttentionBackend(Protocol[PlanT]):
    """Tree attention over one KV cache.

    Layers may have windows: a row at position p then attends only to positions above p - window. A prefix
    slot's position is its index in the prefix, a tree slot's is its entry in `tree_positions`.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The cache's, and that of queries and results."""
        ...

    def plan(self, batch: Batch) -> PlanT:
        """Prepare one forward. Reads the batch only; costs no work on the device but copies of indices."""
        ...

    def write(self, layer: int, keys_values: torch.Tensor, plan: PlanT) -> None:
        """Store `keys_values` [rows, 2 * kv_heads, head_dim] (keys first) in the rows' write slots."""
        ...

    def run(self, layer: int, queries: torch.Tensor, plan: PlanT) -> torch.Tensor:
        """Attend: `queries` [rows, heads, head_dim] -> [rows, heads * head_dim], in the cache's dtype.

        The scale is head_dim ** -0.5. Query head h reads KV head h // (heads / kv_heads). Must follow `write`
        of the same layer.
        """
        ...

    def run_with_lse(
        self, layer: int, queries: torch.Tensor, plan: PlanT
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and each row's log-sum-exp of scaled scores: float32 [rows, heads], natural logarithm.

        With it results over parts of a context are merged.
        """
        ...


@runtime_checkable
class Capturable(Protocol):
    """A backend whose part of a forward can be captured and replayed."""

    def plan_to_capture(self, batch: Batch) -> Any:
        """As `plan`, in fixed memory: where plans are captured as the same, the newest one is replayed.

        None: a forward of this batch cannot be captured. Plans are made outside the capture.
        """
        ...

    def captured_as(self, plan: Any) -> Hashable | None:
        """What a graph fixes beside the number of rows: it serves every later plan of the same value.

        None: a forward of this plan cannot be captured.
        """
        ...


Maker = Callable[[KVCache, int], AttentionBackend[Any]]
"""Makes a backend over a cache, for a number of query heads."""


@dataclass(frozen=True, slots=True)
class BackendContext:
    """What a backend is made with, beside the cache and the heads.

    `native` are the kernels compiled for this CPU; kernels that are compiled at their first use are kept in
    `folder`. `invariant`: a row's result must be the same to the bit in any batch, tree or chunk.
    """

    native: NativeLibrary | None
    folder: Path
    log: Logger | None = None
    invariant: bool = False


def _nothing(_cache: KVCache, _means: BackendContext) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class AttentionFactory:
    """How a backend is made; `base/attention_backends.py` names it."""

    maker: Callable[[BackendContext], Maker]
    missing: Callable[[KVCache, BackendContext], str] = _nothing
    """What it lacks here beside its device and its package, and what to do about it; empty: nothing."""
    rows_alone: bool = False
    """A row's result never depends on its batch. Other backends get rows one by one where that is asked."""
