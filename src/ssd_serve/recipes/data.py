"""Text for training drafts, token streams on disk, and the order in which training reads them.

The order depends only on a seed and on the number of windows of each length that were taken, so a resumed
training continues where it stopped.
"""

import hashlib
import json
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from ssd_serve.base.engine_config import EMBEDDED
from ssd_serve.base.errors import UserError
from ssd_serve.models.hub import resolve_model
from ssd_serve.models.weights.formats import format_of
from ssd_serve.recipes.checkpoint import write_json

Ids = npt.NDArray[np.int64]
Stream: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
"""Documents one after the other, as they are stored."""
_MIN_HELD_OUT_TOKENS = 64
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
_HELD_OUT_TAIL = 0.05
"""Share of each text file that is held out at its end."""


@dataclass(frozen=True)
class SourceFile:
    """A file: its path relative to the corpus root, with `/`, and its text."""

    path: str
    text: str

    @property
    def sha256(self) -> str:
        """Hash of the text, in hexadecimal."""
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()


@dataclass(frozen=True)
class Corpus:
    """Training text and held-out text."""

    train: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]

    @property
    def sha256(self) -> str:
        """Hash of all paths and texts, in hexadecimal."""
        parts = [[(file.path, file.sha256) for file in files] for files in (self.train, self.held_out)]
        return hashlib.sha256(json.dumps(parts).encode("utf-8")).hexdigest()


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
    entries = json.loads((target / "held_out.json").read_text(encoding="utf-8"))
    wanted = {entry["path"]: entry["sha256"] for entry in entries}
    present = [path for path in sorted(wanted) if (library / path).is_file()]
    found = [SourceFile(path, text) for path in present if (text := _read_text(library / path)) is not None]
    files = tuple(file for file in found if wanted[file.path] == file.sha256)
    if not files:
        raise UserError(f"None of the {len(wanted)} held-out files is in {library} unchanged.")
    return files


