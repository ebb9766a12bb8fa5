"""Text for training drafts: files of any text, or Python sources, split into training and held-out text."""

import hashlib
import json
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ssd_serve.base.errors import UserError

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
_HELD_OUT_TAIL = 0.05
"""Share of each text file that is held out at its end."""


@dataclass(frozen=True)
class SourceFile:
    """A file: its path relative to the corpus root, with `/`, and its text."""

    path: str
    text: str

    @property
    def bytes(self) -> int:
        """Length in UTF-8 bytes."""
        return len(self.text.encode("utf-8"))

    @property
    def sha256(self) -> str:
        """Hash of the text, in hexadecimal."""
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()


@dataclass(frozen=True)
class Corpus:
    """Training text and held-out text."""

    train: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]


def standard_library() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def read_sources(root: Path) -> tuple[SourceFile, ...]:
    """Read every UTF-8 `.py` file below `root`, installed packages excluded, ordered by path."""
    files: list[SourceFile] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in _SKIPPED_FOLDERS)
        paths = (Path(folder) / name for name in names if name.endswith(".py"))
        files.extend(
            SourceFile(path.relative_to(root).as_posix(), text)
            for path in paths
            if not path.is_symlink() and (text := _read_text(path)) is not None
        )
    return tuple(sorted(files, key=lambda file: file.path))


def read_texts(paths: Sequence[Path]) -> tuple[SourceFile, ...]:
    """Read files, and UTF-8 text files below folders. Raises `UserError` for a path without text."""
    found: dict[str, SourceFile] = {}
    for path in paths:
        names = sorted(path.rglob("*")) if path.is_dir() else [path]
        texts = {
            each.as_posix(): text
            for each in names
            if (each == path or (each.is_file() and not each.is_symlink()))
            and (text := _read_text(each)) is not None
        }
        if not texts:
            raise UserError(f"{path} has no UTF-8 text.")
        found.update((name, SourceFile(name, text)) for name, text in texts.items())
    return tuple(found[path] for path in sorted(found))


def held_out_files(target: Path, library: Path) -> tuple[SourceFile, ...]:
    """Return the files of `library` that the `held_out.json` of the embedded target names, if unchanged."""
    wanted = {
        entry["path"]: entry["sha256"]
        for entry in json.loads((target / "held_out.json").read_text(encoding="utf-8"))
    }
    files = tuple(file for file in read_sources(library) if wanted.get(file.path) == file.sha256)
    if not files:
        raise UserError(f"None of the {len(wanted)} held-out files is in {library} unchanged.")
    return files


def split_library(files: Sequence[SourceFile], held_out: Sequence[SourceFile]) -> Corpus:
    """Hold out whole files, those that the benchmarks take their prompts from; others are split as texts."""
    if not held_out:
        return split_texts(files)
    names = {file.path for file in held_out}
    return Corpus(tuple(file for file in files if file.path not in names), tuple(held_out))


def split_texts(files: Sequence[SourceFile]) -> Corpus:
    """Hold out the last twentieth of each file, from the beginning of a line on where it has lines."""
    train: list[SourceFile] = []
    held_out: list[SourceFile] = []
    for file in files:
        end = int(len(file.text) * (1 - _HELD_OUT_TAIL))
        cut = file.text.rfind("\n", 0, end) + 1 or end
        train.append(SourceFile(file.path, file.text[:cut]))
        held_out.append(SourceFile(file.path, file.text[cut:]))
    return Corpus(tuple(train), tuple(held_out))


def _read_text(path: Path) -> str | None:
    """Return the text, or None if the file is empty or not UTF-8. Raises `UserError` if it cannot be read."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    return text.replace("\r\n", "\n") if text.strip() else None
