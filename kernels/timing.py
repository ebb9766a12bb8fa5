"""How long the attention of a forward takes on this device, to choose among backends that are right.

Knows backends by how they are made; no model.
"""

import random
import time

import torch

from ssd_serve.cache.kv import KVCache, KVLayout
from ssd_serve.kernels.self_test import Asked, Maker, layout_order, random_batch

_BATCH = (Asked(1024, 8),) * 8
"""Requests with trees behind prefixes of the usual length."""
_ROUNDS = 3


def attention_seconds(make: Maker, layout: KVLayout, heads: int, device: str) -> float:
    """Seconds of a plan and of attention in every layer of a model with this layout; the best of some.

    Runs in memory of its own, some megabytes for each layer of another shape. Raises what the backend raises.
    """
    slots = sum(each.prefix + each.rows for each in _BATCH)
    kinds = tuple(dict.fromkeys(layout.layers))
    counts = [layout.layers.count(kind) for kind in kinds]
    backend = make(KVCache(KVLayout(kinds, layout.dtype, order=layout_order(device)), slots, device), heads)
    batch = random_batch(random.Random(0), slots, _BATCH)
    queries = [
        torch.ones((batch.rows, heads, kind.head_dim), dtype=layout.dtype, device=device) for kind in kinds
    ]
    best = float("inf")
    for turn in range(_ROUNDS + 1):  # the first turn warms up
        started = time.perf_counter()
        plan = backend.plan(batch)
        for layer, count in enumerate(counts):
            for _ in range(count):
                backend.run(layer, queries[layer], plan)
        if device != "cpu":
            torch.cuda.synchronize(device)
        if turn:
            best = min(best, time.perf_counter() - started)
    return best
