"""A model on several ranks computes what it does on one, for every architecture and kind of batch."""

import random
import time
from collections.abc import Generator
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
import torch

from ssd_serve.base.draft_messages import FINAL
from ssd_serve.base.errors import ProtocolError, RankLostError, UserError
from ssd_serve.kernels.batch import Batch, RequestRows, build_batch, pack, unpack
from ssd_serve.models import load
from ssd_serve.models.architectures.dense.config import rank_config
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.interface import Model
from ssd_serve.models.load import ModelOptions, load_model
from ssd_serve.models.parallel import Group, Parallel, join_group
from ssd_serve.models.sizes import model_sizes
from ssd_serve.models.weights.checkpoint import Checkpoint
from tests.models import checkpoints
from tests.models.fp8_checkpoints import FORMS, QUICK_FORMS, write
from tests.models.ranked import SLOTS, in_ranks, ranked

HEADS = {"num_attention_heads": 8}
CASES = [
    *((case, size, {}) for case in checkpoints.CASES for size in (2, 4)),
    ("llama", 8, {**HEADS, "num_key_value_heads": 8}),
    ("qwen3-qk-norm", 8, {**HEADS, "num_key_value_heads": 2}),
    ("mistral-window", 8, HEADS),  # one key-value head for all
]
IDS = [f"{case}-{size}" for case, size, _ in CASES]
Pair = tuple[Model, Model]


QUICK_RANKS = 3
"""More of them are as many processes and groups more."""
MARKED = [pytest.param(each, marks=pytest.mark.slow if each[1] > QUICK_RANKS else ()) for each in CASES]


@pytest.fixture(scope="module", params=MARKED, ids=IDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Pair]:
    """The model on one rank, and on several."""
    case, size, changes = request.param
    folder = checkpoints.save(checkpoints.make(case, **changes), tmp_path_factory.mktemp("model"))
    alone = load_model(
        folder, ModelOptions(device="cpu", dtype="fp32", slots=SLOTS, context=None, features=(0, 2, FINAL))
    )
    store = tmp_path_factory.mktemp("store") / "store"
    with ranked(folder, store, size, dtype="fp32", features=(0, 2, FINAL)) as several:
        yield alone, several


def chunk(start: int, stop: int, seed: int = 1, wanted: list[int] | None = None) -> RequestRows:
    """Rows start..stop of a random text in slots of its own."""
    tokens = random.Random(seed).choices(range(199), k=stop)
    slots = range(100 * (seed % 2), 100 * (seed % 2) + stop)
    return RequestRows(
        tokens[start:],
        range(start, stop),
        slots[start:],
        np.asarray(slots[:start], dtype=np.int32),
        list(range(stop - start)) if wanted is None else wanted,
    )


def tree(start: int) -> RequestRows:
    """A root and seven nodes after a text of `start` tokens."""
    parents = [-1, 0, 0, 1, 1, 2, 3, 6]
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    return RequestRows(
        tokens=random.Random(5).choices(range(199), k=8),
        positions=[start - 1 + len(path) for path in paths],
        write_slots=[190, 3, 181, 182, 184, 199, 198, 197],
        prefix_slots=np.asarray(range(100, 100 + start), dtype=np.int32),
        wanted=range(8),
        ancestry=[sum(1 << index for index in path) for path in paths],
    )


BATCHES: dict[str, list[RequestRows]] = {
    "prompt": [chunk(0, 30)],
    "next chunk": [chunk(30, 37)],
    "one row": [chunk(37, 38)],
    "tree": [tree(38)],
    "two requests": [chunk(38, 39), chunk(0, 12, seed=2)],
    "some wanted": [chunk(0, 9, seed=4, wanted=[2, 8])],
    "none wanted": [chunk(0, 9, seed=6, wanted=[])],
}


