"""The training loop's parts: schedule, sampler, optimiser and the workspace."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ssd_serve.base.errors import UserError
from ssd_serve.recipes.corpus import Corpus, SourceFile
from ssd_serve.recipes.data import Sampler, Workspace, load_tokenizer
from ssd_serve.recipes.optimiser import Schedule, orthogonalise


def test_learning_rate_follows_the_tokens() -> None:
    schedule = Schedule(1000, warm_up=0.02, decay=0.5)
    assert schedule.rate(10) == pytest.approx(0.5)
    assert schedule.rate(300) == 1.0
    assert schedule.rate(750) == pytest.approx(0.5)
    assert schedule.rate(1000) == schedule.rate(5000) == 0.0


def test_sampler_returns_every_window_once_an_epoch() -> None:
    sampler = Sampler(np.arange(1000, dtype=np.uint16), seed=3)
    starts = [int(sampler.batch(1, 32)[0][0]) for _ in range(sampler.windows(32))]
    assert len(set(starts)) == len(starts) == sampler.windows(32)
    assert {start % 32 for start in starts} == {starts[0] % 32}


def test_sampler_continues_where_it_stopped() -> None:
    stream = np.arange(1000, dtype=np.uint16)
    whole = Sampler(stream, seed=3)
    first, second = whole.batch(5, 16), whole.batch(70, 16)
    assert first.shape == (5, 17)
    assert np.array_equal(Sampler(stream, 3, {16: 5}).batch(70, 16), second)


def test_muon_orthogonalises() -> None:
    matrices = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert 0.5 < values.min() < values.max() < 1.3


def test_workspace_keeps_held_out_documents_apart(workspace: Workspace) -> None:
    documents = workspace.held_out()
    assert len(documents) == 40
    assert sum(map(len, documents)) == workspace.summary()["held_out_tokens"]
    assert len(workspace.stream()) == workspace.summary()["train_tokens"]


def test_workspace_of_another_tokenizer_is_refused(
    workspace: Workspace, target: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(target)
    workspace.prepare(Corpus((), ()), tokenizer, 1, {})
    tokenizer.add_tokens(["<another>"])
    with pytest.raises(UserError, match="another tokenizer"):
        workspace.prepare(Corpus((), ()), tokenizer, 1, {})
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path)


class WideTokenizer:
    """Encodes each text as one large id and some small ones."""

    def __init__(self, largest: int) -> None:
        self._ids = [largest, *range(99)]

    def encode_batch_fast(self, texts: list[str]) -> list["WideTokenizer"]:
        return [self for _ in texts]

    @property
    def ids(self) -> list[int]:
        return self._ids

    def save(self, _path: str) -> None:
        """Write nothing."""


@pytest.mark.parametrize(("largest", "dtype"), [(65_535, np.uint16), (65_536, np.uint32)])
def test_stream_has_the_smallest_dtype_that_holds_its_ids(
    tmp_path: Path, largest: int, dtype: type[np.generic]
) -> None:
    workspace, file = Workspace(tmp_path), SourceFile("a", "text")
    workspace.prepare(Corpus((file,), (file,)), WideTokenizer(largest), 1, {})  # type: ignore[arg-type]
    assert workspace.stream()[0] == largest
    assert workspace.stream().dtype == dtype
