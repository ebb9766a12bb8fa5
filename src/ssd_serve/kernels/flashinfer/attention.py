"""Tree attention by FlashInfer: `AttentionBackend` over its paged prefill wrapper.

Requests with a tree go through wrappers that have a mask, all others through wrappers that have none and are
causal: the mask of a prompt chunk would be large. What a prefix begins with in whole pages of slots is read
page by page, by wrappers that need neither, and merged with the rest. Layers that differ in heads or window
have wrappers and a plan of their own.

Upstream's package conforms on an H100, the port has not run; both are tested on CPUs with doubles that do
what they document. Not built: cascades over prefixes that requests share. Knows no model and no request.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from ssd_serve.base.errors import UserError
from ssd_serve.cache.kv import KVCache, LayerKV
from ssd_serve.kernels.attention.contract import CacheAttention
from ssd_serve.kernels.batch import Batch, Int64Array
from ssd_serve.kernels.device import dtype_name
from ssd_serve.kernels.flashinfer.adapter import Package, Tables, Wrapper, natural
from ssd_serve.kernels.flashinfer.captured import MAX_CAPTURED_ROWS, CapturedWrappers
from ssd_serve.kernels.flashinfer.tables import (
    causal_requests,
    leading_pages,
    make_page_tables,
    make_tables,
    rows_of,
)


class _Key(NamedTuple):
    """Key of a wrapper."""

    layer: LayerKV
    sees: Literal["causal", "mask", "pages"]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that go through wrappers of one way."""

    wrappers: Mapping[LayerKV, Wrapper]
    rows: torch.Tensor | None
    """int64 [rows of the part] on the device; None: all rows of the batch."""


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """Plan of a forward. The wrappers hold the rest, so a plan is valid until the next one is made."""

    number: int
    write_slots: torch.Tensor  # [rows], int64
    parts: tuple[Part, ...]
    """Each row is in one part."""
    paged: Part | None
    """Rows that also have context in pages; only in layers without a window."""
    captured_as: Hashable | None = None
    """Capture key besides the number of rows; None: a forward of this plan cannot be captured."""