def test_logits_and_features_equal_those_of_one_rank(pair: Pair) -> None:
    alone, several = pair
    for name, parts in BATCHES.items():
        batch = build_batch(parts)
        expected, found = alone.forward(batch), several.forward(batch)
        torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=0, msg=name)
        assert found.features.keys() == expected.features.keys() == {"layer.0", "layer.2", "final"}
        for layer, values in expected.features.items():
            torch.testing.assert_close(found.features[layer], values, atol=1e-4, rtol=1e-5, msg=name)


def test_vocabulary_is_whole_and_sizes_are_per_rank(pair: Pair) -> None:
    alone, several = pair
    assert several.facts.vocabulary == alone.facts.vocabulary == 199
    assert (alone.facts.ranks, several.facts.ranks > 1) == (1, True)
    assert several.facts.weight_bytes < 0.6 * alone.facts.weight_bytes
    assert several.facts.kv_bytes_per_slot <= alone.facts.kv_bytes_per_slot


def test_rank_reads_only_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoints.save(checkpoints.make("llama"), tmp_path / "model", max_shard_size="100KB")
    opened: list[Checkpoint] = []

    class Counted(Checkpoint):
        def __init__(self, folder: Path, *, allow_pickle: bool = False, partly: bool = False) -> None:
            super().__init__(folder, allow_pickle=allow_pickle, partly=partly)
            opened.append(self)

    monkeypatch.setattr(load, "Checkpoint", Counted)
    load_model(folder, ModelOptions(device="cpu", dtype="fp32", slots=SLOTS, context=None))
    whole = opened.pop().bytes_read
    for size in (2, 4):
        with ranked(folder, tmp_path / f"store{size}", size, dtype="fp32"):
            shares = [checkpoint.bytes_read for checkpoint in opened]
        opened.clear()
        assert len(shares) == size
        # Norms are every rank's; everything else is split.
        assert max(shares) < 1.03 * whole / size
        assert sum(shares) >= whole


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_narrow_dtypes_are_near_one_rank(dtype: str, tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make("llama3-gqa-tied"), tmp_path / "model")
    alone = load_model(folder, ModelOptions(device="cpu", dtype=dtype, slots=SLOTS, context=None))
    batch = build_batch([chunk(0, 30)])
    with ranked(folder, tmp_path / "store", 2, dtype=dtype) as several:
        found, expected = several.forward(batch).logits, alone.forward(batch).logits
    assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("form", QUICK_FORMS)
def test_fp8_shares_have_their_scales_or_are_refused(form: str, tmp_path: Path) -> None:
    write(FORMS[form], tmp_path / "model")
    alone = load_model(
        tmp_path / "model", ModelOptions(device="cpu", dtype="fp32", slots=SLOTS, context=None)
    )
    batch = build_batch([chunk(0, 30)])
    several = ranked(tmp_path / "model", tmp_path / "store", 2, dtype="fp32")
    if "block" in form:
        with pytest.raises(UserError, match="cannot be split inside a block; use fewer ranks"), several:
            pass
    else:
        with several as model:
            found = model.forward(batch).logits
        torch.testing.assert_close(found, alone.forward(batch).logits, atol=1e-4, rtol=0)


def test_batch_invariance_over_ranks(tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make("llama3-gqa-tied"), tmp_path / "model")
    with ranked(folder, tmp_path / "store", 2, dtype="fp32", batch_invariant=True) as several:
        whole = several.forward(build_batch([chunk(0, 24)])).logits
        single = [several.forward(build_batch([chunk(row, row + 1)])).logits for row in range(24)]
        together = several.forward(build_batch([chunk(12, 24), chunk(0, 30, seed=2)])).logits
    assert torch.equal(torch.cat(single), whole)
    assert torch.equal(together[:12], whole[12:])


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 8, r"8 ranks cannot share 4 attention heads, 2 key-value heads .* to 1 or 2 or 4 for"),
        ({"num_attention_heads": 6, "hidden_size": 96}, 4, r"SSD_TENSOR_PARALLEL to 1 or 2 for"),
        ({"intermediate_size": 111}, 2, "111 feed-forward columns"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}, 2, "3 key-value heads"),
    ],
)
def test_impossible_number_of_ranks_is_refused_before_reading(
    changes: dict[str, int], size: int, message: str, tmp_path: Path
) -> None:
    folder = checkpoints.save(checkpoints.make("llama3-gqa-tied", **{"head_dim": 16, **changes}), tmp_path)
    with pytest.raises(UserError, match=message):
        model_sizes(folder, device="cpu", dtype="fp32", ranks=size)


