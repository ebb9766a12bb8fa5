"""FlashInfer's wrappers in graph mode: what they run can be captured once and replayed for other batches.

Such a wrapper reads fixed buffers, has a fixed number of requests and keeps to one way of masking. So there
is one for each number of rows and way, with as many requests as rows, of which those that a batch lacks are
empty. Batches with a tree go through a mask wholly. A page is one slot: prefixes in longer pages would need a
second wrapper: its requests, and the rows to merge, change from batch to batch.

The port has not run yet. Knows no capture: plans fill the buffers, and must not be made during a capture.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ssd_serve.cache.kv import KVCache, LayerKV
from ssd_serve.kernels.batch import Batch
from ssd_serve.kernels.device import captured_rows
from ssd_serve.kernels.flashinfer.adapter import FixedBuffers, Package, Wrapper
from ssd_serve.kernels.flashinfer.tables import causal_requests, make_tables, with_empty_requests

MAX_CAPTURED_ROWS = 64
"""Work is cut into tiles for requests of one row, which serves larger ones worse and worse."""
_SHARED = 4
"""Average number of contexts of a batch that may share a slot."""
_MASK_BYTES = 512 << 10
"""Limit of masks: larger ones take longer to pack than launching kernels one by one."""
_SCHEDULE_BYTES = 1 << 20
"""Far more than what FlashInfer schedules for so few rows."""


class _Key(NamedTuple):
    """Key of a wrapper."""

    layer: LayerKV
    rows: int
    masked: bool


@dataclass(frozen=True, slots=True)
class CapturedPart:
    """The wrappers that a batch was planned with."""

    wrappers: dict[LayerKV, Wrapper]
    masked: bool


class CapturedWrappers:
    """Makes wrappers, and plans batches of as many rows as forwards are captured with.

    Memory is taken at the first plan. All row counts share one set of buffers for each kind of layer, which
    every plan overwrites. They take 1 MiB for schedules, 16 bytes for each slot of the cache, and masks of 8
    bytes for each slot, at most 512 KiB. Each wrapper adds 128 KiB, and 1 MiB of pinned memory; there are at
    most 11 row counts with two wrappers for each kind of layer.
    """

    def __init__(self, cache: KVCache, heads: int, package: Package, workspace: torch.Tensor) -> None:
        self._cache = cache
        self._heads = heads
        self._package = package
        self._workspace = workspace
        self._max_pages = _SHARED * cache.slots
        self._max_mask_bytes = min(_MASK_BYTES, MAX_CAPTURED_ROWS * cache.slots // 8 + MAX_CAPTURED_ROWS)
        self._buffers: dict[LayerKV, FixedBuffers] = {}
        self._wrappers: dict[_Key, Wrapper] = {}

    def plan(self, batch: Batch) -> CapturedPart | None:
        """Plan a forward; None, and nothing is changed, where it cannot be captured.

        That is so for other row counts than `captured_rows` names, for more than 64, and where contexts or
        masks are too large for the buffers.
        """
        rows = batch.rows
        if rows > MAX_CAPTURED_ROWS or captured_rows(rows) != rows:
            return None
        masked = not causal_requests(batch).all()
        contexts = np.diff(batch.prefix_offsets) + np.diff(batch.tree_offsets)  # [requests], without windows
        entries = int(np.diff(batch.request_offsets) @ contexts)
        if int(contexts.sum()) > self._max_pages:
            return None
        if masked and entries // 8 + batch.requests > self._max_mask_bytes:
            return None
        requests = np.arange(batch.requests)
        wrappers: dict[LayerKV, Wrapper] = {}
        for layer in dict.fromkeys(self._cache.layout.layers):
            tables = make_tables(batch, requests, layer.window, masked=masked)
            wrappers[layer] = self._wrapper(_Key(layer, rows, masked))
            self._package.plan(
                wrappers[layer],
                with_empty_requests(tables, rows),
                heads=self._heads,
                layer=layer,
                dtype=self._cache.layout.dtype,
                device=self._workspace.device,
                split_pages=None,
            )
        return CapturedPart(wrappers, masked)

    def _wrapper(self, key: _Key) -> Wrapper:
        found = self._wrappers.get(key)
        if found is None:
            buffers = self._buffers.get(key.layer)
            if buffers is None:
                buffers = self._buffers[key.layer] = self._make_buffers()
            part = buffers.first(key.rows, masked=key.masked)
            found = self._wrappers[key] = self._package.capturable_wrapper(self._workspace, part)
        return found

    def _make_buffers(self) -> FixedBuffers:
        """For the largest number of rows, with a mask."""
        device = self._workspace.device

        def zeros(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        return FixedBuffers(
            query_offsets=zeros(MAX_CAPTURED_ROWS + 1),
            page_offsets=zeros(MAX_CAPTURED_ROWS + 1),
            pages=zeros(self._max_pages),
            last_page_lengths=zeros(MAX_CAPTURED_ROWS),
            schedule=zeros(_SCHEDULE_BYTES, torch.uint8),
            mask=zeros(self._max_mask_bytes, torch.uint8),
            mask_offsets=zeros(MAX_CAPTURED_ROWS + 1),
        )
