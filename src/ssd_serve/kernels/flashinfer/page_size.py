"""How many slots a page of FlashInfer's has: measured on this GPU when the backend is made.

Longer pages need fewer indices and are read in longer pieces, and keep long prefixes out of masks; but rows
are then attended twice, and merged. What that is worth depends on GPU, heads and kernels. Knows the backend
by how it is made.
"""

import numpy as np

from ssd_serve.base.errors import in_a_line
from ssd_serve.base.logs import Logger
from ssd_serve.cache.kv import KVCache
from ssd_serve.kernels.attention.timing import Clock, clock_of, forward_seconds
from ssd_serve.kernels.batch import Batch, RequestRows, build_batch
from ssd_serve.kernels.flashinfer.adapter import Package
from ssd_serve.kernels.flashinfer.attention import FlashInferAttention

PAGE_SIZES = (1, 16, 64)
UNMEASURED = 16
"""For caches that hold too little for a difference to show."""
_REQUESTS = 8
_ROWS = 8
_LONGEST = 4096
_SHORTEST = 256


def fastest_page_size(
    cache: KVCache,
    heads: int,
    package: Package,
    log: Logger | None = None,
    *,
    clock: Clock | None = None,
    workspace_bytes: int | None = None,
) -> int:
    """The size whose attention takes least time for a forward of long requests, the smaller one of equals.

    A size that raises is left out; where all do, pages have one slot. Reads the cache, and writes nothing.
    """
    if all(layer.window is not None for layer in cache.layout.layers):
        return 1
    batch = long_batch(cache.slots)
    if batch is None:
        return UNMEASURED if cache.slots >= UNMEASURED else 1
    now = clock or clock_of(cache.keys(0).device)

    def seconds_with(size: int) -> float | None:
        try:
            attention = FlashInferAttention(
                cache, heads, package, workspace_bytes=workspace_bytes, page_size=size
            )
            return forward_seconds(attention, cache, heads, batch, range(len(cache.layout.layers)), now)
        except Exception as error:  # whatever a foreign kernel or its compiler raises
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
