"""Reference tree attention, slow and obvious, in float64: every backend is tested against it."""

import torch

from ssd_serve.cache.kv import KVCache
from ssd_serve.kernels.batch import Batch


def visible_slots(batch: Batch, row: int, window: int | None) -> list[int]:
    """Return the slots that a row attends to: its request's prefix and its ancestors, inside the window."""
    request = next(r for r in range(batch.requests) if row < int(batch.request_offsets[r + 1]))
    prefix = batch.prefix_slots[batch.prefix_offsets[request] : batch.prefix_offsets[request + 1]]
    tree = slice(int(batch.tree_offsets[request]), int(batch.tree_offsets[request + 1]))
    places = [(int(slot), position) for position, slot in enumerate(prefix)]
    pairs = zip(batch.tree_slots[tree], batch.tree_positions[tree], strict=True)
    for index, (slot, position) in enumerate(pairs):
        if int(batch.ancestry[row, index // 64]) >> (index % 64) & 1:
            places.append((int(slot), int(position)))
    first = -1 if window is None else int(batch.positions[row]) - window
    return [slot for slot, position in places if position > first]


class ReferenceAttention:
    """Attends one row at a time, for layers of any kind but states. The plan is the batch itself."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    @property
    def dtype(self) -> torch.dtype:
        return self._cache.layout.dtype

    def plan(self, batch: Batch) -> Batch:
        return batch

    def write(self, layer: int, stored: torch.Tensor, plan: Batch) -> None:
        self._cache.write(layer, torch.from_numpy(plan.write_slots), stored)

    def run(self, layer: int, queries: torch.Tensor, plan: Batch) -> torch.Tensor:
        return self.run_with_lse(layer, queries, plan)[0]

    def run_with_lse(
        self, layer: int, queries: torch.Tensor, plan: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, heads, _ = queries.shape
        shape = self._cache.layout.layers[layer]
        keys, values = self._cache.keys(layer).double(), self._cache.values(layer).double()
        group = heads // keys.shape[0]
        result = torch.empty(rows, heads, shape.value_dim, dtype=torch.float64)
        lse = torch.empty(rows, heads)
        for row in range(rows):
            slots = visible_slots(plan, row, shape.window)
            seen = keys[:, slots].repeat_interleave(group, 0)  # [heads, slots, head_dim]
            scores = (seen @ queries[row, :, :, None].double())[..., 0] * shape.scale  # [heads, slots]
            weights = torch.softmax(scores, -1)[:, None]  # [heads, 1, slots]
            result[row] = (weights @ values[:, slots].repeat_interleave(group, 0))[:, 0]
            lse[row] = torch.logsumexp(scores, -1)
        return result.flatten(1).to(queries.dtype), lse
