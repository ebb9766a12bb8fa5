"""Attention through FlashInfer that is captured once and replayed: other batches, the same launches."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV
from ssd_serve.kernels.attention.contract import Capturable
from ssd_serve.kernels.attention.reference import ReferenceAttention
from ssd_serve.kernels.batch import Batch, build_batch, padded
from ssd_serve.kernels.device import captured_rows
from ssd_serve.kernels.flashinfer import captured as module
from ssd_serve.kernels.flashinfer.attention import FlashInferAttention
from ssd_serve.kernels.flashinfer.captured import MAX_CAPTURED_ROWS
from tests.kernels.flashinfer_double import WORKSPACE, Doubles
from tests.kernels.flashinfer_signatures import ALL, PORT, UPSTREAM, Recorded
from tests.kernels.test_attention import SLOTS, filled_cache, random_paths, rows_of
from tests.kernels.test_flashinfer import chunk, fork
from tests.models.tape import Tape

pytestmark = pytest.mark.slow

PACKAGES = pytest.mark.parametrize("captured", ALL, ids=str)
PADDING = SLOTS - 1


def attention_over(doubles: Doubles, *layers: LayerKV, slots: int = SLOTS) -> FlashInferAttention:
    cache = KVCache(KVLayout(layers, torch.float32, order="slots"), slots, "cpu")
    return FlashInferAttention(cache, 8, doubles.package(), workspace_bytes=WORKSPACE)


def random_batch(rng: random.Random, sizes: Sequence[tuple[int, int]], *, trees: bool) -> Batch:
    """Requests of (prefix, rows), padded to a row count that is captured."""
    slots = rng.sample(range(PADDING), PADDING)
    parts = []
    for prefix, rows in sizes:
        paths = random_paths(rng, rows) if trees else [list(range(row + 1)) for row in range(rows)]
        own = [slots.pop() for _ in range(rows)]
        positions = [prefix + len(path) - 1 for path in paths]
        parts.append(rows_of(range(rows), [slots.pop() for _ in range(prefix)], own, positions, paths))
    batch = build_batch(parts)
    count = captured_rows(batch.rows)
    assert count is not None
    return padded(batch, count, PADDING)


class Replayed:
    """Layers whose attention is captured at the first batch of a kind and replayed from then on."""

    def __init__(self, captured: Recorded, windows: Sequence[int | None], kv_heads: int) -> None:
        layers = [LayerKV(kv_heads, 16, window) for window in windows]
        first = torch.Generator().manual_seed(1)
        self.tape = Tape()
        self.doubles = Doubles(captured, self.tape)
        self.right = filled_cache(layers, torch.float32, first)
        self.attention = self.doubles.attention(self.right, 8)
        self.generator = torch.Generator().manual_seed(2)
        self.kept: dict[object, tuple[Callable[[], None], torch.Tensor, list[torch.Tensor]]] = {}

    def compare(self, batch: Batch) -> None:
        """Write and attend in all layers, and on the reference."""
        plan = self.attention.plan_to_capture(batch)
        assert plan is not None
        key = batch.rows, self.attention.captured_as(plan)
        layers = len(self.right.layout.layers)
        new = torch.randn(
            (layers, batch.rows, 8 + 2 * self.right.layout.layers[0].heads, 16), generator=self.generator
        )
        if key not in self.kept:
            rows = new.clone()

            def work() -> list[torch.Tensor]:
                found: list[torch.Tensor] = []
                for layer in range(layers):
                    self.attention.write(layer, rows[layer, :, 8:], plan)
                    found += self.attention.run_with_lse(layer, rows[layer, :, :8], plan)
                return found

            self.tape.warm_up(work)
            graph, results = self.tape.capture(work)
            self.kept[key] = graph.replay, rows, results
        replay, rows, outputs = self.kept[key]
        rows.copy_(new)
        replay()
        slow = ReferenceAttention(self.right)
        same = slow.plan(batch)
        for layer in range(layers):
            slow.write(layer, new[layer, :, 8:], same)
            expected = slow.run_with_lse(layer, new[layer, :, :8], same)
            for found, right in zip(outputs[2 * layer : 2 * layer + 2], expected, strict=True):
                torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)


@PACKAGES
@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32),
    kv_heads=st.sampled_from([8, 2, 1]),
    windows=st.sampled_from([[None], [7], [None, 3, None]]),
    sizes=st.lists(
        st.lists(
            st.tuples(st.sampled_from([0, 1, 9, 50]), st.sampled_from([1, 1, 2, 5])), min_size=1, max_size=4
        ),
        min_size=2,
        max_size=5,
    ),
)
def test_equals_reference(
    captured: Recorded,
    seed: int,
    kv_heads: int,
    windows: list[int | None],
    sizes: list[list[tuple[int, int]]],
) -> None:
    """Batches with other requests, trees, chains, slots and lengths, in any order."""
    rng = random.Random(seed)
    replayed = Replayed(captured, windows, kv_heads)
    for each in sizes:
        replayed.compare(random_batch(rng, each, trees=rng.random() < 0.6))
    assert replayed.tape.runs <= len({captured_rows(sum(rows for _, rows in each)) for each in sizes}) * 2
    assert replayed.tape.replays == len(sizes)


@PACKAGES
def test_a_recording_is_for_a_row_count_with_or_without_a_mask(captured: Recorded) -> None:
    rng = random.Random(3)
    replayed = Replayed(captured, [None], 2)
    for sizes, trees, runs in (
        ([(9, 5), (30, 2)], True, 1),
        ([(0, 3), (1, 4), (50, 1)], True, 1),
        ([(9, 5), (30, 2)], False, 2),
        ([(5, 1)] * 8, False, 2),
        ([(5, 9)], True, 3),
        ([(70, 8)], True, 3),
    ):
        replayed.compare(random_batch(rng, sizes, trees=trees))
        assert replayed.tape.runs == runs


def test_trees_beside_chunks_are_masked_wholly() -> None:
    doubles = Doubles(PORT)
    attention = attention_over(doubles, LayerKV(2, 16))
    assert isinstance(attention, Capturable)
    batch = build_batch([chunk(range(9), [50]), fork([1], [60, 61, 62])])
    plan = attention.plan_to_capture(batch)
    assert plan is not None
    assert [part.rows for part in plan.parts] == [None]
    [double] = doubles.made
    assert double.planned["qo_indptr"].tolist() == [0, 1, 4, 4, 4]
    assert double.planned["paged_kv_indptr"].tolist() == [0, 10, 14, 14, 14]
    assert len(double.planned["custom_mask"]) == 10 + 3 * 4


def test_all_row_counts_share_buffers() -> None:
    """Of one kind of layer; memory is taken at the first plan."""
    doubles = Doubles(UPSTREAM)
    attention = attention_over(doubles, LayerKV(2, 16), LayerKV(2, 16, 5))
    assert doubles.made == []
    rng = random.Random(4)
    for rows in (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64) * 2:
        for trees in (False, True):
            assert attention.plan_to_capture(random_batch(rng, [(3, rows)], trees=trees)) is not None
    assert len(doubles.made) <= 11 * 2 * 2
    places: dict[str, set[int]] = {}
    for double in doubles.made:
        assert double.fixed is not None
        for name, buffer in double.fixed.items():
            places.setdefault(name, set()).add(buffer.data_ptr())
    assert {name: len(found) for name, found in places.items()} == dict.fromkeys(places, 2)
    assert len(places) == 6


@pytest.mark.parametrize("rows", [3, 5, 9, 63, MAX_CAPTURED_ROWS + 8])
def test_other_row_counts_are_planned_as_ever(rows: int) -> None:
    doubles = Doubles(UPSTREAM)
    attention = attention_over(doubles, LayerKV(2, 16))
    batch = build_batch([chunk([1, 2], range(100, 100 + rows))])
    assert attention.plan_to_capture(batch) is None
    assert doubles.made == []
    assert attention.captured_as(attention.plan(batch)) is None


def test_what_buffers_do_not_hold_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    doubles = Doubles(UPSTREAM)
    small = attention_over(doubles, LayerKV(2, 16), slots=10)
    shared = [chunk(range(8), [8 + index % 2]) for index in range(4)]
    assert small.plan_to_capture(build_batch(shared)) is not None  # 36 entries of 40
    assert small.plan_to_capture(build_batch([*shared[:1] * 8])) is None  # 72
    tree, chain = (
        build_batch([fork(range(40), [60, 61, 62]), chunk([], [63])]),
        build_batch([chunk([1], [2])]),
    )
    assert attention_over(doubles, LayerKV(2, 16)).plan_to_capture(tree) is not None
    monkeypatch.setattr(module, "_MASK_BYTES", 16)  # 130 entries
    limited = attention_over(doubles, LayerKV(2, 16))
    assert limited.plan_to_capture(tree) is None
    assert limited.plan_to_capture(chain) is not None


def test_fixed_splits_are_not_recorded() -> None:
    """They would need as many launches as a context has pieces."""
    cache = KVCache(KVLayout((LayerKV(2, 16),), torch.float32, order="slots"), SLOTS, "cpu")
    attention = FlashInferAttention(
        cache, 4, Doubles(UPSTREAM).package(), workspace_bytes=WORKSPACE, split_pages=64
    )
    assert attention.plan_to_capture(build_batch([chunk([1], [2])])) is None


def test_a_fixed_plan_is_good_until_the_next() -> None:
    attention = attention_over(Doubles(UPSTREAM), LayerKV(2, 16))
    batch = build_batch([chunk([1], [2])])
    old = attention.plan_to_capture(batch)
    attention.plan(batch)
    assert old is not None
    with pytest.raises(RuntimeError, match="one plan at a time"):
        attention.run(0, torch.ones((1, 8, 16)), old)
