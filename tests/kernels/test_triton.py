"""Tree attention in Triton: under its interpreter, and compiled for GPUs of other machines."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV
from ssd_serve.kernels.batch import build_batch, padded
from ssd_serve.kernels.device import captured_rows
from ssd_serve.kernels.triton.attention import TritonAttention
from ssd_serve.kernels.triton.shapes import SPLIT, TILES, tile_of
from ssd_serve.models.warmup import one_tree, single_rows
from tests.kernels.test_attention import SLOTS, filled_cache, largest_difference, random_request, rows_of
from tests.kernels.triton_compilation import (
    TARGETS,
)

pytestmark = pytest.mark.slow


def interpreted(cache: KVCache, heads: int) -> TritonAttention:
    """Return the attention with widened inputs: the interpreter computes bfloat16 wrongly."""
    return TritonAttention(cache, heads, widen=True)


@pytest.mark.parametrize("seed", range(4))
def test_equals_reference(seed: int) -> None:
    rng = random.Random(seed)
    slots = rng.sample(range(SLOTS), SLOTS)
    batch = build_batch([random_request(rng, slots, (2, 7, 18)) for _ in range(2)])
    heads, kv_heads = [(4, 4), (4, 2), (8, 2), (6, 1)][seed]
    worst = largest_difference(
        batch,
        interpreted,
        heads=heads,
        kv_heads=kv_heads,
        windows=[None, 7],
        seed=seed,
        head_dim=[16, 24][seed % 2],
    )
    assert worst < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    rng = random.Random(1)
    slots = rng.sample(range(SLOTS), SLOTS)
    batch = build_batch([random_request(rng, slots) for _ in range(2)])
    worst = largest_difference(batch, interpreted, heads=4, kv_heads=2, windows=[9], dtype=dtype, seed=2)
    assert worst < 20 * 8 * torch.finfo(dtype).eps


def test_triton_row_is_batch_invariant() -> None:
    """Parts and blocks of the context have fixed lengths, which do not depend on the rest of the batch."""
    rng = random.Random(3)
    prefix = rng.sample(range(100, 100 + SPLIT), 90)
    cache = filled_cache([LayerKV(2, 16)], torch.float32, torch.Generator().manual_seed(3))
    queries = torch.randn((40, 4, 16), generator=torch.Generator().manual_seed(4))
    single = rows_of(range(1), prefix[:60], [7], [60], None)
    others = [random_request(rng, list(range(10, 90)))]
    attention = interpreted(cache, 4)
    alone = attention.run(0, queries[:1], attention.plan(build_batch([single])))
    batch = build_batch([single, *others])
    together = attention.run(0, queries[: batch.rows], attention.plan(batch))
    assert torch.equal(alone, together[:1])


@pytest.mark.parametrize("scratch_bytes", [1, 4 << 10])
def test_batches_beyond_scratch_memory_use_several_launches(scratch_bytes: int) -> None:
    rng = random.Random(5)
    slots = rng.sample(range(SLOTS), SLOTS)
    batch = build_batch([random_request(rng, slots) for _ in range(3)])
    queries = torch.randn((batch.rows, 4, 16), generator=torch.Generator().manual_seed(6))
    cache = filled_cache([LayerKV(2, 16)], torch.float32, torch.Generator().manual_seed(7))
    whole, parted = interpreted(cache, 4), TritonAttention(cache, 4, widen=True, scratch_bytes=scratch_bytes)
    plan = parted.plan(batch)
    assert len(plan.shape.launches) > 1
    assert parted.captured_as(plan) is None
    for part, expected in zip(
        parted.run_with_lse(0, queries, plan),
        whole.run_with_lse(0, queries, whole.plan(batch)),
        strict=True,
    ):
        assert torch.equal(part, expected)


def test_batch_beyond_fixed_memory_is_not_captured() -> None:
    rng = random.Random(8)
    slots = rng.sample(range(SLOTS), SLOTS)
    cache = filled_cache([LayerKV(1, 16)], torch.float32, torch.Generator().manual_seed(9))
    attention = interpreted(cache, 1)
    rows = rows_of(range(300), [], slots[:300], list(range(300)), None)
    plan, again = attention.plan(build_batch([rows])), attention.plan(build_batch([rows]))
    assert attention.captured_as(plan) is None
    assert plan.memory is not again.memory
    small = attention.plan(build_batch([rows_of(range(2), slots[:9], slots[9:11], [9, 10], None)]))
    assert attention.captured_as(small) is not None


@pytest.mark.parametrize("heads", [4, 6, 16])
def test_tree_shape_depends_only_on_row_count(heads: int) -> None:
    rng, cache = random.Random(heads), KVCache(KVLayout((LayerKV(2, 16),), torch.bfloat16), 2600, "cpu")
    attention, slots = TritonAttention(cache, heads), list(range(2600))
    for rows in (*range(1, 18), 24, 33, 40, 57, 64, 100, 128, 200, 256):
        captured = captured_rows(rows)
        assert captured is not None
        prefix = rng.choice([0, 1, 256, 257, 1024, 1025, 2048])
        context = 1 if prefix <= 1024 else 2048
        ahead = attention.plan(one_tree(captured, context)).shape
        depths = list(range(prefix, prefix + rows))
        tree = build_batch([rows_of(range(rows), slots[:prefix], slots[2100 : 2100 + rows], depths, None)])
        if rows <= 128:
            assert attention.plan(padded(tree, captured, 2599)).shape == ahead
        single = build_batch([rows_of(range(1), slots[:9], [2100 + row], [9], None) for row in range(rows)])
        ahead = attention.plan(single_rows(captured)).shape
        assert attention.plan(padded(single, captured, 2599)).shape == ahead


def test_tiles_hold_whole_rows_of_a_group() -> None:
    half, whole = torch.bfloat16, torch.float32
    assert [tile_of(stacked, half) for stacked in (1, 16, 17, 64, 5000)] == [16, 16, 32, 64, TILES[-1]]
    assert [tile_of(stacked, whole, group) for stacked, group in ((1, 1), (90, 8), (90, 24))] == [16, 16, 32]
    cache = KVCache(KVLayout((LayerKV(2, 16),), half), 64, "cpu")
    rows = rows_of(range(30), [], list(range(30)), list(range(30)), None)
    plan = TritonAttention(cache, 12).plan(build_batch([rows]))
    requests, firsts, counts = (
        plan.memory[name][:4].tolist() for name in ("tile_requests", "tile_rows", "tile_counts")
    )
    assert (plan.shape.tile, set(requests)) == (64, {0})
    assert counts == [10, 10, 10, 0]
    assert firsts[:3] == list(np.cumsum([0, *counts[:2]]))


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [target.name for target in TARGETS])
def test_largest_configurations_compile_without_register_spills(tmp_path: Path, gpu: str) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    del environment["TRITON_INTERPRET"]
    words = [sys.executable, "-m", "tests.kernels.triton_compilation", gpu, "128", "256", "largest"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout
    for kernel, least in (("attend_parts", 15), ("merge_parts", 5), ("fill_noise", 0)):
        assert done.stdout.count(kernel) > least
