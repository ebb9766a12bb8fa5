"""How long the attention of a forward takes on this device, to choose among what is right.

Knows backends by how they are made; no model.
"""

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ssd_serve.cache.kv import KVCache, KVLayout
from ssd_serve.kernels.attention.contract import AttentionBackend, Maker
from ssd_serve.kernels.attention.self_test import TriedRequest, layout_order, random_batch
from ssd_serve.kernels.batch import Batch

Clock = Callable[[], float]
"""Seconds, read when the device has done all its work."""
_BATCH = (TriedRequest(1024, 8),) * 8
"""Requests with trees behind prefixes of the usual length."""
_REPEATS = 5


def attention_seconds(make: Maker, layout: KVLayout, heads: int, device: str) -> float:
    """Seconds of a forward's attention in a model with this layout.

    Runs in memory of its own, some megabytes for each layer of another shape. Raises what the backend raises.
    """
    slots = sum(each.prefix + each.rows for each in _BATCH)
    kinds = tuple(dict.fromkeys(layout.layers))
    cache = KVCache(KVLayout(kinds, layout.dtype, order=layout_order(device)), slots, device)
    order = [kinds.index(layer) for layer in layout.layers]
    batch = random_batch(random.Random(0), slots, _BATCH)
    return forward_seconds(make(cache, heads), cache, heads, batch, order, clock_of(cache.keys(0).device))


def forward_seconds(
    backend: AttentionBackend[Any],
    cache: KVCache,
    heads: int,
    batch: Batch,
    order: Sequence[int],
    now: Clock,
) -> float:
    """Seconds of a plan, and of attention in the cache's layers in this order: the least of some."""
    kinds = dict.fromkeys(cache.layout.layers)
    shape, device = (batch.rows, heads), cache.keys(0).device
    queries = {
        kind: torch.zeros((*shape, kind.head_dim), dtype=backend.dtype, device=device) for kind in kinds
    }
    times: list[float] = []
    for _ in range(1 + _REPEATS):
        started = now()
        plan = backend.plan(batch)
        for layer in order:
            backend.run(layer, queries[cache.layout.layers[layer]], plan)
        times.append(now() - started)
    return min(times[1:])  # the first one may compile


def clock_of(device: torch.device) -> Clock:
    """The time when `device` has done what was started on it."""

    def now() -> float:
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now
