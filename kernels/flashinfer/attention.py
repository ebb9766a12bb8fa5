"""Tree attention by FlashInfer: `AttentionBackend` over its paged prefill wrapper.

Requests with a tree go through wrappers that have a mask, all others through wrappers that have none and are
causal: the mask of a prompt chunk would be large, and a wrapper that once had a mask keeps that mode where
buffers are fixed for graphs. A batch with both is attended in two parts. Layers that differ in heads or
window have wrappers and a plan of their own.

Not yet run on any GPU: tested on CPUs with doubles that compute what both packages document. Not built:
pages of several slots, capture in graphs, cascades over prefixes that requests share. Knows no model and no
request.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ssd_serve.cache.kv import KVCache, LayerKV
from ssd_serve.errors import UserError
from ssd_serve.kernels.batch import Batch, Int64Array
from ssd_serve.kernels.dtypes import dtype_name
from ssd_serve.kernels.flashinfer.adapter import Package, Wrapper, natural
from ssd_serve.kernels.flashinfer.tables import causal_requests, make_tables, rows_of


class _Key(NamedTuple):
    """Which wrapper."""

    layer: LayerKV
    masked: bool


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows that go through wrappers with a mask, or through those without."""

    masked: bool
    rows: torch.Tensor | None
    """int64 [rows of the part] on the device; None: all rows of the batch."""


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """One forward. The wrappers hold the rest, so that a plan is good until the next one is made."""

    number: int
    write_slots: torch.Tensor  # [rows], int64
    parts: tuple[_Part, ...]


class FlashInferAttention:
    """`AttentionBackend` by an installed FlashInfer. `heads` is the number of query heads.

    Needs a cache whose layout has slots first and one slot a page (ValueError), and a dtype and head sizes
    that the package's kernels have (UserError). `split_pages`: the work on a long context is always split
    after so many slots, so that a row's result does not depend on the rest of the batch; upstream's package
    alone offers it (UserError). Allocates `workspace_bytes` once and 8 MiB, and 8 MiB of pinned memory, for
    each wrapper: one or two for each kind of layer.
    """

    def __init__(
        self,
        cache: KVCache,
        heads: int,
        package: Package,
        *,
        workspace_bytes: int = 128 << 20,
        split_pages: int | None = None,
    ) -> None:
        _check(cache, package, split_pages)
        self._cache = cache
        self._heads = heads
        self._package = package
        self._split_pages = split_pages
        self._layers = cache.layout.layers
        self._kinds = tuple(dict.fromkeys(self._layers))
        self._pages = [cache.pages(layer) for layer in range(len(self._layers))]
        self._device = cache.keys(0).device
        # Wrappers run one after the other and keep nothing in it.
        self._workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=self._device)
        self._wrappers: dict[_Key, Wrapper] = {}
        self._planned = 0

    @property
    def dtype(self) -> torch.dtype:
        """The cache's, and that of queries and results."""
        return self._cache.layout.dtype

    def plan(self, batch: Batch) -> FlashInferPlan:
        """Plan all wrappers that the batch needs. Waits for the device (FlashInfer's planning does)."""
        self._planned += 1
        causal = causal_requests(batch)
        parts: list[_Part] = []
        for masked in (False, True):
            requests = np.flatnonzero(causal != masked)
            if not len(requests):
                continue
            for layer in self._kinds:
                self._plan_wrapper(_Key(layer, masked), batch, requests)
            rows = None if len(requests) == batch.requests else rows_of(batch, requests)
            parts.append(_Part(masked, None if rows is None else self._place(rows)))
        return FlashInferPlan(self._planned, self._place(batch.write_slots), tuple(parts))

    def write(self, layer: int, keys_values: torch.Tensor, plan: FlashInferPlan) -> None:
        """Store keys and values of all rows."""
        self._cache.write(layer, plan.write_slots, keys_values)

    def run(self, layer: int, queries: torch.Tensor, plan: FlashInferPlan) -> torch.Tensor:
        """Attend: [rows, heads, head_dim] -> [rows, heads * head_dim]. `plan` must be the newest one."""
        self._check_newest(plan)
        if plan.parts[0].rows is None:
            return self._wrapper(layer, plan.parts[0]).run(queries, self._pages[layer]).flatten(1)
        result = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for part in plan.parts:
            wrapper, rows = self._wrapper(layer, part), part.rows
            result[rows] = wrapper.run(queries[rows], self._pages[layer])
        return result.flatten(1)

    def run_with_lse(
        self, layer: int, queries: torch.Tensor, plan: FlashInferPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `run`, and the natural logarithm of each row's sum of weights: float32 [rows, heads]."""
        self._check_newest(plan)
        if plan.parts[0].rows is None:
            wrapper = self._wrapper(layer, plan.parts[0])
            out, lse = wrapper.run_return_lse(queries, self._pages[layer])
            return out.flatten(1), natural(lse)
        result = torch.empty_like(queries, memory_format=torch.contiguous_format)
        sums = torch.empty(queries.shape[:2], dtype=torch.float32, device=queries.device)
        for part in plan.parts:
            wrapper, rows = self._wrapper(layer, part), part.rows
            result[rows], sums[rows] = wrapper.run_return_lse(queries[rows], self._pages[layer])
        return result.flatten(1), natural(sums)

    def _plan_wrapper(self, key: _Key, batch: Batch, requests: Int64Array) -> None:
        wrapper = self._wrappers.get(key)
        if wrapper is None:
            wrapper = self._wrappers[key] = self._package.wrapper(self._workspace)
        self._package.plan(
            wrapper,
            make_tables(batch, requests, key.layer.window, masked=key.masked),
            heads=self._heads,
            layer=key.layer,
            page_size=self._cache.layout.page_size,
            dtype=self.dtype,
            device=self._device,
            split_pages=self._split_pages,
        )

    def _wrapper(self, layer: int, part: _Part) -> Wrapper:
        return self._wrappers[_Key(self._layers[layer], part.masked)]

    def _place(self, array: Int64Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _check_newest(self, plan: FlashInferPlan) -> None:
        if plan.number != self._planned:
            raise RuntimeError("this plan is no longer good: FlashInfer's wrappers hold one plan at a time")


def _check(cache: KVCache, package: Package, split_pages: int | None) -> None:
    layout = cache.layout
    if layout.order != "slots" or layout.page_size != 1:
        raise ValueError('FlashInfer attention needs a layout with order "slots" and one slot a page')
    sizes = {layer.head_dim for layer in layout.layers}
    if layout.dtype not in package.dtypes or not sizes <= package.head_dims:
        raise UserError(
            f"{package.name} has no kernels for {dtype_name(layout.dtype)} and heads of {_listed(sizes)}: "
            f"use bfloat16 and a model with heads of {_listed(package.head_dims)}, or another attention "
            "backend"
        )
    if split_pages is not None and not package.can_fix_splits:
        raise UserError(
            f"{package.name} {package.version} cannot split contexts at fixed places, which "
            "SSD_BATCH_INVARIANT needs"
        )


def _listed(sizes: set[int] | frozenset[int]) -> str:
    return ", ".join(str(size) for size in sorted(sizes))
