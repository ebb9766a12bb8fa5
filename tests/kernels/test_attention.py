"""Tests of every tree attention backend against the reference: random trees, batches, windows, layouts."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV
from ssd_serve.kernels.attention.contract import AttentionBackend
from ssd_serve.kernels.attention.invariance import UnrolledAttention
from ssd_serve.kernels.attention.sdpa import SdpaAttention, SdpaRows
from ssd_serve.kernels.attention.self_test import ReferenceAttention, visible_slots
from ssd_serve.kernels.batch import Batch, RequestRows, build_batch
from ssd_serve.kernels.native.attention import NativeAttention
from ssd_serve.kernels.native.library import NativeLibrary
from tests.examples import examples

SLOTS = 640
HEAD_DIM = 16

Maker = Callable[[KVCache, int], AttentionBackend[Any]]
"""Factory of a backend for a cache and a number of query heads."""


@pytest.fixture(scope="session", params=["sdpa", "sdpa by rows", "native"])
def make(request: pytest.FixtureRequest) -> Maker:
    """Return the factory of each backend that works in float32."""
    if request.param == "sdpa":
        return SdpaAttention
    if request.param == "sdpa by rows":
        return lambda cache, heads: UnrolledAttention(SdpaRows(cache, heads))
    library: NativeLibrary = request.getfixturevalue("native")
    return lambda cache, heads: NativeAttention(library, cache, heads)


def random_paths(rng: random.Random, nodes: int) -> list[list[int]]:
    """Return, for each node of a random tree, the indices of its ancestors and its own."""
    paths: list[list[int]] = [[0]]
    for node in range(1, nodes):
        paths.append([*paths[rng.randrange(node)], node])
    return paths


def random_request(
    rng: random.Random, slots: list[int], sizes: Sequence[int] = (1, 2, 5, 9, 40, 70)
) -> RequestRows:
    """Return a chunk, a tree, or (as in drafters) the newest nodes of a tree with all others computed."""
    kind = rng.choice(["chunk", "tree", "late rows"])
    prefix = [slots.pop() for _ in range(rng.choice([0, 0, 1, 7, 40]))]
    size = rng.choice(sizes)
    own = [slots.pop() for _ in range(size)]
    if kind == "chunk":
        return rows_of(range(size), prefix, own, [len(prefix) + i for i in range(size)], None)
    paths = random_paths(rng, size)
    positions = [len(prefix) + len(path) - 1 for path in paths]
    first = 0 if kind == "tree" else rng.randrange(size)
    return rows_of(range(first, size), prefix, own, positions, paths)


def rows_of(
    rows: range, prefix: list[int], own: list[int], positions: list[int], paths: list[list[int]] | None
) -> RequestRows:
    """Return the rows `rows` of a request with the tree slots `own`."""
    return RequestRows(
        tokens=[0] * len(rows),
        positions=[positions[row] for row in rows],
        write_slots=[own[row] for row in rows],
        prefix_slots=np.asarray(prefix, dtype=np.int32),
        wanted=[],
        ancestry=None if paths is None else [sum(1 << index for index in paths[row]) for row in rows],
        tree_slots=own,
        tree_positions=positions,
    )


def filled_cache(layers: Sequence[LayerKV], dtype: torch.dtype, generator: torch.Generator) -> KVCache:
    """Return a cache with large numbers in every slot, so that reading a wrong slot is detected."""
    cache = KVCache(KVLayout(tuple(layers), dtype), SLOTS, "cpu")
    for index, layer in enumerate(layers):
        data = torch.randn((SLOTS, 2 * layer.heads, layer.head_dim), generator=generator) * 5
        cache.write(index, torch.arange(SLOTS), data.to(dtype))
    return cache


def largest_difference(
    batch: Batch,
    make: Maker,
    *,
    heads: int,
    kv_heads: int,
    windows: Sequence[int | None],
    seed: int,
    dtype: torch.dtype = torch.float32,
    head_dim: int = HEAD_DIM,
) -> float:
    """Run all layers through a backend and the reference; return the largest difference of any output."""
    generator = torch.Generator().manual_seed(seed)
    layers = [LayerKV(kv_heads, head_dim, window) for window in windows]
    ours, theirs = (filled_cache(layers, dtype, generator.manual_seed(seed)) for _ in range(2))
    fast, slow = make(ours, heads), ReferenceAttention(theirs)
    plan, same = fast.plan(batch), slow.plan(batch)
    worst = 0.0
    for layer in range(len(layers)):
        rows = torch.randn((batch.rows, heads + 2 * kv_heads, head_dim), generator=generator).to(dtype)
        queries, new = rows[:, :heads], rows[:, heads:]
        fast.write(layer, new, plan)
        slow.write(layer, new, same)
        found, found_lse = fast.run_with_lse(layer, queries, plan)
        expected, expected_lse = slow.run_with_lse(layer, queries, same)
        assert torch.equal(found, fast.run(layer, queries, plan))
        for mine, right in ((found, expected), (found_lse, expected_lse)):
            worst = max(worst, float((mine - right).abs().max()))
    return worst


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 2**32),
    requests=st.integers(1, 5),
    shape=st.sampled_from([(4, 4), (4, 2), (8, 2), (6, 1), (1, 1)]),
    windows=st.sampled_from([[None], [7], [None, 3], [1]]),
    layout=st.sampled_from(["in order", "shuffled", "nearby"]),
    head_dim=st.sampled_from([16, 16, 24, 64, 80]),
)
def test_equals_reference(
    make: Maker,
    seed: int,
    requests: int,
    shape: tuple[int, int],
    windows: list[int | None],
    layout: str,
    head_dim: int,
) -> None:
    rng = random.Random(seed)
    slots = list(reversed(range(SLOTS)))
    if layout == "shuffled":
        rng.shuffle(slots)
    elif layout == "nearby":
        slots = [slot for start in range(0, SLOTS, 20) for slot in rng.sample(range(start, start + 20), 20)]
    batch = build_batch([random_request(rng, slots) for _ in range(requests)])
    worst = largest_difference(
        batch, make, heads=shape[0], kv_heads=shape[1], windows=windows, seed=seed, head_dim=head_dim
    )
    assert worst < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    rng = random.Random(1)
    slots = rng.sample(range(SLOTS), SLOTS)
    batch = build_batch([random_request(rng, slots) for _ in range(4)])
    worst = largest_difference(
        batch, SdpaAttention, heads=8, kv_heads=2, windows=[None, 9], dtype=dtype, seed=2
    )
    single = [rows_of(range(1), list(range(30)), [40], [30], None)]
    for parts in (single, [*single, random_request(rng, slots)]):
        difference = largest_difference(
            build_batch(parts), SdpaAttention, heads=2, kv_heads=2, windows=[None], dtype=dtype, seed=3
        )
        worst = max(worst, difference)
    assert worst < 20 * 8 * torch.finfo(dtype).eps  # values reach about 20, sums round a few times


def test_foreign_slots_do_not_leak(make: Maker) -> None:
    """Huge numbers in every slot that a row may not see leave its output bitwise equal."""
    prefix, own = [0, 2, 4, 6, 9], [11, 13, 15]
    batch = build_batch([rows_of(range(3), prefix, own, [5, 6, 6], [[0], [0, 1], [0, 2]])])
    outputs: list[torch.Tensor] = []
    for foreign in (0.0, 1e30):
        cache = KVCache(KVLayout((LayerKV(2, HEAD_DIM, 4),), torch.float32), SLOTS, "cpu")
        data = torch.full((SLOTS, 4, HEAD_DIM), foreign)
        data[prefix + own] = torch.randn((8, 4, HEAD_DIM), generator=torch.Generator().manual_seed(6))
        cache.write(0, torch.arange(SLOTS), data)
        queries = torch.randn((3, 4, HEAD_DIM), generator=torch.Generator().manual_seed(7))
        attention = make(cache, 4)
        outputs.append(attention.run(0, queries, attention.plan(batch)))
    assert torch.equal(outputs[0], outputs[1])


def test_reference_visible_slots_follow_ancestry_and_window() -> None:
    batch = build_batch(
        [
            rows_of(range(1, 3), [3, 1], [8, 9, 7], [2, 3, 3], [[0], [0, 1], [0, 2]]),
            rows_of(range(2), [], [20, 21], [0, 1], None),
        ]
    )
    assert visible_slots(batch, 0, None) == [3, 1, 8, 9]
    assert visible_slots(batch, 1, None) == [3, 1, 8, 7]
    assert visible_slots(batch, 1, 2) == [8, 7]
    assert visible_slots(batch, 3, None) == [20, 21]
    assert visible_slots(batch, 3, 1) == [21]