class FlashInferAttention(CacheAttention):
    """`AttentionBackend` by an installed FlashInfer.

    Needs a cache layout with slots first (ValueError), and a dtype and head sizes that the package's kernels
    have (UserError). `page_size`: prefixes are read in pages of this many slots where their slots form whole
    pages; `fastest_page_size` measures which is fastest. `split_pages`: the work on a long context is always split
    after this many slots, so that a row's result does not depend on the rest of the batch. Only the upstream
    package offers it (UserError). Pages then have one slot, as otherwise the slots of a prefix would change a
    row's result.

    Allocates `workspace_bytes` once (by default what `workspace_for` computes) and 8 MiB, and 8 MiB of
    pinned memory, for each wrapper: up to three for each kind of layer. Forwards can be captured, unless
    splits are fixed; `captured.py` does it, with pages of one slot.
    """

    def __init__(
        self,
        cache: KVCache,
        heads: int,
        package: Package,
        *,
        workspace_bytes: int | None = None,
        split_pages: int | None = None,
        page_size: int = 1,
    ) -> None:
        _check(cache, package, split_pages)
        super().__init__(cache, heads)
        self._package = package
        self._split_pages = split_pages
        self._page_size = page_size if split_pages is None else 1
        self._kinds = tuple(dict.fromkeys(self._layers))
        layers = range(len(self._layers))
        self._slots = [cache.pages(layer, 1) for layer in layers]
        self._pages = [cache.pages(layer, self._page_size) for layer in layers]
        # Wrappers run one after the other and keep nothing in it.
        if workspace_bytes is None:
            workspace_bytes = workspace_for(self._kinds, heads, processors_of(self._device))
        self._workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=self._device)
        self._wrappers: dict[_Key, Wrapper] = {}
        self._captured = CapturedWrappers(cache, heads, package, self._workspace)
        self._write_slots = torch.zeros(MAX_CAPTURED_ROWS, dtype=torch.int64, device=self._device)
        self._planned = 0

    def plan(self, batch: Batch) -> FlashInferPlan:
        """Plan all wrappers that the batch needs. Waits for the device (FlashInfer's planning does)."""
        self._planned += 1
        counts = self._count_pages(batch)
        causal = causal_requests(batch)
        parts: list[Part] = []
        for masked in (False, True):
            requests = np.flatnonzero(causal != masked)
            if len(requests):
                parts.append(self._plan_rest(batch, requests, self._page_size * counts, masked=masked))
        paged = self._plan_pages(batch, counts) if counts.any() else None
        return FlashInferPlan(self._planned, self._place(batch.write_slots), tuple(parts), paged)

    def plan_to_capture(self, batch: Batch) -> FlashInferPlan | None:
        found = None if self._split_pages is not None else self._captured.plan(batch)
        if found is None:
            return None
        self._planned += 1
        write_slots = self._write_slots[: batch.rows].copy_(torch.from_numpy(batch.write_slots))
        part = Part(found.wrappers, None)
        return FlashInferPlan(self._planned, write_slots, (part,), None, "mask" if found.masked else "causal")

    def captured_as(self, plan: FlashInferPlan) -> Hashable | None:
        return plan.captured_as

    def run(self, layer: int, queries: torch.Tensor, plan: FlashInferPlan) -> torch.Tensor:
        """Attend: [rows, heads, head_dim] -> [rows, heads * head_dim]. `plan` must be the newest one."""
        self._check_newest(plan)
        if plan.paged is not None and self._layers[layer].window is None:
            return self._merged(layer, queries, plan, plan.paged)[0].flatten(1)
        if plan.parts[0].rows is None:
            return self._wrapper(layer, plan.parts[0]).run(queries, self._slots[layer]).flatten(1)
        result = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for part in plan.parts:
            wrapper, rows = self._wrapper(layer, part), part.rows
            result[rows] = wrapper.run(queries[rows], self._slots[layer])
        return result.flatten(1)

    def run_with_lse(
        self, layer: int, queries: torch.Tensor, plan: FlashInferPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend, and return the natural logarithm of each row's sum of weights: float32 [rows, heads]."""
        self._check_newest(plan)
        if plan.paged is not None and self._layers[layer].window is None:
            result, sums = self._merged(layer, queries, plan, plan.paged)
        else:
            result, sums = self._attend(layer, queries, plan)
        return result.flatten(1), natural(sums)

    def _attend(
        self, layer: int, queries: torch.Tensor, plan: FlashInferPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if plan.parts[0].rows is None:
            return self._wrapper(layer, plan.parts[0]).run_return_lse(queries, self._slots[layer])
        result = torch.empty_like(queries, memory_format=torch.contiguous_format)
        sums = torch.empty(queries.shape[:2], dtype=torch.float32, device=queries.device)
        for part in plan.parts:
            wrapper, rows = self._wrapper(layer, part), part.rows
            result[rows], sums[rows] = wrapper.run_return_lse(queries[rows], self._slots[layer])
        return result, sums

    def _merged(
        self, layer: int, queries: torch.Tensor, plan: FlashInferPlan, paged: Part
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result, sums = self._attend(layer, queries, plan)
        wrapper, rows = self._wrapper(layer, paged), paged.rows
        if rows is None:
            return _merge((result, sums), wrapper.run_return_lse(queries, self._pages[layer]))
        more = wrapper.run_return_lse(queries[rows], self._pages[layer])
        result[rows], sums[rows] = _merge((result[rows], sums[rows]), more)
        return result, sums

    def _count_pages(self, batch: Batch) -> Int64Array:
        """Return the number of pages of each request that are read as pages: [requests]."""
        if self._page_size == 1 or all(kind.window is not None for kind in self._kinds):
            return np.zeros(batch.requests, dtype=np.int64)
        return leading_pages(batch, self._page_size)

    def _plan_rest(self, batch: Batch, requests: Int64Array, skipped: Int64Array, *, masked: bool) -> Part:
        wrappers = {
            kind: self._planned_wrapper(
                _Key(kind, "mask" if masked else "causal"),
                make_tables(batch, requests, kind.window, masked=masked, skipped=skipped),
            )
            for kind in self._kinds
        }
        return Part(wrappers, self._rows(batch, requests))

    def _plan_pages(self, batch: Batch, counts: Int64Array) -> Part:
        requests = np.flatnonzero(counts)
        tables = make_page_tables(batch, requests, counts, self._page_size)
        kinds = [kind for kind in self._kinds if kind.window is None]
        wrappers = {kind: self._planned_wrapper(_Key(kind, "pages"), tables) for kind in kinds}
        return Part(wrappers, self._rows(batch, requests))

    def _planned_wrapper(self, key: _Key, tables: Tables) -> Wrapper:
        wrapper = self._wrappers.get(key)
        if wrapper is None:
            wrapper = self._wrappers[key] = self._package.wrapper(self._workspace)
        self._package.plan(
            wrapper,
            tables,
            heads=self._heads,
            layer=key.layer,
            dtype=self.dtype,
            device=self._device,
            split_pages=self._split_pages,
        )
        return wrapper

    def _wrapper(self, layer: int, part: Part) -> Wrapper:
        return part.wrappers[self._layers[layer]]

    def _rows(self, batch: Batch, requests: Int64Array) -> torch.Tensor | None:
        """The rows of these requests; None: all."""
        return None if len(requests) == batch.requests else self._place(rows_of(batch, requests))

    def _place(self, array: Int64Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _check_newest(self, plan: FlashInferPlan) -> None:
        if plan.number != self._planned:
            raise RuntimeError("this plan is no longer good: FlashInfer's wrappers hold one plan at a time")


def _merge(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two contexts as attention over both: outputs weigh as much as their sums of weights.

    Outputs are [rows, heads, head_dim], logarithms to base 2 float32 [rows, heads].
    """
    (result, sums), (more, more_sums) = one, other
    share = torch.sigmoid(natural(more_sums - sums))[..., None]
    return torch.lerp(result.float(), more.float(), share).to(result.dtype), torch.logaddexp2(sums, more_sums)


def _check(cache: KVCache, package: Package, split_pages: int | None) -> None:
    layout = cache.layout
    if layout.order != "slots":
        raise ValueError('FlashInfer attention needs a layout with order "slots"')
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


_LEAST = 128 << 20
_TILE_ROWS = 128
"""Rows of the largest tiles."""
_TILES_AT_ONCE = 2
"""On each of a GPU's processors."""
_SUMS = torch.float32.itemsize


def workspace_for(kinds: Iterable[LayerKV], heads: int, processors: int) -> int:
    """Bytes for layers of these kinds with `heads` query heads, on a GPU of so many `processors`.

    A long context is divided until every processor has work. Each part keeps a result in float32 and a sum
    for every head of each row of its tile (upstream's PrefillPlan). What does not fit makes a plan fail, in
    the first long prompt.
    """
    largest = max(
        heads * max(1, _TILES_AT_ONCE * processors // kind.heads) * _TILE_ROWS * (kind.head_dim + 1) * _SUMS
        for kind in kinds
    )
    return max(_LEAST, largest + (1 << 20))


def processors_of(device: torch.device) -> int:
    """A GPU's; 1 where none computes."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
