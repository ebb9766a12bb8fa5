"""Memory of the KV cache on CPUs: resident when it is written, and given back when it is free."""

import gc
import mmap
import random
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV
from ssd_serve.cache.slots import SlotPool

MIB = 1 << 20


def resident() -> int:
    """Anonymous pages of this process in bytes."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))


def filled(cache: KVCache, slots: Iterable[int]) -> None:
    """Writes each slot's number into all its keys and values."""
    numbers = torch.tensor(list(slots), dtype=torch.int64)
    for start in range(0, len(numbers), 512):
        rows = numbers[start : start + 512]
        for index, layer in enumerate(cache.layout.layers):
            cache.write(index, rows, rows.float()[:, None, None].expand(-1, *layer.stored))


@pytest.mark.parametrize("order", ["heads", "slots"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_follows_use(order: str, dtype: torch.dtype) -> None:
    layout = KVLayout((LayerKV(2, 64),) * 4, dtype, "heads" if order == "heads" else "slots")
    slots = 128 * MIB // layout.bytes_per_slot
    before = resident()
    cache = KVCache(layout, slots, "cpu")
    assert resident() - before < 8 * MIB
    filled(cache, range(slots // 2, slots // 2 + slots // 4))
    assert 30 * MIB < resident() - before < 64 * MIB
    cache.release([range(slots)])
    assert resident() - before < 8 * MIB
    assert not any(cache.keys(layer).any() or cache.values(layer).any() for layer in range(4))


@pytest.mark.parametrize("seed", range(20))
def test_slots_in_use_survive_releases(seed: int) -> None:
    """Against a set: whatever is taken and freed, a slot in use keeps what was written into it."""
    rng = random.Random(seed)
    layout = KVLayout((LayerKV(1, rng.choice([8, 24, 64])), LayerKV(2, 16)), torch.float32)
    slots = 40 * mmap.PAGESIZE // layout.bytes_per_slot
    cache, pool, used = KVCache(layout, slots, "cpu"), SlotPool(slots), set[int]()
    for _ in range(12):
        taken = pool.allocate(rng.randrange(pool.available + 1), rng.choice([None, rng.randrange(slots)]))
        assert taken is not None
        filled(cache, taken)
        used.update(taken)
        freed = rng.sample(sorted(used), rng.randrange(len(used) + 1))
        start = rng.randrange(slots)  # whole requests end, too
        freed = list({*freed, *(used & set(range(start, start + slots // 2)))})
        pool.free(freed)
        used.difference_update(freed)
        spans = pool.free_spans()
        assert [slot for span in spans for slot in span] == sorted(set(range(slots)) - used)
        assert all(a.stop < b.start for a, b in pairwise(spans))
        cache.release(spans)
        kept = np.array(sorted(used), dtype=np.int64)
        for index in range(2):
            for held in (cache.keys(index), cache.values(index)):
                assert (held[:, torch.from_numpy(kept)].numpy() == kept[None, :, None]).all()
