"""Prefixes that begin with whole pages of slots: which do, and that reading them by pages changes nothing."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV
from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.kernels.flashinfer.attention import FlashInferAttention
from ssd_serve.kernels.flashinfer.tables import leading_pages
from tests.examples import examples
from tests.kernels.flashinfer_double import WORKSPACE, Doubles
from tests.kernels.flashinfer_signatures import ALL, PORT, UPSTREAM, Recorded
from tests.kernels.test_attention import SLOTS, largest_difference, random_paths, rows_of
from tests.kernels.test_flashinfer import chunk, fork, shown

PACKAGES = pytest.mark.parametrize("recorded", ALL, ids=str)
LONGEST = 21
LENGTHS = st.lists(st.integers(0, LONGEST), min_size=1, max_size=5)


def request_with(
    rng: random.Random, run: int, page_size: int, pages: list[int], scattered: list[int], shared: list[int]
) -> RequestRows:
    """A prefix that begins with `run` slots in order from the start of a page (or with what is shared), then
    some scattered ones, or none; and a tree or a chunk."""
    first = pages.pop() * page_size
    prefix = list(range(first, first + run)) if rng.random() < 0.7 else shared[:run]
    prefix += [scattered.pop() for _ in range(rng.choice([0, 0, 1, page_size, 9]))]
    own = [scattered.pop() for _ in range(rng.choice([1, 2, 6]))]
    paths = random_paths(rng, len(own))
    if rng.random() < 0.4:
        paths = [list(range(index + 1)) for index in range(len(own))]
    positions = [len(prefix) + len(path) - 1 for path in paths]
    return rows_of(range(len(own)), prefix, own, positions, paths)


@PACKAGES
@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 2**32),
    runs=LENGTHS,
    page_size=st.sampled_from([2, 4, 7, 16]),
    shape=st.sampled_from([(4, 4), (8, 2), (6, 1)]),
    windows=st.sampled_from([[None], [7], [None, 3, None]]),
)
def test_equals_reference(
    recorded: Recorded,
    seed: int,
    runs: list[int],
    page_size: int,
    shape: tuple[int, int],
    windows: list[int | None],
) -> None:
    """Runs of every length, prefixes shorter than a page, shared ones; outputs and log-sum-exps."""
    rng = random.Random(seed)
    each = -(-LONGEST // page_size)  # pages that a run lies in
    pages = [each * index for index in range(len(runs) + 1)]
    taken = each * len(pages) * page_size
    scattered = rng.sample(range(taken, SLOTS), SLOTS - taken)
    first = pages.pop() * page_size
    shared = list(range(first, first + LONGEST))
    batch = build_batch([request_with(rng, run, page_size, pages, scattered, shared) for run in runs])
    worst = largest_difference(
        batch,
        partial(Doubles(recorded).attention, page_size=page_size),
        heads=shape[0],
        kv_heads=shape[1],
        windows=windows,
        seed=seed,
    )
    assert worst < 1e-4


@given(seed=st.integers(0, 2**32), runs=LENGTHS, page_size=st.sampled_from([1, 2, 4, 7]))
def test_leading_pages_are_those_that_look_so(seed: int, runs: list[int], page_size: int) -> None:
    """Beginnings in order, off by one, swapped somewhere: counted one page after the other."""
    rng = random.Random(seed)
    parts: list[RequestRows] = []
    for index, run in enumerate(runs):
        prefix = list(range(28 * index, 28 * index + run))
        if run > 1 and rng.random() < 0.5:
            place = rng.randrange(run - 1)
            prefix[place : place + 2] = prefix[place + 1], prefix[place]
        if rng.random() < 0.2:
            prefix = [slot + 1 for slot in prefix]
        parts.append(chunk(prefix, [600 + index]))
    expected: list[int] = []
    for part in parts:
        slots, count = part.prefix_slots.tolist(), 0
        while len(slots) >= page_size and slots[0] % page_size == 0:
            if slots[:page_size] != list(range(slots[0], slots[0] + page_size)):
                break
            slots, count = slots[page_size:], count + 1
        expected.append(count)
    assert leading_pages(build_batch(parts), page_size).tolist() == expected


def paged_attention(
    doubles: Doubles, *layers: LayerKV, page_size: int = 4, slots: int = SLOTS
) -> FlashInferAttention:
    cache = KVCache(KVLayout(layers, torch.float32, order="slots"), slots, "cpu")
    return FlashInferAttention(cache, 4, doubles.package(), workspace_bytes=WORKSPACE, page_size=page_size)


def test_pages_are_left_out_of_the_rest_and_its_mask() -> None:
    doubles = Doubles(PORT)
    attention = paged_attention(doubles, LayerKV(2, 16))
    parts = [
        fork([*range(8, 16), 4, 5], [60, 61, 62]),
        chunk([1, 2, 3, 4], [70]),  # in order, but no page
        chunk([*range(8, 20)], [80, 81]),
    ]
    plan = attention.plan(build_batch(parts))
    [masked] = doubles.planned(masked=True)
    causal, paged = doubles.planned(masked=False)
    assert masked["paged_kv_indices"].tolist() == [4, 5, 60, 61, 62]
    assert shown(masked["custom_mask"]) == "11100 11110 11101".replace(" ", "")
    assert causal["paged_kv_indices"].tolist() == [1, 2, 3, 4, 70, 80, 81]
    assert (paged["causal"], paged["page_size"], paged["window_left"]) == (False, 4, -1)
    assert paged["qo_indptr"].tolist() == [0, 3, 5]
    assert paged["paged_kv_indptr"].tolist() == [0, 2, 5]
    assert paged["paged_kv_indices"].tolist() == [2, 3, 2, 3, 4]
    assert paged["paged_kv_last_page_len"].tolist() == [4, 4]
    assert plan.paged is not None
    assert plan.paged.rows is not None
    assert plan.paged.rows.tolist() == [0, 1, 2, 4, 5]


def test_batches_without_pages_are_as_they_were() -> None:
    doubles = Doubles(UPSTREAM)
    attention = paged_attention(doubles, LayerKV(2, 16))
    plan = attention.plan(build_batch([chunk([1, 2, 3, 4, 5], [70]), fork([8, 9, 10], [11, 12, 13])]))
    assert plan.paged is None
    assert len(doubles.made) == 2


def test_layers_with_windows_read_no_pages() -> None:
    doubles = Doubles(UPSTREAM)
    windowed = paged_attention(doubles, LayerKV(2, 16, 9)).plan(build_batch([chunk(range(8), [70])]))
    assert windowed.paged is None
    both = paged_attention(doubles, LayerKV(2, 16, 9), LayerKV(2, 16))
    plan = both.plan(build_batch([chunk(range(8), [70])]))
    assert plan.paged is not None
    assert list(plan.paged.wrappers) == [LayerKV(2, 16)]
    [first, second, paged] = [double.planned for double in doubles.made[-3:]]
    assert first["paged_kv_indices"].tolist() == [*range(8), 70]
    assert second["paged_kv_indices"].tolist() == [70]
    assert paged["paged_kv_indices"].tolist() == [0, 1]


def test_slots_behind_the_last_whole_page_are_read_alone() -> None:
    doubles = Doubles(UPSTREAM)
    attention = paged_attention(doubles, LayerKV(2, 16), slots=11)
    batch = build_batch([chunk(range(4, 10), [10])])
    plan = attention.plan(batch)
    keys_values = torch.randn((11, 4, 16), generator=torch.Generator().manual_seed(1))
    attention.write(0, keys_values[batch.write_slots], plan)
    attention.run(0, torch.ones((1, 4, 16)), plan)
    assert doubles.planned(masked=False)[0]["paged_kv_indices"].tolist() == [8, 9, 10]


def test_where_splits_are_fixed_a_page_is_a_slot() -> None:
    """Where a prefix lies must not show in a row's result."""
    doubles = Doubles(UPSTREAM)
    cache = KVCache(KVLayout((LayerKV(2, 16),), torch.float32, order="slots"), SLOTS, "cpu")
    attention = FlashInferAttention(
        cache, 4, doubles.package(), workspace_bytes=WORKSPACE, split_pages=64, page_size=4
    )
    assert attention.plan(build_batch([chunk(range(8), [70])])).paged is None


@PACKAGES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(recorded: Recorded, dtype: torch.dtype) -> None:
    batch = build_batch([fork(range(21), [50, 52, 54]), chunk(np.arange(64, 128).tolist(), [60, 61])])
    worst = largest_difference(
        batch,
        partial(Doubles(recorded).attention, page_size=4),
        heads=8,
        kv_heads=2,
        windows=[None],
        dtype=dtype,
        seed=2,
    )
    assert worst < 20 * 3 * torch.finfo(dtype).eps  # two results are rounded, and their sum
