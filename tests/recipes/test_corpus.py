"""The corpus split: by file, reproducible, without near-duplicates."""

import random
from pathlib import Path

from ssd_serve.recipes.corpus import SourceFile, near_duplicates, read_sources, split_corpus


def library(count: int = 120) -> list[SourceFile]:
    """Files of random lines; every file has a copy in which few lines differ."""
    files: list[SourceFile] = []
    for index in range(count):
        lines = [f"value_{random.Random(index * 1000 + line).random()} = {line}" for line in range(40)]
        files.append(SourceFile(f"package/module_{index}.py", "\n".join(lines) + "\n"))
        lines[7] = "changed = True"
        files.append(SourceFile(f"package/copy_{index}.py", "\n".join(lines) + "\n"))
    return files


def test_no_held_out_file_or_repeat_of_it_is_trained_on() -> None:
    corpus = split_corpus(library(), held_out_share=0.05)
    held_out = {file.path for file in corpus.held_out}
    train = {file.path for file in corpus.train}
    removed = {file.path for file in corpus.removed}
    assert held_out
    assert not held_out & train
    assert held_out | train | removed == {file.path for file in library()}
    for path in held_out:
        twin = path.replace("module", "copy") if "module" in path else path.replace("copy", "module")
        assert twin not in train
    assert not near_duplicates(corpus.train, corpus.held_out, 0.4)


def test_the_split_has_the_share_asked_for_and_ignores_the_order_of_files() -> None:
    files = library()
    corpus = split_corpus(files, held_out_share=0.05)
    share = sum(file.bytes for file in corpus.held_out) / sum(file.bytes for file in files)
    assert 0.04 < share <= 0.05
    again = split_corpus(files[::-1], held_out_share=0.05)
    assert again.held_out == corpus.held_out


def test_reading_skips_installed_packages_and_foreign_encodings(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("x = 1\n")
    (tmp_path / "good.py").write_bytes(b"x = 1\r\ny = 2\r\n")
    (tmp_path / "latin.py").write_bytes(b"name = '\xe9'\n")
    (tmp_path / "empty.py").write_text("\n")
    assert read_sources(tmp_path) == (SourceFile("good.py", "x = 1\ny = 2\n"),)