def library_corpus() -> Corpus:
    """Return the standard library; the files that the benchmarks take their prompts from are held out."""
    library = standard_library()
    held_out = held_out_files(resolve_model(EMBEDDED, "target"), library)
    names = {file.path for file in held_out}
    return Corpus(tuple(file for file in read_sources(library) if file.path not in names), held_out)


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


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load `tokenizer.json` of a folder, or that of a GGUF file, without truncation and padding."""
    path = folder / "tokenizer.json"
    try:
        if folder.is_file():
            return format_of(folder).tokenizer(folder).backend
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no other type
        raise UserError(f"{path} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@dataclass(frozen=True)
class Workspace:
    """The folder of a training: `corpus.json`, token streams and the checkpoint."""

    folder: Path

    def checkpoint(self, role: str) -> Path:
        """Return the path of the training state of a model."""
        return self.folder / f"{role}.pt"

    def prepare(self, corpus: Corpus, tokenizer: Tokenizer, min_tokens: int) -> None:
        """Tokenise the corpus, unless that was done before from the same texts and with the same tokenizer.

        Raises `UserError` for too little text, and for a folder of other texts or another tokenizer.
        """
        if self.is_prepared(tokenizer, corpus.sha256):
            return
        train, held_out = _encode(corpus.train, tokenizer), _encode(corpus.held_out, tokenizer)
        self.write(train, held_out, tokenizer, corpus.sha256, min_tokens)

    def write(
        self,
        train: Sequence[Ids],
        held_out: Sequence[Ids],
        tokenizer: Tokenizer,
        sha256: str,
        min_tokens: int,
    ) -> None:
        """Write documents of tokens as streams. Raises `UserError` for too little text."""
        for documents, needed, use in (
            (train, min_tokens, "learn from"),
            (held_out, _MIN_HELD_OUT_TOKENS, "hold out"),
        ):
            if (count := sum(map(len, documents))) < needed:
                raise UserError(
                    f"too little text: {count:,} tokens to {use}, and at least {needed:,} are needed"
                )
        self.folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(self.folder / "tokenizer.json"))
        for name, documents in (("train", train), ("held_out", held_out)):
            ids = np.concatenate(documents)
            small = ids.astype(np.uint16 if ids.max(initial=0) < 1 << 16 else np.uint32)
            np.save(self.folder / f"{name}.npy", small)
        lengths = [len(document) for document in held_out]
        write_json(self._summary_file, {"texts_sha256": sha256, "held_out_lengths": lengths})

    @property
    def _summary_file(self) -> Path:
        return self.folder / "corpus.json"

    def is_prepared(self, tokenizer: Tokenizer, sha256: str) -> bool:
        """Return True if the streams are those of these texts. Raises `UserError` for streams of others."""
        if not self._summary_file.exists():
            return False
        if load_tokenizer(self.folder).to_str() != tokenizer.to_str():
            raise UserError(f"{self.folder} was made with another tokenizer: choose another folder.")
        if self._summary().get("texts_sha256") != sha256:
            raise UserError(f"{self.folder} was made of other texts: choose another folder.")
        return True

    def _summary(self) -> dict[str, Any]:
        contents: dict[str, Any] = json.loads(self._summary_file.read_text(encoding="utf-8"))
        return contents

    def stream(self) -> Stream:
        """Return the training tokens [tokens], mapped from disk."""
        stream: Stream = np.load(self.folder / "train.npy", mmap_mode="r")
        return stream

    def held_out(self) -> list[Ids]:
        """Return the tokens of each held-out document."""
        stream = np.load(self.folder / "held_out.npy").astype(np.int64)
        return np.split(stream, np.cumsum(self._summary()["held_out_lengths"])[:-1])


def _encode(files: Sequence[SourceFile], tokenizer: Tokenizer) -> list[Ids]:
    encodings = tokenizer.encode_batch_fast([file.text for file in files])
    return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]


@dataclass
class Sampler:
    """Batches of windows from one token stream, every window once an epoch in shuffled order.

    `taken` counts windows by window length; each length has its own shuffled epochs.
    """

    stream: Stream
    seed: int
    taken: dict[int, int] = field(default_factory=lambda: dict[int, int]())
    _order: tuple[tuple[int, int], tuple[int, Ids]] | None = None

    def batch(self, rows: int, length: int) -> Ids:
        """Return the next int64 [rows, length + 1]; consecutive windows overlap by one token."""
        first = self.taken.get(length, 0)
        self.taken[length] = first + rows
        return np.stack([self.window(index, length) for index in range(first, first + rows)])

    def window(self, index: int, length: int) -> Ids:
        """Return window number `index` of the endless order for this length: int64 [length + 1]."""
        windows = self.windows(length)
        epoch, place = divmod(index, windows)
        offset, order = self._epoch_order(epoch, length)
        start = offset + int(order[place]) * length
        return self.stream[start : start + length + 1].astype(np.int64)

    def windows(self, length: int) -> int:
        """Return the windows of an epoch; one less than would fit, because each epoch begins at an offset."""
        return max(1, (len(self.stream) - 1) // length - 1)

    def _epoch_order(self, epoch: int, length: int) -> tuple[int, Ids]:
        """Return the offset and the shuffled order int64 [windows] of an epoch, cached for the last one."""
        key = (epoch, length)
        if self._order is None or self._order[0] != key:
            generator = np.random.default_rng((self.seed, length, epoch))
            offset = int(generator.integers(0, length))  # a new cut each epoch
            self._order = (key, (offset, generator.permutation(self.windows(length))))
        return self._order[1]


def evaluation_windows(documents: Sequence[Ids], length: int, count: int) -> Ids:
    """Return at most `count` windows int64 [n, length + 1], spread evenly over the held-out documents."""
    windows = [
        ids[start : start + length + 1] for ids in documents for start in range(0, len(ids) - length, length)
    ]
    if not windows:
        windows = [np.concatenate(documents)[: length + 1]]
    chosen = np.linspace(0, len(windows) - 1, min(count, len(windows))).astype(int)
    return np.stack([windows[index] for index in chosen])
