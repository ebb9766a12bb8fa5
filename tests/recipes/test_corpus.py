"""Reading texts, and splitting them into training and held-out text."""

from pathlib import Path

import pytest

from ssd_serve.base.engine_config import EMBEDDED
from ssd_serve.base.errors import UserError
from ssd_serve.models.hub import resolve_model
from ssd_serve.recipes.corpus import (
    SourceFile,
    held_out_files,
    read_sources,
    read_texts,
    split_library,
    split_texts,
    standard_library,
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
    files = read_sources(standard_library())
    held_out = held_out_files(resolve_model(EMBEDDED, "target"), standard_library())
    corpus = split_library(files, held_out)
    assert corpus.held_out == held_out
    assert not {file.path for file in corpus.train} & {file.path for file in held_out}
    assert len(corpus.train) + len(held_out) == len(files)
    assert split_library(files[:3], ()) == split_texts(files[:3])


@pytest.mark.parametrize(
    ("name", "message"),
    [("bytes", "no UTF-8 text"), ("nowhere", "cannot be read: No such file"), ("empty", "no UTF-8 text")],
)
def test_paths_without_text_are_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=message):
        read_texts([tmp_path / name])
