"""Makes tree attention by FlashInfer: loads the package, and measures the page size that is fastest here.

Longer pages need fewer indices and are read in longer pieces, and keep long prefixes out of masks; but rows
are then attended twice, and merged. The gain depends on GPU, heads and kernels. The port has not run yet.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ssd_serve.base.errors import UserError, in_a_line
from ssd_serve.base.logs import Logger
from ssd_serve.cache.kv import KVCache
from ssd_serve.kernels.attention.contract import AttentionBackend, AttentionFactory, BackendContext
from ssd_serve.kernels.attention.self_test import forward_seconds
from ssd_serve.kernels.batch import Batch, RequestRows, build_batch
from ssd_serve.kernels.device import Clock, device_clock
from ssd_serve.kernels.flashinfer.adapter import Package, import_package
from ssd_serve.kernels.flashinfer.attention import FlashInferAttention
from ssd_serve.kernels.flashinfer.installation import (
    Build,
    architecture,
    choose,
    installed_versions,
    package_folder,
    use_folder,
)

_SPLIT_PAGES = 512
"""Pages between fixed splits of a context, so that results do not depend on the batch."""
PAGE_SIZES = (1, 16, 64)
UNMEASURED = 16
"""Page size for caches that are too small for a difference to show."""
_REQUESTS = 8
_ROWS = 8
_LONGEST = 4096
_SHORTEST = 256


class _Maker:
    """Loads the package at the first use, and once: it reads its folder when it is imported."""

    def __init__(self, context: BackendContext) -> None:
        self._context = context
        self._package: Package | None = None

    def __call__(self, cache: KVCache, heads: int) -> AttentionBackend[Any]:
        context = self._context
        if self._package is None:
            self._package = load_package(cache.device, context.folder / "flashinfer", context.log)
        if context.invariant:
            return FlashInferAttention(cache, heads, self._package, split_pages=_SPLIT_PAGES)
        page_size = fastest_page_size(cache, heads, self._package, context.log)
        return FlashInferAttention(cache, heads, self._package, page_size=page_size)


FACTORY = AttentionFactory(_Maker)


def load_package(device: torch.device, base: Path, log: Logger | None = None) -> Package:
    """Import the installed FlashInfer for this GPU; its compiled kernels are kept under `base`.

    Must be called before anything imports `flashinfer`, once a process. The first attention of a kind then
    compiles for some minutes. Raises `UserError`, with what to install or do, where it cannot be used.
    """
    if device.type != "cuda":
        raise UserError(f"FlashInfer attention needs a GPU, not {device.type}: use another attention backend")
    name, version = choose(installed_versions(), rocm=torch.version.hip is not None)
    build = Build(name, version, str(torch.__version__), architecture(device))
    # The port asks for the architecture of the current device while it is imported.
    with torch.cuda.device(device):
        cleared = use_folder(base, build, package_folder())
        if cleared and log is not None:
            log.info("stale compiled kernels removed", package=name, kernels=len(cleared))
        return import_package(name, version)


def fastest_page_size(
    cache: KVCache,
    heads: int,
    package: Package,
    log: Logger | None = None,
    *,
    clock: Clock | None = None,
    workspace_bytes: int | None = None,
) -> int:
    """Return the page size with the fastest attention for a forward of long requests, the smaller if equal.

    A size that raises is skipped; if all raise, pages have one slot. Reads the cache, and writes nothing.
    """
    if all(layer.window is not None for layer in cache.layout.layers):
        return 1
    batch = long_batch(cache.slots)
    if batch is None:
        return UNMEASURED if cache.slots >= UNMEASURED else 1
    now = clock or device_clock(cache.device)

    def seconds_with(size: int) -> float | None:
        try:
            attention = FlashInferAttention(
                cache, heads, package, workspace_bytes=workspace_bytes, page_size=size
            )
            return forward_seconds(attention, cache, heads, batch, range(len(cache.layout.layers)), now)
        except Exception as error:  # any error of a foreign kernel or its compiler
            if log is not None:
                log.warning("a page size is left out", slots_a_page=size, reason=in_a_line(error))
            return None

    tried = {size: seconds_with(size) for size in PAGE_SIZES}
    times = {size: seconds for size, seconds in tried.items() if seconds is not None}
    best = min(times, key=lambda size: times[size], default=1)
    if log is not None and times:
        shown = ", ".join(f"{size}: {seconds * 1e6:.0f}" for size, seconds in times.items())
        log.info("page size measured", slots_a_page=best, microseconds=shown)
    return best


def long_batch(slots: int) -> Batch | None:
    """Trees behind prefixes that lie in order, as long as so many slots hold; None: too short to tell."""
    length = min(_LONGEST, (slots - _REQUESTS * _ROWS) // _REQUESTS)
    length -= length % max(PAGE_SIZES)
    if length < _SHORTEST:
        return None
    return build_batch([_request(index, length) for index in range(_REQUESTS)])


def _request(index: int, length: int) -> RequestRows:
    """A root with children: what is verified is masked."""
    own = range(_REQUESTS * length + _ROWS * index, _REQUESTS * length + _ROWS * (index + 1))
    return RequestRows(
        tokens=[0] * _ROWS,
        positions=[length, *[length + 1] * (_ROWS - 1)],
        write_slots=own,
        prefix_slots=np.arange(index * length, (index + 1) * length, dtype=np.int32),
        wanted=[],
        ancestry=[1, *(1 | 1 << row for row in range(1, _ROWS))],
    )
