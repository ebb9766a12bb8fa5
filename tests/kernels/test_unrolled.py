"""Unrolled batches: every row sees the slots that it saw, by position, as in plain decoding."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.cache.kv import LayerKV
from ssd_serve.kernels.attention.invariance import UnrolledAttention, single, unrolled
from ssd_serve.kernels.attention.sdpa import SdpaRows
from ssd_serve.kernels.attention.self_test import visible_slots
from ssd_serve.kernels.batch import Batch, build_batch
from ssd_serve.kernels.native.attention import NativeAttention
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.triton.attention import TritonAttention
from tests.kernels.test_attention import SLOTS, filled_cache, random_request, rows_of


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
def test_the_compiled_kernel_needs_no_unrolling(native: NativeLibrary, seed: int) -> None:
    batch = some_batch(seed)
    layers = [LayerKV(2, 16), LayerKV(2, 16, 7)]
    cache = filled_cache(layers, torch.float32, torch.Generator().manual_seed(3))
    attention = NativeAttention(native, cache, 4)
    queries = torch.randn((batch.rows, 4, 16), generator=torch.Generator().manual_seed(4))
    for layer in range(len(layers)):
        rolled = attention.run(layer, queries, attention.plan(batch))
        assert torch.equal(rolled, attention.run(layer, queries, attention.plan(unrolled(batch))))


def test_what_can_be_captured_stays_so() -> None:
    cache = filled_cache([LayerKV(2, 16)], torch.float32, torch.Generator().manual_seed(3))
    triton = UnrolledAttention(TritonAttention(cache, 4, widen=True))
    two, same = (triton.plan(some_batch(1, requests)) for requests in (1, 1))
    assert triton.captured_as(two) == triton.captured_as(same) is not None
    plain = UnrolledAttention(SdpaRows(cache, 4))
    assert plain.captured_as(plain.plan(some_batch(1, 1))) is None
