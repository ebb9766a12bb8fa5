"""Tests of captured forwards: results equal those of the decoder for all batches that share a graph."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest
import torch

from ssd_serve.base.draft_messages import FINAL
from ssd_serve.cache.kv import KVCache
from ssd_serve.kernels.attention.invariance import UnrolledAttention
from ssd_serve.kernels.batch import Batch, build_batch
from ssd_serve.kernels.device import MAX_CAPTURED_ROWS, CapturedGraph, captured_rows
from ssd_serve.kernels.rows import TorchRows
from ssd_serve.kernels.triton.attention import TritonAttention
from ssd_serve.models.architectures.contract import ModelParts
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.captured import CapturedModel
from ssd_serve.models.interface import CapturableModel, ModelFacts
from ssd_serve.models.parallel import Group, Parallel
from ssd_serve.models.weights.checkpoint import Checkpoint
from ssd_serve.models.weights.linear import LinearFactory
from tests.kernels.test_attention import rows_of
from tests.models import checkpoints
from tests.models.tape import Tape, recording_kernels

pytestmark = pytest.mark.slow

SLOTS = 96
T = TypeVar("T")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Triton's interpreter is slow: few layers and heads.
    few = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return checkpoints.save(checkpoints.make("llama3-gqa-tied", **few), tmp_path_factory.mktemp("model"))


def triton_attention(cache: KVCache, heads: int) -> Any:
    """Return Triton attention for the interpreter."""
    return TritonAttention(cache, heads, widen=True)


def unrolled_attention(cache: KVCache, heads: int) -> Any:
    """Return Triton attention with every row as a request of its own, as batch invariance needs it."""
    return UnrolledAttention(triton_attention(cache, heads))


def decoder(
    folder: Path, make_attention: Callable[[KVCache, int], Any], order: Literal["heads", "slots"] = "heads"
) -> tuple[CapturableModel, Any]:
    description = load_description(folder)
    architecture, config, sizes = description.architecture, description.config, description.sizes(Parallel())
    with torch.inference_mode(), Checkpoint(folder) as checkpoint:
        make = LinearFactory(
            checkpoint, parallel=Parallel(), device="cpu", dtype=torch.float32, packed=False, int8=False
        )
        weights = architecture.read_weights(config, checkpoint, make)
        layout = replace(sizes.layout(torch.float32), order=order)
        cache = KVCache(layout, SLOTS + 1, "cpu")
    attention = make_attention(cache, config.heads)
    facts = ModelFacts(
        "small", config.vocabulary, 128, config.layers, config.hidden, (2,), 0, 0, "cpu", "fp32"
    )
    parts = ModelParts(
        attention=attention,
        operations=TorchRows(torch.float32),
        facts=facts,
        slots=SLOTS,
        release=cache.release,
        features=(1, FINAL),
    )
    return architecture.build(config, weights, parts), attention


class Pair:
    """The same model twice: eager and captured."""

    def __init__(
        self,
        folder: Path,
        tape: Tape,
        make_attention: Callable[[KVCache, int], Any] = triton_attention,
        order: Literal["heads", "slots"] = "heads",
        plain: Callable[[KVCache, int], Any] = triton_attention,
    ) -> None:
        self.tape = tape
        self.plain, _ = decoder(folder, plain)
        second, attention = decoder(folder, make_attention, order)
        self.captured = CapturedModel(second, attention, self.tape, padding_slot=SLOTS)

    def compare(self, batch: Batch) -> None:
        """Assert equal results of both models."""
        expected, found = self.plain.forward(batch), self.captured.forward(batch)
        torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)
        assert found.features.keys() == expected.features.keys() == {"layer.1", "final"}
        for name, values in expected.features.items():
            torch.testing.assert_close(found.features[name], values, atol=1e-4, rtol=1e-4)


@pytest.fixture
def make_attention() -> Callable[[KVCache, int], Any]:
    return triton_attention


@pytest.fixture
def pair(
    folder: Path, make_attention: Callable[[KVCache, int], Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    both = Pair(folder, Tape(), make_attention)
    with recording_kernels(both.tape, monkeypatch):
        yield both


def batch_of(seed: int, *sizes: tuple[int, int]) -> Batch:
    """Return requests of (prefix, tree rows) with random trees in random slots, and logits of every row."""
    rng = random.Random(seed)
    slots = rng.sample(range(SLOTS), SLOTS)
    parts = []
    for prefix, rows in sizes:
        own = [slots.pop() for _ in range(rows)]
        paths = [[0]]
        for node in range(1, rows):
            paths.append([*paths[rng.randrange(node)], node])
        positions = [prefix + len(path) - 1 for path in paths]
        part = rows_of(range(rows), [slots.pop() for _ in range(prefix)], own, positions, paths)
        parts.append(part._replace(tokens=rng.choices(range(199), k=rows), wanted=range(rows)))
    return build_batch(parts)


@pytest.mark.parametrize("make_attention", [triton_attention, unrolled_attention])
def test_one_capture_serves_batches_of_one_shape(pair: Pair) -> None:
    """Requests, trees, slots, prefixes and numbers of requests differ; one capture serves all batches."""
    pair.compare(batch_of(1, (9, 3), (20, 2), (0, 1)))
    pair.compare(batch_of(2, (14, 1), (30, 1), (3, 4)))
    pair.compare(batch_of(3, (1, 4), (0, 1)))
    assert (pair.tape.runs, pair.tape.replays) == (1, 3)
    assert (pair.captured.graphs, pair.captured.captured_bytes > 0) == (1, True)


class Diary(Tape, Group):
    """Capture and rank group that record the order of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.happened: list[str] = []

    def warm_up(self, work: Callable[[], object]) -> None:
        self.happened.append("warm-up")
        super().warm_up(work)

    def quiesce(self) -> None:
        self.happened.append("quiet")

    def capture(self, work: Callable[[], T]) -> tuple[CapturedGraph, T]:
        self.happened.append("graph")
        return super().capture(work)

    def agree(self, yes: bool) -> bool:
        self.happened.append("vote")
        return yes


