"""Causal requests are found, and tables and masks hold the slots that rows see."""

import random
from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.kernels.attention.self_test import visible_slots
from ssd_serve.kernels.batch import Batch, RequestRows, build_batch
from ssd_serve.kernels.flashinfer.tables import causal_requests, make_tables, rows_of
from tests.kernels.test_attention import SLOTS, random_request
from tests.kernels.test_attention import rows_of as rows_in


def random_batch(seed: int, requests: int) -> Batch:
    """Chunks, trees, late rows of trees, and chains of drafts, some of them late rows too."""
    rng = random.Random(seed)
    slots = rng.sample(range(SLOTS), SLOTS)
    return build_batch(
        [rng.choice([random_request, random_chain])(rng, slots) for _ in range(requests)],
    )


def random_chain(rng: random.Random, slots: list[int]) -> RequestRows:
    """The newest rows of a chain, as ancestry."""
    prefix = [slots.pop() for _ in range(rng.choice([0, 1, 30]))]
    size = rng.choice([1, 2, 63, 64, 65])
    own = [slots.pop() for _ in range(size)]
    rows = range(rng.randrange(size), size)
    positions = [len(prefix) + index for index in range(size)]
    return rows_in(rows, prefix, own, positions, [list(range(index + 1)) for index in range(size)])


class Seen(NamedTuple):
    context: list[int]
    rows: list[list[int]]


def seen_by(batch: Batch, request: int, window: int | None) -> Seen:
    prefix = batch.prefix_slots[batch.prefix_offsets[request] : batch.prefix_offsets[request + 1]]
    tree = batch.tree_slots[batch.tree_offsets[request] : batch.tree_offsets[request + 1]]
    rows = range(int(batch.request_offsets[request]), int(batch.request_offsets[request + 1]))
    context = [*map(int, prefix), *map(int, tree)]
    return Seen(context, [visible_slots(batch, row, window) for row in rows])


@given(seed=st.integers(0, 2**32), requests=st.integers(1, 6))
def test_causal_requests_match_the_reference(seed: int, requests: int) -> None:
    batch = random_batch(seed, requests)
    expected: list[bool] = []
    for request in range(requests):
        seen = seen_by(batch, request, None)
        first = len(seen.context) - len(seen.rows) + 1
        expected.append(
            all(slots == seen.context[: first + index] for index, slots in enumerate(seen.rows)),
        )
    assert causal_requests(batch).tolist() == expected


def test_positions_with_a_gap_are_not_causal() -> None:
    """A window is counted in places of the context where there is no mask: they must be positions."""
    rows = [[0], [0, 1], [0, 1, 2]]
    regular = rows_in(range(3), [7, 8], [1, 2, 3], [2, 3, 4], rows)
    gap = rows_in(range(3), [17, 18], [11, 12, 13], [2, 3, 5], rows)
    late_gap = rows_in(range(2, 3), [27, 28], [21, 22, 23], [2, 4, 4], rows)
    elsewhere = rows_in(range(3), [37, 38], [31, 32, 33], [2, 3, 4], rows)._replace(positions=[2, 3, 9])
    parts = [regular, gap, late_gap, elsewhere]
    assert causal_requests(build_batch(parts)).tolist() == [True, False, False, False]


@given(seed=st.integers(0, 2**32), requests=st.integers(1, 6), window=st.sampled_from([None, 1, 5, 200]))
def test_masks_match_the_visible_slots(seed: int, requests: int, window: int | None) -> None:
    batch = random_batch(seed, requests)
    chosen = np.flatnonzero(np.random.default_rng(seed).random(requests) < 0.7)
    chosen = chosen if len(chosen) else np.arange(requests)
    tables = make_tables(batch, chosen, window, masked=True)
    assert tables.mask is not None
    start = 0
    for index, request in enumerate(chosen):
        seen = seen_by(batch, int(request), window)
        pages = tables.pages[tables.page_offsets[index] : tables.page_offsets[index + 1]]
        assert seen.context[len(seen.context) - len(pages) :] == pages.tolist()
        for slots in seen.rows:
            row = tables.mask[start : start + len(pages)]
            assert pages[row].tolist() == slots
            start += len(pages)
        assert tables.query_offsets[index + 1] - tables.query_offsets[index] == len(seen.rows)
    assert start == len(tables.mask)
    assert tables.last_page_lengths.tolist() == [1] * len(chosen)


@given(seed=st.integers(0, 2**32), window=st.sampled_from([None, 1, 5, 200]))
def test_without_a_mask_the_context_is_the_same(seed: int, window: int | None) -> None:
    batch = random_batch(seed, 3)
    chosen = np.array([0, 2])
    bare, masked = (make_tables(batch, chosen, window, masked=masked) for masked in (False, True))
    assert bare.mask is None
    assert np.array_equal(bare.pages, masked.pages)
    assert np.array_equal(bare.page_offsets, masked.page_offsets)
    assert np.array_equal(bare.query_offsets, masked.query_offsets)
    assert all(array.dtype == np.int32 for array in (bare.pages, bare.page_offsets, bare.query_offsets))


def test_rows_of_some_requests() -> None:
    batch = build_batch(
        [
            rows_in(range(count), [], list(range(10 * count, 11 * count)), list(range(count)), None)
            for count in (3, 1, 2)
        ]
    )
    assert rows_of(batch, np.array([0, 2])).tolist() == [0, 1, 2, 4, 5]
    assert rows_of(batch, np.array([1])).tolist() == [3]
