"""Tree attention through FlashInfer's wrappers, by doubles that compute from the buffers they are given."""

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
from ssd_serve.kernels.attention.reference import visible_slots
from ssd_serve.kernels.attention.self_test import Heads, first_failure
from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.kernels.flashinfer.attention import FlashInferAttention, FlashInferPlan
from tests.examples import examples
from tests.kernels.flashinfer_double import WORKSPACE, Doubles
from tests.kernels.flashinfer_signatures import ALL, PORT, PORT_MAIN, UPSTREAM, Recorded
from tests.kernels.test_attention import SLOTS, largest_difference, random_request, rows_of
from tests.pretended_device import DEVICE, pretended_device

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


def shown(mask: torch.Tensor) -> str:
    """A mask in ones and noughts."""
    return "".join(str(int(bit)) for bit in mask.tolist())


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


@PACKAGES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(recorded: Recorded, dtype: torch.dtype) -> None:
    rng = random.Random(1)
    slots = rng.sample(range(SLOTS), SLOTS)
    batch = build_batch([random_request(rng, slots) for _ in range(4)])
    worst = largest_difference(
        batch, Doubles(recorded).attention, heads=8, kv_heads=2, windows=[None, 9], dtype=dtype, seed=2
    )
    assert worst < 20 * 2 * torch.finfo(dtype).eps  # values reach about 20; only results are rounded


