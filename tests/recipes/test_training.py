"""Texts, workspaces, sampling, the learning rate and the teacher's device."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from ssd_serve.base.errors import UserError
from ssd_serve.kernels.attention import backends
from ssd_serve.kernels.attention.backends import AttentionOptions
from ssd_serve.models.load import ModelOptions
from ssd_serve.recipes import training
from ssd_serve.recipes.data import (
    Corpus,
    Sampler,
    SourceFile,
    Workspace,
    library_corpus,
    load_tokenizer,
    read_sources,
    read_texts,
    split_texts,
    standard_library,
)
from ssd_serve.recipes.training import Teacher, rate_factor
from tests.pretended_device import DEVICE, pretended_device

PLACES: tuple[tuple[str, AbstractContextManager[object]], ...] = (
    ("cpu", nullcontext()),
    (DEVICE, pretended_device()),
)


def test_reading_sources_skips_installed_packages_and_other_encodings(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("x = 1\n")
    (tmp_path / "good.py").write_bytes(b"x = 1\r\ny = 2\r\n")
    (tmp_path / "latin.py").write_bytes(b"name = '\xe9'\n")
    (tmp_path / "empty.py").write_text("\n")
    assert read_sources(tmp_path) == (SourceFile("good.py", "x = 1\ny = 2\n"),)


def test_the_end_of_each_text_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("".join(f"line {number}\n" for number in range(100)))
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "long").write_text("x" * 200)
    (tmp_path / "below" / "bytes").write_bytes(b"\xff\xfe\x00")
    corpus = split_texts(read_texts([tmp_path / "below", tmp_path / "lines"]))
    assert len(corpus.train[0].text) == 190
    whole = [file.text + rest.text for file, rest in zip(corpus.train, corpus.held_out, strict=True)]
    assert whole == ["x" * 200, (tmp_path / "lines").read_text()]
    assert corpus.held_out[1].text.startswith("line 95\n")


def test_files_that_benchmarks_take_prompts_from_are_not_trained_on() -> None:
    corpus = library_corpus()
    held_out = {file.path for file in corpus.held_out}
    assert held_out
    assert not {file.path for file in corpus.train} & held_out
    assert len(corpus.train) > 100
    assert all((standard_library() / path).is_file() for path in held_out)


@pytest.mark.parametrize(
    ("name", "message"),
    [("bytes", "no UTF-8 text"), ("nowhere", "cannot be read: No such file"), ("empty", "no UTF-8 text")],
)
def test_paths_without_text_are_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=message):
        read_texts([tmp_path / name])


def test_learning_rate_follows_the_tokens() -> None:
    seen = (10, 300, 750, 1000, 5000)
    rates = [rate_factor(each, 1000, warm_up=0.02, decay=0.5) for each in seen]
    assert rates == pytest.approx([0.5, 1.0, 0.5, 0.0, 0.0])


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


def test_workspace_keeps_held_out_documents_apart(workspace: Workspace) -> None:
    documents = workspace.held_out()
    assert len(documents) == 40
    assert sum(map(len, documents)) < 0.1 * len(workspace.stream())


def test_workspace_of_another_tokenizer_is_refused(
    workspace: Workspace, library: Path, target: Path, tmp_path: Path
) -> None:
    tokenizer, corpus = load_tokenizer(target), split_texts(read_sources(library))
    workspace.prepare(corpus, tokenizer, 1)
    tokenizer.add_tokens(["<another>"])
    with pytest.raises(UserError, match="another tokenizer"):
        workspace.prepare(corpus, tokenizer, 1)
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
    workspace.prepare(Corpus((file,), (file,)), WideTokenizer(largest), 1)  # type: ignore[arg-type]
    assert workspace.stream()[0] == largest
    assert workspace.stream().dtype == dtype


@torch.inference_mode()
def test_teacher_output_is_on_its_device(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "failure_of", lambda *_: "")  # tried elsewhere
    monkeypatch.setattr(training, "ModelOptions", partial(ModelOptions, attention=AttentionOptions("sdpa")))
    outputs = list[torch.Tensor]()
    for device, there in PLACES:
        with there:
            lesson = Teacher(target, 40, (0, 1), device, dtype="fp32").read(
                torch.arange(40).view(2, 20).to(device)
            )
            assert lesson.features is not None
            found = (lesson.logits, lesson.features)
            assert {each.device for each in found} == {torch.device(device)}
            outputs += [each.cpu() for each in found]
    torch.testing.assert_close(outputs[:2], outputs[2:], atol=1e-4, rtol=1e-4)