def test_group_is_quiesced_before_capture(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second, attention = decoder(folder, triton_attention)
    diary = Diary()
    with recording_kernels(diary, monkeypatch):
        CapturedModel(second, attention, diary, padding_slot=SLOTS, group=diary).forward(batch_of(1, (9, 3)))
    assert diary.happened == ["warm-up", "quiet", "graph", "vote"]


class OfTwo(Diary):
    """Rank 0 of two."""

    @property
    def parallel(self) -> Parallel:
        return Parallel(0, 2)


class Failing(Tape):
    """Capture that fails with an out-of-memory error."""

    def warm_up(self, work: Callable[[], object]) -> None:
        raise torch.OutOfMemoryError("no memory")


def test_failed_forward_of_a_rank_raises_without_a_vote(folder: Path) -> None:
    """The other ranks are still in that forward: a vote would be added to their all-reduce."""
    second, attention = decoder(folder, triton_attention)
    diary = OfTwo()
    captured = CapturedModel(second, attention, Failing(), padding_slot=SLOTS, group=diary)
    with pytest.raises(torch.OutOfMemoryError):
        captured.forward(batch_of(1, (9, 3)))
    assert diary.happened == []


def test_padded_forward_that_fails_runs_unpadded(folder: Path) -> None:
    plain, _ = decoder(folder, triton_attention)
    second, attention = decoder(folder, triton_attention)
    captured = CapturedModel(second, attention, Failing(), padding_slot=SLOTS)
    batch = batch_of(1, (9, 3))
    torch.testing.assert_close(captured.forward(batch).logits, plain.forward(batch).logits)


class Contradicted(Group):
    """Rank group in which another rank refuses."""

    def agree(self, yes: bool) -> bool:
        return False


def test_capture_refused_by_another_rank_is_not_replayed(folder: Path) -> None:
    plain, _ = decoder(folder, triton_attention)
    second, attention = decoder(folder, triton_attention)
    tape = Tape()
    captured = CapturedModel(second, attention, tape, padding_slot=SLOTS, group=Contradicted())
    for seed in (1, 2):
        batch = batch_of(seed, (9, 3))
        torch.testing.assert_close(captured.forward(batch).logits, plain.forward(batch).logits)
    assert (tape.runs, tape.replays, captured.graphs) == (1, 0, 0)


def test_result_tells_whether_it_includes_a_capture(pair: Pair) -> None:
    said = [pair.captured.forward(batch_of(seed, (9, 3))).includes_capture for seed in (1, 2, 3)]
    assert said == [True, False, False]
    pair.tape.refuses = "no"
    said = [pair.captured.forward(batch_of(seed, (9, 9))).includes_capture for seed in (4, 5)]
    assert said == [True, False]


def test_every_shape_has_its_own_graph(pair: Pair) -> None:
    pair.compare(batch_of(4, (9, 1)))
    pair.compare(batch_of(5, (9, 9)))
    pair.compare(batch_of(6, (0, 1)))  # no part of a prefix: the shape has some that are not used
    pair.compare(batch_of(7, (8, 1)))
    assert (pair.tape.runs, pair.tape.replays) == (2, 4)


def test_capture_ahead_covers_trees_and_single_rows(pair: Pair) -> None:
    pair.captured.capture_ahead(8)
    assert pair.captured.graphs == pair.tape.runs == 4, "1, 2, 4 and 8 rows, all with the same tiles"
    for batch in (batch_of(4, (9, 1)), batch_of(5, (60, 5)), batch_of(6, *[(5, 1)] * 7)):
        assert not pair.captured.forward(batch).includes_capture
    assert pair.captured.graphs == 4


def test_failed_capture_ahead_is_tried_again(pair: Pair) -> None:
    pair.tape.refuses = "out of memory"
    pair.captured.capture_ahead(2)
    assert pair.captured.graphs == 0
    pair.tape.refuses = ""
    assert pair.captured.forward(batch_of(4, (9, 1))).includes_capture
    assert pair.captured.row_counts == {1}


def test_rows_whose_logits_are_not_wanted(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = batch_of(8, (5, 4), (2, 3))
    pair.compare(replace(whole, rows_wanted=whole.rows_wanted[[0, 2, 3, 6]]))
    pair.compare(replace(whole, rows_wanted=whole.rows_wanted[[6]]))
    pair.compare(replace(whole, rows_wanted=whole.rows_wanted[:0]))
    assert (pair.tape.runs, pair.tape.replays) == (1, 3)
    monkeypatch.setattr("ssd_serve.models.captured._FEW_ROWS", 6)
    pair.compare(replace(whole, rows_wanted=whole.rows_wanted[[6]]))  # as of a long prompt: not captured
    assert (pair.tape.runs, pair.tape.replays) == (1, 3)


def test_failed_capture_runs_eagerly(pair: Pair) -> None:
    pair.tape.refuses = "an operation is not permitted while a stream is captured"
    pair.compare(batch_of(9, (9, 3)))
    pair.tape.refuses = ""
    pair.compare(batch_of(10, (9, 3)))
    assert (pair.tape.runs, pair.captured.graphs) == (0, 0)


def test_captured_row_counts() -> None:
    sizes = [captured_rows(rows) for rows in range(1, MAX_CAPTURED_ROWS + 1)]
    assert sorted({size for size in sizes if size is not None})[:8] == [1, 2, 4, 8, 16, 24, 32, 40]
    for rows, size in enumerate(sizes, 1):
        assert size is not None
        assert rows <= size <= MAX_CAPTURED_ROWS
        assert rows <= 32 or size - rows <= size / 5
        assert captured_rows(size) == size
    assert captured_rows(MAX_CAPTURED_ROWS + 1) is None