@PACKAGES
@pytest.mark.parametrize("window", [None, 4])
def test_log_sum_exp_is_natural(recorded: Recorded, window: int | None) -> None:
    """Of scaled scores; in one part, and in two."""
    trees = build_batch([fork(range(5), [11, 13, 15])])
    both = build_batch([fork(range(5), [11, 13, 15]), chunk(range(20, 29), [30, 31])])
    for batch in (trees, both):
        attention = attention_over([LayerKV(2, 16, window)], Doubles(recorded))
        plan = attention.plan(batch)
        generator = torch.Generator().manual_seed(3)
        keys_values = torch.randn((SLOTS, 4, 16), generator=generator)
        attention.write(0, keys_values[batch.write_slots], plan)
        queries = torch.randn((batch.rows, 4, 16), generator=generator)
        out, lse = attention.run_with_lse(0, queries, plan)
        assert torch.equal(out, attention.run(0, queries, plan))
        assert lse.dtype is torch.float32
        assert lse.shape == (batch.rows, 4)
        written = torch.zeros((SLOTS, 4, 16))
        written[batch.write_slots] = keys_values[batch.write_slots]
        for row in range(batch.rows):
            seen = written[visible_slots(batch, row, window), :2]  # [context, kv_heads, head_dim]
            for head in range(4):
                scores = seen[:, head // 2] @ queries[row, head] / 4
                assert torch.allclose(lse[row, head], torch.logsumexp(scores, 0), atol=1e-5)


@PACKAGES
def test_foreign_slots_do_not_leak(recorded: Recorded) -> None:
    """Changing every slot that a row may not see changes not one bit of its output."""
    prefix, own = [0, 2, 4, 6, 9], [11, 13, 15]
    batch = build_batch([fork(prefix, own)])
    outputs: list[torch.Tensor] = []
    for foreign in (0.0, 1e30):
        cache = KVCache(KVLayout((LayerKV(2, 16, 4),), torch.float32, order="slots"), SLOTS, "cpu")
        data = torch.full((SLOTS, 4, 16), foreign)
        data[prefix + own] = torch.randn((8, 4, 16), generator=torch.Generator().manual_seed(6))
        cache.write(0, torch.arange(SLOTS), data)
        attention = FlashInferAttention(cache, 4, Doubles(recorded).package(), workspace_bytes=WORKSPACE)
        queries = torch.randn((3, 4, 16), generator=torch.Generator().manual_seed(7))
        outputs.append(attention.run(0, queries, attention.plan(batch)))
    assert torch.equal(outputs[0], outputs[1])


def test_only_trees_have_a_mask() -> None:
    """A prompt chunk and a decoding request beside two trees: the masks are those of the trees alone."""
    doubles = Doubles(PORT)
    attention = attention_over([LayerKV(2, 16)], doubles)
    parts = [
        chunk(range(9), [50, 51, 52, 53]),
        fork([], [60, 61, 62]),
        chunk([70, 71], [72]),
        fork([80], [1, 2, 3]),
    ]
    plan = attention.plan(build_batch(parts))
    [masked], [causal] = doubles.planned(masked=True), doubles.planned(masked=False)
    assert masked["qo_indptr"].tolist() == [0, 3, 6]
    assert masked["paged_kv_indices"].tolist() == [60, 61, 62, 80, 1, 2, 3]
    assert shown(masked["custom_mask"]) == "100 110 101 1100 1110 1101".replace(" ", "")
    assert causal["custom_mask"] is None
    assert causal["causal"]
    assert causal["qo_indptr"].tolist() == [0, 4, 5]
    assert causal["paged_kv_indptr"].tolist() == [0, 13, 16]
    assert causal["paged_kv_indices"].tolist() == [*range(9), 50, 51, 52, 53, 70, 71, 72]
    assert [None if part.rows is None else part.rows.tolist() for part in plan.parts] == [
        [0, 1, 2, 3, 7],
        [4, 5, 6, 8, 9, 10],
    ]


@pytest.mark.parametrize(
    "parts", [[chunk(range(9), [50, 51])], [chunk([1], [2]), chunk([], [3]), chunk([4], [5])]]
)
def test_nothing_is_masked_or_gathered_where_there_is_no_tree(parts: list[RequestRows]) -> None:
    doubles = Doubles(UPSTREAM)
    plan = attention_over([LayerKV(2, 16)], doubles).plan(build_batch(parts))
    assert [double.mask for double in doubles.made] == [None]
    assert [part.rows for part in plan.parts] == [None]


def test_trees_and_chunks_in_turn_keep_to_their_wrappers() -> None:
    """The double refuses a plan without a mask after one with a mask."""
    doubles = Doubles(PORT)
    attention = attention_over([LayerKV(2, 16)], doubles)
    queries = torch.ones((3, 4, 16))
    for part in (fork([1], [2, 3, 4]), chunk([1], [2, 3, 4])) * 2:
        attention.run(0, queries, attention.plan(build_batch([part])))
    assert len(doubles.made) == 2


def test_layers_of_one_kind_share_a_plan() -> None:
    doubles = Doubles(UPSTREAM)
    layers = [LayerKV(2, 16), LayerKV(2, 16, 4), LayerKV(2, 16), LayerKV(1, 32), LayerKV(2, 16, 4)]
    attention_over(layers, doubles).plan(build_batch([chunk(range(9), [50, 51])]))
    planned = doubles.planned(masked=False)
    assert [double.plans for double in doubles.made] == [1, 1, 1]
    assert [(plan["num_kv_heads"], plan["head_dim_qk"], plan["window_left"]) for plan in planned] == [
        (2, 16, -1),
        (2, 16, 3),
        (1, 32, -1),
    ]


def test_a_window_leaves_out_what_no_row_reaches() -> None:
    doubles = Doubles(UPSTREAM)
    attention = attention_over([LayerKV(2, 16, 4)], doubles)
    attention.plan(build_batch([chunk(range(9), [50, 51]), fork(range(10, 19), [60, 61, 62])]))
    [causal], [masked] = doubles.planned(masked=False), doubles.planned(masked=True)
    # The oldest rows stand at position 9 and see positions 6 to 9.
    assert causal["paged_kv_indices"].tolist() == [6, 7, 8, 50, 51]
    assert causal["window_left"] == 3
    assert masked["paged_kv_indices"].tolist() == [16, 17, 18, 60, 61, 62]
    assert masked["window_left"] == -1  # the mask knows it
    assert shown(masked["custom_mask"]) == "111100 011110 011101".replace(" ", "")


@pytest.mark.parametrize(
    ("recorded", "place"), [(UPSTREAM, "cpu"), (PORT, "meta"), (PORT_MAIN, "meta")], ids=str
)
def test_where_index_buffers_are(recorded: Recorded, place: str) -> None:
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


@pytest.mark.slow
@PACKAGES
def test_a_device_computes_what_the_reference_does(recorded: Recorded) -> None:
    doubles = Doubles(recorded)

    def make(cache: KVCache, heads: int) -> FlashInferAttention:
        return FlashInferAttention(cache, heads, doubles.package(), workspace_bytes=WORKSPACE)

    with pretended_device():
        assert not first_failure(make, torch.float32, 16, DEVICE, ((4, 2),))


def test_a_plan_is_good_until_the_next() -> None:
    attention = attention_over([LayerKV(2, 16)], Doubles(UPSTREAM))
    batch = build_batch([chunk([1], [2])])
    old, _ = attention.plan(batch), attention.plan(batch)
    for run in (attention.run, attention.run_with_lse):
        with pytest.raises(RuntimeError, match="one plan at a time"):
            run(0, torch.ones((1, 4, 16)), old)


@PACKAGES
def test_unrolled_rows_are_causal_and_their_own_to_the_bit(recorded: Recorded) -> None:
    doubles = Doubles(recorded)

    def make(cache: KVCache, heads: int) -> UnrolledAttention[FlashInferPlan]:
        return UnrolledAttention(doubles.attention(cache, heads))

    assert not depends_on_batch(make, Heads(4, 2, 16, torch.float32), "cpu")
    assert doubles.made
    assert all(each.planned["custom_mask"] is None and each.planned["causal"] for each in doubles.made)


def test_splits_are_fixed_only_where_the_package_can() -> None:
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
def test_what_kernels_cannot_do_is_refused(layout: KVLayout, text: str) -> None:
    package = replace(
        Doubles(UPSTREAM).package(),
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        head_dims=frozenset({64, 128, 256}),
    )
    with pytest.raises(UserError, match=text):
        FlashInferAttention(KVCache(layout, 8, "cpu"), 4, package, workspace_bytes=8)


def test_a_layout_with_heads_first_is_refused() -> None:
    cache = KVCache(KVLayout((LayerKV(2, 64),), torch.bfloat16), 8, "cpu")
    with pytest.raises(ValueError, match='order "slots"'):
        FlashInferAttention(cache, 4, Doubles(UPSTREAM).package(), workspace_bytes=8)


@PACKAGES
def test_the_self_test_tries_masks_pages_and_what_is_recorded(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the backend serves: with wrappers of every way, and none is wrong."""
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
