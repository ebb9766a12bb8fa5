"""Whether an attention backend gives a row the same bits alone, in a tree and in any batch.

Tried before it serves, on this device: what a foreign kernel chooses by the shape of a batch is seen nowhere
else. Knows backends by how they are made; no model.
"""

import random
from typing import Any

import torch

from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV
from ssd_serve.kernels.attention.contract import AttentionBackend, Maker
from ssd_serve.kernels.attention.self_test import SMALL, Heads, TriedRequest, layout_order, random_batch
from ssd_serve.kernels.attention.unrolled import single, unrolled
from ssd_serve.kernels.batch import Batch

_WINDOW = 11
_BATCHES = ((*SMALL[0], TriedRequest(1, 1)), (TriedRequest(530, 20), TriedRequest(600, 9, depth=0)))


def depends_on_batch(make: Maker, form: Heads, device: str) -> bool:
    """Whether some row of trees, chunks and single rows changes when it is computed alone."""
    return any(_depends(make, form, device, asked) for asked in _BATCHES)


def _depends(make: Maker, form: Heads, device: str, asked: tuple[TriedRequest, ...]) -> bool:
    slots = 64 + sum(each.prefix + each.rows for each in asked)
    layers = (LayerKV(form.kv_heads, form.head_dim), LayerKV(form.kv_heads, form.head_dim, _WINDOW))
    cache = KVCache(KVLayout(layers, form.dtype, order=layout_order(device)), slots, device)
    generator = torch.Generator().manual_seed(form.heads)
    for layer in range(len(layers)):
        filled = torch.randn((slots, 2 * form.kv_heads, form.head_dim), generator=generator)
        cache.write(layer, torch.arange(slots, device=device), filled.to(device, form.dtype))
    backend = make(cache, form.heads)
    batch = random_batch(random.Random(slots), slots, asked)
    queries = torch.randn((batch.rows, form.heads, form.head_dim), generator=generator)
    queries = queries.to(device, form.dtype)
    return any(_differs(backend, layer, queries, batch) for layer in range(len(layers)))


def _differs(backend: AttentionBackend[Any], layer: int, queries: torch.Tensor, batch: Batch) -> bool:
    together = backend.run(layer, queries, backend.plan(batch))
    rows = unrolled(batch)
    return any(
        not torch.equal(
            backend.run(layer, queries[row : row + 1], backend.plan(single(rows, row)))[0], together[row]
        )
        for row in range(batch.rows)
    )
