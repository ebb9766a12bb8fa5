"""Tree attention through FlashInfer's wrappers, by doubles that compute from the buffers they are given."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_serve.base.errors import UserError
from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV
from ssd_serve.kernels.attention import self_test
from ssd_serve.kernels.attention.invariance import UnrolledAttention, depends_on_batch
from ssd_serve.kernels.attention.self_test import Heads
from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.kernels.device import Clock
from ssd_serve.kernels.flashinfer.attention import FlashInferAttention, FlashInferPlan, workspace_for
from ssd_serve.kernels.flashinfer.factory import fastest_page_size
from tests.examples import examples
from tests.kernels.flashinfer_double import WORKSPACE, Doubles
from tests.kernels.flashinfer_signatures import ALL, PORT, PORT_MAIN, UPSTREAM, Recorded
from tests.kernels.test_attention import SLOTS, largest_difference, random_request, rows_of

PACKAGES = pytest.mark.parametrize("recorded", ALL, ids=str)


def chunk(prefix: Sequence[int], own: Sequence[int]) -> RequestRows:
    """Rows that follow the prefix, each seeing all before it."""
    positions = [len(prefix) + index for index in range(len(own))]
    return rows_of(range(len(own)), list(prefix), list(own), positions, None)


def fork(prefix: Sequence[int], own: Sequence[int]) -> RequestRows:
    """A root with two children."""
    positions = [len(prefix), len(prefix) + 1, len(prefix) + 1]
    return rows_of(range(3), list(prefix), list(own), positions, [[0], [0, 1], [0, 2]])


def attention_over(
    layers: Sequence[LayerKV], doubles: Doubles, heads: int = 4, device: str = "cpu"
) -> FlashInferAttention:
    cache = KVCache(KVLayout(tuple(layers), torch.float32, order="slots"), SLOTS, device)
    return FlashInferAttention(cache, heads, doubles.package(), workspace_bytes=WORKSPACE)


@PACKAGES
@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 2**32),
    requests=st.integers(1, 5),
    shape=st.sampled_from([(4, 4), (4, 2), (8, 2), (6, 1), (1, 1)]),
    windows=st.sampled_from([[None], [7], [None, 3], [1], [5, None, 5]]),
    scattered=st.booleans(),
)
def test_equals_reference(
    recorded: Recorded,
    seed: int,
    requests: int,
    shape: tuple[int, int],
    windows: list[int | None],
    scattered: bool,
) -> None:
    rng = random.Random(seed)
    slots = rng.sample(range(SLOTS), SLOTS) if scattered else list(reversed(range(SLOTS)))
    batch = build_batch([random_request(rng, slots) for _ in range(requests)])
    worst = largest_difference(
        batch,
        Doubles(recorded).attention,
        heads=shape[0],
        kv_heads=shape[1],
        windows=windows,
        seed=seed,
    )
    assert worst < 1e-4


@pytest.mark.parametrize(
    ("recorded", "place"), [(UPSTREAM, "cpu"), (PORT, "meta"), (PORT_MAIN, "meta")], ids=str
)
def test_index_buffers_are_on_the_device_the_package_needs(recorded: Recorded, place: str) -> None:
    """The port wants them on the device (and its double refuses others); upstream reads them on the host."""
    doubles = Doubles(recorded)
    attention = attention_over([LayerKV(2, 16)], doubles, device="meta")
    attention.plan(build_batch([fork([1], [2, 3, 4]), chunk([5], [6])]))
    for planned in (*doubles.planned(masked=True), *doubles.planned(masked=False)):
        assert {planned[name].device.type for name in ("qo_indptr", "paged_kv_indptr")} == {place}
        assert {planned[name].device.type for name in ("paged_kv_indices", "paged_kv_last_page_len")} == {
            place
        }
    assert doubles.planned(masked=True)[0]["custom_mask"].device.type == "meta"


def test_plan_is_invalid_after_the_next_plan() -> None:
    attention = attention_over([LayerKV(2, 16)], Doubles(UPSTREAM))
    batch = build_batch([chunk([1], [2])])
    old, _ = attention.plan(batch), attention.plan(batch)
    for run in (attention.run, attention.run_with_lse):
        with pytest.raises(RuntimeError, match="one plan at a time"):
            run(0, torch.ones((1, 4, 16)), old)


@PACKAGES
def test_unrolled_rows_are_causal_and_batch_invariant(recorded: Recorded) -> None:
    doubles = Doubles(recorded)

    def make(cache: KVCache, heads: int) -> UnrolledAttention[FlashInferPlan]:
        return UnrolledAttention(doubles.attention(cache, heads))

    assert not depends_on_batch(make, Heads(4, 2, 16, torch.float32), "cpu")
    assert doubles.made
    assert all(each.planned["custom_mask"] is None and each.planned["causal"] for each in doubles.made)


def test_fixed_splits_need_package_support() -> None:
    cache = KVCache(KVLayout((LayerKV(2, 64),), torch.bfloat16, order="slots"), 8, "cpu")
    doubles = Doubles(UPSTREAM)
    attention = FlashInferAttention(cache, 4, doubles.package(), workspace_bytes=8, split_pages=512)
    attention.plan(build_batch([chunk([1], [2])]))
    assert doubles.made[0].planned["fixed_split_size"] == 512
    for recorded in (PORT, PORT_MAIN):
        with pytest.raises(UserError, match="cannot split contexts at fixed places"):
            FlashInferAttention(cache, 4, Doubles(recorded).package(), workspace_bytes=8, split_pages=512)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (KVLayout((LayerKV(2, 64),), torch.float32, order="slots"), "no kernels for float32"),
        (KVLayout((LayerKV(2, 64), LayerKV(2, 96)), torch.bfloat16, order="slots"), "heads of 64, 96"),
    ],
)
def test_dtypes_and_head_sizes_without_kernels_are_refused(layout: KVLayout, text: str) -> None:
    package = replace(
        Doubles(UPSTREAM).package(),
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        head_dims=frozenset({64, 128, 256}),
    )
    with pytest.raises(UserError, match=text):
        FlashInferAttention(KVCache(layout, 8, "cpu"), 4, package, workspace_bytes=8)


def test_layout_with_heads_first_is_refused() -> None:
    cache = KVCache(KVLayout((LayerKV(2, 64),), torch.bfloat16), 8, "cpu")
    with pytest.raises(ValueError, match='order "slots"'):
        FlashInferAttention(cache, 4, Doubles(UPSTREAM).package(), workspace_bytes=8)


@PACKAGES
def test_self_test_covers_masks_pages_and_captured_wrappers(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubles = Doubles(recorded)
    monkeypatch.setattr(self_test, "layout_order", lambda device: "slots")

    def make(cache: KVCache, heads: int) -> FlashInferAttention:
        return FlashInferAttention(cache, heads, doubles.package(), workspace_bytes=WORKSPACE, page_size=16)

    assert self_test.first_failure(make, torch.float32, 64, "cpu", ((4, 2),)) == ""
    ways = {
        (
            double.fixed is not None,
            double.mask is not None,
            double.planned["causal"],
            double.planned["page_size"],
        )
        for double in doubles.made
    }
    assert ways == {
        (True, True, False, 1),  # recorded: trees
        (True, False, True, 1),  # recorded: single rows
        (False, True, False, 1),
        (False, False, True, 1),
        (False, False, False, 16),
    }


PAGED = KVLayout((LayerKV(2, 16),), torch.float32, order="slots")


def clock_of(*seconds: float) -> Clock:
    """A clock by which a forward takes these seconds, one page size after another; inf: it raises."""
    reads = itertools.count()

    def now() -> float:
        size, read = divmod(next(reads), 12)  # before and after each of six forwards
        if seconds[size] == math.inf:
            for _ in range(11):
                next(reads)
            raise RuntimeError("no kernel for pages of this size")
        return read * seconds[size]

    return now


@pytest.mark.parametrize(
    ("seconds", "best"), [((3.0, 1.0, 2.0), 16), ((1.0, 1.0, 1.0), 1), ((3.0, math.inf, 2.0), 64)]
)
def test_page_size_is_the_fastest_that_works(seconds: tuple[float, ...], best: int) -> None:
    cache, package = KVCache(PAGED, 2200, "cpu"), Doubles(UPSTREAM).package()
    clock = clock_of(*seconds)
    assert fastest_page_size(cache, 4, package, clock=clock, workspace_bytes=WORKSPACE) == best


def test_page_size_of_short_and_windowed_caches_is_not_measured() -> None:
    package, windowed = Doubles(UPSTREAM).package(), replace(PAGED, layers=(LayerKV(2, 16, 7),))
    sizes = [
        fastest_page_size(KVCache(layout, slots, "cpu"), 4, package, clock=clock_of())
        for layout, slots in ((PAGED, 15), (PAGED, 2000), (windowed, 2200))
    ]
    assert sizes == [1, 16, 1]


def test_workspace_fits_the_largest_kind_of_layer_on_all_processors() -> None:
    small, large = LayerKV(8, 128), LayerKV(1, 256)
    assert workspace_for([small], 32, 1) == 128 << 20
    assert workspace_for([small, large], 32, 132) == workspace_for([large], 32, 132)
    partial_results = 32 * (2 * 132) * 128 * (256 + 1) * 4  # heads, tiles at once, rows, numbers and a sum
    assert workspace_for([large], 32, 132) > partial_results


def test_forwards_beyond_the_limits_of_fixed_buffers_are_not_captured() -> None:
    """The double refuses what does not fit into a buffer, so a plan that is made does fit."""
    cache = KVCache(PAGED, SLOTS, "cpu")
    attention = FlashInferAttention(cache, 4, Doubles(UPSTREAM).package(), workspace_bytes=WORKSPACE)
    last = attention.plan(build_batch([chunk([1], [2])]))
    rows = {count: build_batch([chunk([], [slot]) for slot in range(count)]) for count in (3, 8, 64, 72)}
    assert [count for count, batch in rows.items() if attention.plan_to_capture(batch) is not None] == [8, 64]
    shared = list(range(600))  # a prefix that all requests have, of nearly all slots
    for requests, fits in ((4, True), (8, False)):
        batch = build_batch([chunk(shared, [610 + index]) for index in range(requests)])
        assert (attention.plan_to_capture(batch) is not None) == fits
    with pytest.raises(RuntimeError, match="one plan at a time"):
        attention.run(0, torch.ones((1, 4, 16)), last)


@pytest.mark.parametrize(("context", "fits"), [(60_000, True), (69_000, False)])
def test_forwards_with_masks_beyond_512_kib_are_not_captured(context: int, fits: bool) -> None:
    """A mask has a bit for each of 64 rows and each entry of the context."""
    cache = KVCache(PAGED, 70_000, "cpu")
    attention = FlashInferAttention(cache, 4, Doubles(UPSTREAM).package(), workspace_bytes=WORKSPACE)
    positions, own = [context, *[context + 1] * 63], list(range(context, context + 64))
    tree = [[0], *([0, node] for node in range(1, 64))]
    batch = build_batch([rows_of(range(64), list(range(context)), own, positions, tree)])
    assert (attention.plan_to_capture(batch) is not None) == fits