def test_neighbouring_ranks_share_a_kv_head(tmp_path: Path) -> None:
    config = load_description(checkpoints.save(checkpoints.make("qwen3-qk-norm", **HEADS), tmp_path)).config
    assert [Parallel(rank, 8).kv_heads(config.kv_heads).start for rank in range(8)] == [0] * 4 + [1] * 4
    assert {rank_config(config, Parallel(rank, 8)).kv_heads for rank in range(8)} == {1}
    assert sum(rank_config(config, Parallel(rank, 8)).vocabulary for rank in range(8)) == 199


def test_all_ranks_must_agree(tmp_path: Path) -> None:
    assert in_ranks(tmp_path / "one", 3, lambda group: group.agree(True)) == [True] * 3
    assert in_ranks(tmp_path / "two", 3, lambda group: group.agree(group.parallel.rank != 1)) == [False] * 3


def test_missing_rank_raises_rank_lost_error(tmp_path: Path) -> None:
    kept: list[Group] = []

    def work(group: Group) -> str:
        kept.append(group)  # one that is collected closes its connections while the other may be meeting
        if group.parallel.rank == 1:
            return "stays away"
        with pytest.raises(RankLostError, match="rank 0 of the target lost another"):
            group.add(torch.ones(3))
        return "lost"

    assert in_ranks(tmp_path / "store", 2, work, patience_s=0.5) == ["lost", "stays away"]
    with pytest.raises(RankLostError, match="did not meet"):
        join_group(tmp_path / "other", Parallel(0, 2), "cpu", patience_s=0.5)


def test_meet_waits_longer_than_patience(tmp_path: Path) -> None:
    def work(group: Group) -> bool:
        time.sleep(0.6 * group.parallel.rank)
        group.meet()
        first = group.agree(True)
        group.quiesce()
        group.meet()
        return first

    assert in_ranks(tmp_path / "store", 2, work, patience_s=0.3) == [True, True]


class Meeting(Group):
    """Rank group that records the order of barriers and votes."""

    def __init__(self) -> None:
        self.happened: list[str] = []

    def meet(self) -> None:
        self.happened.append("met")

    def agree(self, yes: bool) -> bool:
        self.happened.append("voted")
        return yes


def test_ranks_meet_before_they_vote(tmp_path: Path) -> None:
    folder, group = checkpoints.save(checkpoints.make("llama"), tmp_path), Meeting()
    load_model(folder, ModelOptions(device="cpu", dtype="fp32", slots=SLOTS, context=None), group=group)
    assert group.happened[:2] == ["met", "voted"]


def test_ranks_listen_on_loopback_only(tmp_path: Path) -> None:
    def listening() -> set[str]:
        found = psutil.Process().net_connections(kind="inet")
        return {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}

    assert set().union(*in_ranks(tmp_path / "store", 2, lambda _group: listening())) <= {"127.0.0.1"}


def test_packed_batches_are_unpacked_unchanged() -> None:
    for parts in BATCHES.values():
        batch = build_batch(parts)
        again = unpack(bytearray(pack(batch)))
        assert again.vectors is batch.vectors is None  # ranks never have any
        for name in set(Batch.__slots__) - {"vectors"}:
            assert np.array_equal(getattr(again, name), getattr(batch, name)), name
            assert getattr(again, name).dtype == getattr(batch, name).dtype
            assert getattr(again, name).flags.writeable
    with pytest.raises(ProtocolError, match="says that it has"):
        unpack(bytearray(pack(build_batch([chunk(0, 5)])))[:-1])
    with pytest.raises(ProtocolError, match="cut off"):
        unpack(bytearray(7))
