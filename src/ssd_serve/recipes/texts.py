"""Texts that people bring to learn from: files of any kind of UTF-8 text, each split into what is learned
and its end, which is held out.

Knows files; not tokens or models.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from ssd_serve.base.errors import UserError
from ssd_serve.recipes.corpus import Corpus, SourceFile, read_source

HELD_OUT_SHARE = 0.05


def read_texts(paths: Sequence[Path]) -> tuple[SourceFile, ...]:
    """The files, and of folders every text file in them. A file that is named must be text."""
    found: dict[str, SourceFile] = {}
    for path in paths:
        files = list(_below(path)) if path.is_dir() else [_named(path)]
        if not files:
            raise UserError(f"{path} has no file of UTF-8 text.")
        found.update((file.path, file) for file in files)
    return tuple(found[path] for path in sorted(found))


def split_texts(files: Sequence[SourceFile], share: float = HELD_OUT_SHARE) -> Corpus:
    """Of each file the last `share` is held out, from the beginning of a line on where it has lines."""
    train: list[SourceFile] = []
    held_out: list[SourceFile] = []
    for file in files:
        wanted = int(len(file.text) * (1 - share))
        cut = file.text.rfind("\n", 0, wanted) + 1 or wanted
        train.append(SourceFile(file.path, file.text[:cut]))
        held_out.append(SourceFile(file.path, file.text[cut:]))
    return Corpus(tuple(train), tuple(held_out), ())


def _named(path: Path) -> SourceFile:
    try:
        text = read_source(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    if text is None:
        raise UserError(f"{path} is empty or no UTF-8 text.")
    return SourceFile(path.as_posix(), text)


def _below(folder: Path) -> Iterator[SourceFile]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and (text := read_source(path)) is not None:
            yield SourceFile(path.as_posix(), text)
