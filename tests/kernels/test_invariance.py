"""Batch invariance: a row has the same bits alone, in a tree, in a chunk and in any batch; unrolled batches."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_serve.base.errors import UserError
from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV
from ssd_serve.kernels.attention.backends import candidates, choose_attention
from ssd_serve.kernels.attention.contract import Maker
from ssd_serve.kernels.attention.invariance import UnrolledAttention, depends_on_batch, single, unrolled
from ssd_serve.kernels.attention.sdpa import SdpaAttention, SdpaRows
from ssd_serve.kernels.attention.self_test import Heads, visible_slots
from ssd_serve.kernels.batch import Batch, build_batch
from ssd_serve.kernels.fixed_rows import threads
from ssd_serve.kernels.native.attention import NativeAttention
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.triton.attention import TritonAttention
from ssd_serve.kernels.triton.shapes import SPLIT
from tests.examples import examples
from tests.kernels.test_attention import SLOTS, filled_cache, random_paths, random_request, rows_of

SMALL = Heads(4, 2, 16, torch.float32)


def unrolling(make: Maker) -> Maker:
    return lambda cache, heads: UnrolledAttention(make(cache, heads))


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 2**32),
    shape=st.sampled_from([(4, 4, 16), (8, 2, 64), (6, 1, 24), (1, 1, 80)]),
    ordered=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_sdpa_rows_are_batch_invariant(
    seed: int, shape: tuple[int, int, int], ordered: bool, dtype: torch.dtype
) -> None:
    """SingleRank after its context was committed, in a mixed batch, and with another number of threads."""
    rng = random.Random(seed)
    slots = list(reversed(range(SLOTS))) if ordered else rng.sample(range(SLOTS), SLOTS)
    batch = build_batch([random_request(rng, slots) for _ in range(3)])
    heads, kv_heads, head_dim = shape
    layers = [LayerKV(kv_heads, head_dim), LayerKV(kv_heads, head_dim, 7)]
    attention = SdpaRows(filled_cache(layers, dtype, torch.Generator().manual_seed(seed % 1000)), heads)
    queries = torch.randn((batch.rows, heads, head_dim), generator=torch.Generator().manual_seed(1)).to(dtype)
    rows = unrolled(batch)
    for layer in range(len(layers)):
        together = attention.run(layer, queries, attention.plan(rows))
        with threads(2):
            assert torch.equal(together, attention.run(layer, queries, attention.plan(rows)))
        for row in rng.sample(range(batch.rows), min(8, batch.rows)):
            alone = attention.run(layer, queries[row : row + 1], attention.plan(single(rows, row)))
            assert torch.equal(alone[0], together[row])


@pytest.mark.slow
def test_triton_rows_are_batch_invariant_when_unrolled() -> None:
    rng = random.Random(2)
    prefix = [rng.sample(range(100, SLOTS), size) for size in (SPLIT + 5, 20)]
    paths = random_paths(rng, 4)
    tree = rows_of(range(4), prefix[0], list(range(4)), [SPLIT + 4 + len(path) for path in paths], paths)
    chunk = rows_of(range(2), prefix[1], [20, 21], [20, 21], None)
    batch = build_batch([chunk, tree])
    layers = [LayerKV(2, 16), LayerKV(2, 16, 7)]
    cache = filled_cache(layers, torch.float32, torch.Generator().manual_seed(3))
    attention = TritonAttention(cache, 4, widen=True)
    queries = torch.randn((batch.rows, 4, 16), generator=torch.Generator().manual_seed(4))
    rows = unrolled(batch)
    for layer in range(len(layers)):
        together = attention.run(layer, queries, attention.plan(rows))
        for row in (1, 2, 5):
            alone = attention.run(layer, queries[row : row + 1], attention.plan(single(rows, row)))
            assert torch.equal(alone[0], together[row])


@pytest.mark.slow
def test_triton_kernels_need_unrolled_trees() -> None:
    """The same row as a node of a tree and in plain decoding: the reason for all this."""
    prefix, own = list(range(100, 160)), [7, 9, 11]
    cache = filled_cache([LayerKV(2, 16)], torch.float32, torch.Generator().manual_seed(3))
    queries = torch.randn((3, 4, 16), generator=torch.Generator().manual_seed(4))
    chunk = build_batch([rows_of(range(3), prefix, own, [60, 61, 62], None)])
    plain = build_batch([rows_of(range(1), [*prefix, 7, 9], [11], [62], None)])
    attention = TritonAttention(cache, 4, widen=True)
    last = attention.run(0, queries, attention.plan(chunk))[2]
    assert not torch.equal(last, attention.run(0, queries[2:], attention.plan(plain))[0])
    rows = UnrolledAttention(attention)
    last = rows.run(0, queries, rows.plan(chunk))[2]
    assert torch.equal(last, rows.run(0, queries[2:], rows.plan(plain))[0])


def test_unrolled_rows_have_one_tile_in_every_batch() -> None:
    attention = UnrolledAttention(
        TritonAttention(KVCache(KVLayout((LayerKV(2, 16),), torch.bfloat16), 99, "cpu"), 12)
    )
    sizes = {
        attention.plan(build_batch([rows_of(range(n), [], list(range(n)), list(range(n)), None)])).shape.tile
        for n in (1, 2, 30)
    }
    assert len(sizes) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dependence_is_found(dtype: torch.dtype) -> None:
    form = replace(SMALL, dtype=dtype)
    assert not depends_on_batch(unrolling(SdpaRows), form, "cpu")
    assert depends_on_batch(SdpaAttention, form, "cpu")


def test_native_attention_is_batch_invariant(native: NativeLibrary) -> None:
    assert not depends_on_batch(partial(NativeAttention, native), SMALL, "cpu")


def test_sdpa_rows_refuse_batches_that_are_not_unrolled() -> None:
    batch = build_batch([rows_of(range(2), [4], [7, 8], [1, 2], None)])
    attention = SdpaRows(KVCache(KVLayout((LayerKV(2, 16),), torch.float32), 16, "cpu"), 4)
    with pytest.raises(ValueError, match="unroll the batch"):
        attention.plan(batch)


def test_backend_that_depends_on_its_batch_is_refused(tmp_path: Path) -> None:
    cache = KVCache(KVLayout((LayerKV(2, 16),), torch.float32), 16, "cpu")
    found = {each.name: each for each in candidates(cache, None, tmp_path, invariant=True)}
    assert all(each.invariant for each in found.values())
    assert choose_attention("auto", cache, 4, list(found.values())).name == "sdpa"
    wrong = replace(found["sdpa"], make=SdpaAttention)
    with pytest.raises(UserError, match=r"4/2 heads of 16 in float32: a row's result depends on its batch"):
        choose_attention("sdpa", cache, 4, [wrong])


def some_batch(seed: int, requests: int = 4) -> Batch:
    rng = random.Random(seed)
    slots = rng.sample(range(SLOTS), SLOTS)
    return build_batch([random_request(rng, slots) for _ in range(requests)])


def seen_by_position(batch: Batch, request: int, row: int) -> list[int]:
    """The slots that a row attends to, in order of position, spelled out."""
    prefix = batch.prefix_slots[batch.prefix_offsets[request] : batch.prefix_offsets[request + 1]].tolist()
    start, end = (int(each) for each in batch.tree_offsets[request : request + 2])
    bits = batch.ancestry_bits()[row]
    own = [index for index in range(start, end) if bits[index - start]]
    own.sort(key=lambda index: int(batch.tree_positions[index]))
    return [*prefix, *batch.tree_slots[own].tolist()]


@given(seed=st.integers(0, 2**32), requests=st.integers(1, 6))
def test_rows_attend_to_the_same_slots_in_order_of_position(seed: int, requests: int) -> None:
    batch = some_batch(seed, requests)
    rows = unrolled(batch)
    assert rows.requests == rows.rows == batch.rows
    owners = np.repeat(np.arange(batch.requests), np.diff(batch.request_offsets))
    for row, request in enumerate(owners):
        assert seen_by_position(rows, row, row) == seen_by_position(batch, int(request), row)
        assert rows.prefix_offsets[row + 1] - rows.prefix_offsets[row] == batch.positions[row]
        for window in (None, 1, 7):
            kept, there = (visible_slots(each, row, window) for each in (batch, rows))
            assert sorted(kept) == sorted(there)
    assert rows.tree_slots.tolist() == batch.write_slots.tolist()
    for name in ("tokens", "positions", "write_slots", "rows_wanted"):
        assert getattr(rows, name) is getattr(batch, name)


@given(seed=st.integers(0, 2**32))
def test_a_row_of_an_unrolled_batch_alone_is_a_batch(seed: int) -> None:
    rows = unrolled(some_batch(seed))
    row = random.Random(seed).randrange(rows.rows)
    alone = single(rows, row)
    assert seen_by_position(alone, 0, 0) == seen_by_position(rows, row, row)
    assert unrolled(alone) is alone


def test_plain_decoding_is_unrolled_already() -> None:
    parts = [rows_of(range(1), [4, 2], [7], [2], None), rows_of(range(1), [], [9], [0], None)]
    batch = build_batch(parts)
    assert unrolled(batch) is batch


def test_a_gap_between_prefix_and_ancestors_is_refused() -> None:
    batch = build_batch([rows_of(range(2), [4], [7, 8], [1, 2], None)])
    with pytest.raises(ValueError, match="one for each position"):
        unrolled(replace(batch, tree_positions=batch.tree_positions + 1))


@given(seed=st.integers(0, 2**32))
def test_native_attention_is_equal_with_and_without_unrolling(native: NativeLibrary, seed: int) -> None:
    batch = some_batch(seed)
    layers = [LayerKV(2, 16), LayerKV(2, 16, 7)]
    cache = filled_cache(layers, torch.float32, torch.Generator().manual_seed(3))
    attention = NativeAttention(native, cache, 4)
    queries = torch.randn((batch.rows, 4, 16), generator=torch.Generator().manual_seed(4))
    for layer in range(len(layers)):
        rolled = attention.run(layer, queries, attention.plan(batch))
        assert torch.equal(rolled, attention.run(layer, queries, attention.plan(unrolled(batch))))


def test_unrolling_keeps_a_backend_capturable() -> None:
    cache = filled_cache([LayerKV(2, 16)], torch.float32, torch.Generator().manual_seed(3))
    triton = UnrolledAttention(TritonAttention(cache, 4, widen=True))
    two, same = (triton.plan(some_batch(1, requests)) for requests in (1, 1))
    assert triton.captured_as(two) == triton.captured_as(same) is not None
    plain = UnrolledAttention(SdpaRows(cache, 4))
    assert plain.captured_as(plain.plan(some_batch(1, 1))) is None
