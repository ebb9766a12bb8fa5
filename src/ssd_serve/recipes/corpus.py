"""The corpus of the embedded pair: the Python sources of a standard library, split by file, and of packages.

Held-out files are chosen by a hash of their relative path, so the split is the same on every machine with the
same library; no file of a package is held out. Training files that nearly repeat a held-out file are removed
before anything (the tokenizer included) sees them. This module does not know tokens or models.
"""

import hashlib
import os
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
SHINGLE_LINES = 3
"""Consecutive non-empty lines in one shingle."""


@dataclass(frozen=True)
class SourceFile:
    """One source file: its path relative to the corpus root, with `/`, and its text."""

    path: str
    text: str

    @property
    def bytes(self) -> int:
        """Length in UTF-8 bytes."""
        return len(self.text.encode("utf-8"))


@dataclass(frozen=True)
class Corpus:
    """A corpus split by file: what trains, what is held out, and what was removed as a near-duplicate."""

    train: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]
    removed: tuple[SourceFile, ...]


def standard_library() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def read_sources(root: Path) -> tuple[SourceFile, ...]:
    """Every UTF-8 `.py` file below `root`, installed packages excluded, ordered by path."""
    files: list[SourceFile] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS)
        for name in sorted(names):
            path = Path(folder) / name
            if not name.endswith(".py") or path.is_symlink():
                continue
            text = read_source(path)
            if text is not None:
                files.append(SourceFile(path.relative_to(root).as_posix(), text))
    return tuple(sorted(files, key=lambda file: file.path))


def read_source(path: Path) -> str | None:
    """A file's text; None where it is empty or in a foreign encoding, as some of the library's tests are."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
    return text.replace("\r\n", "\n") if text.strip() else None


def split_corpus(
    files: Sequence[SourceFile], held_out_share: float = 0.0225, similarity: float = 0.4
) -> Corpus:
    """Split by file; `held_out_share` is a share of bytes.

    `similarity` is the containment that counts as a repeat. Files are taken in the order of their path's hash
    while they fit into the share.
    """
    total = sum(file.bytes for file in files)
    room = int(total * held_out_share)
    held_out: list[SourceFile] = []
    for file in sorted(files, key=lambda file: path_hash(file.path)):
        if file.bytes <= room:
            held_out.append(file)
            room -= file.bytes
        if room < total * held_out_share * 0.02:
            break
    names = {file.path for file in held_out}
    rest = [file for file in files if file.path not in names]
    repeats = near_duplicates(rest, held_out, similarity)
    return Corpus(
        train=tuple(file for file in rest if file.path not in repeats),
        held_out=tuple(sorted(held_out, key=lambda file: file.path)),
        removed=tuple(file for file in rest if file.path in repeats),
    )


def added_files(corpus: Corpus, files: Iterable[SourceFile], similarity: float = 0.4) -> list[SourceFile]:
    """Those of the files that may train beside the corpus: near nothing that is held out or there already."""
    files = list(files)
    repeats = near_duplicates(files, corpus.held_out, similarity)
    there = {file.path for file in corpus.train}
    kept = without_repeats([*corpus.train, *(file for file in files if file.path not in repeats)])
    return [file for file in kept if file.path not in there]


def path_hash(path: str) -> bytes:
    """The hash that orders files for the split."""
    return hashlib.sha256(path.encode("utf-8")).digest()


def near_duplicates(
    candidates: Iterable[SourceFile], originals: Iterable[SourceFile], similarity: float
) -> set[str]:
    """Paths of candidates that share at least `similarity` of either file's shingles with one original."""
    owners: defaultdict[int, list[int]] = defaultdict(list)
    sizes: list[int] = []
    for index, file in enumerate(originals):
        shingles = line_shingles(file.text)
        sizes.append(len(shingles))
        for shingle in shingles:
            owners[shingle].append(index)
    repeats: set[str] = set()
    for file in candidates:
        shingles = line_shingles(file.text)
        shared: defaultdict[int, int] = defaultdict(int)
        for shingle in shingles:
            for index in owners.get(shingle, ()):
                shared[index] += 1
        if any(count >= similarity * min(len(shingles), sizes[index]) for index, count in shared.items()):
            repeats.add(file.path)
    return repeats


def without_repeats(files: Iterable[SourceFile], similarity: float = 0.5) -> tuple[SourceFile, ...]:
    """The files less those of which at least `similarity` is in files before them."""
    seen: set[int] = set()
    kept: list[SourceFile] = []
    for file in files:
        shingles = line_shingles(file.text)
        if len(shingles & seen) < similarity * len(shingles):
            kept.append(file)
        seen |= shingles
    return tuple(kept)


def line_shingles(text: str) -> set[int]:
    """Hashes of every run of `SHINGLE_LINES` stripped, non-empty lines; a shorter file is one shingle."""
    lines = [stripped for line in text.splitlines() if (stripped := line.strip())]
    last = max(1, len(lines) - SHINGLE_LINES + 1)
    return {hash(tuple(lines[start : start + SHINGLE_LINES])) for start in range(last)}
