"""Token streams and the order in which training sees them.

Knows files and a tokenizer; does not know models. Order is a pure function of a seed and of how many windows
of each length were taken, so a resumed training continues where it stopped.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from ssd_serve.recipes.corpus import SourceFile

Ids = npt.NDArray[np.int64]
Stream: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
"""Documents one after the other, as they are stored."""

CUT_LINES = 24
"""A training text is cut at the end of one in so many lines, and its parts become tokens by themselves:
people end prompts where no token of a whole text ends."""
_LINE_END = re.compile(r"\n *")


@dataclass(frozen=True)
class Document:
    """One file as tokens, begun as the tokenizer begins a text: ids int64 [length]; its length in bytes."""

    path: str
    ids: Ids
    bytes: int


def encode(files: Sequence[SourceFile], tokenizer: Tokenizer) -> tuple[Document, ...]:
    """Each file as one document; the tokenizer's post-processor begins it."""
    encodings = tokenizer.encode_batch_fast([file.text for file in files])
    return tuple(
        Document(file.path, np.asarray(encoding.ids, dtype=np.int64), file.bytes)
        for file, encoding in zip(files, encodings, strict=True)
    )


def encode_in_parts(files: Sequence[SourceFile], tokenizer: Tokenizer) -> tuple[Document, ...]:
    """Each file as one document whose tokens do not reach across the cuts of `parts`."""
    opening: list[int] = tokenizer.encode("").ids
    encoded: list[Document] = []
    for file in files:
        encodings = tokenizer.encode_batch_fast(parts(file), add_special_tokens=False)
        ids = [*opening, *(token for encoding in encodings for token in encoding.ids)]
        encoded.append(Document(file.path, np.asarray(ids, dtype=np.int64), file.bytes))
    return tuple(encoded)


def parts(file: SourceFile) -> list[str]:
    """The file's text, cut after some line ends, every other time after the next line's indentation instead.

    The cuts are a pure function of the file.
    """
    generator = np.random.default_rng(list(hashlib.sha256(file.text.encode("utf-8")).digest()))
    ends = list(_LINE_END.finditer(file.text))
    chosen = [
        end for end, value in zip(ends, generator.random(len(ends)), strict=True) if value * CUT_LINES < 1
    ]
    cuts = [end.start() + 1 if index % 2 else end.end() for index, end in enumerate(chosen)]
    return [file.text[start:end] for start, end in pairwise([0, *cuts, len(file.text)])]


def save_stream(documents: Sequence[Document], path: Path) -> None:
    """Write all documents, one after the other, in the smallest type that holds their ids."""
    ids = np.concatenate([document.ids for document in documents])
    np.save(path, ids.astype(np.uint16 if ids.max(initial=0) < 1 << 16 else np.uint32))


@dataclass
class Sampler:
    """Batches of windows from one token stream, every window once an epoch in shuffled order.

    `taken` counts windows by window length; each length has its own shuffled epochs.
    """

    stream: Stream
    seed: int
    taken: dict[int, int] = field(default_factory=lambda: dict[int, int]())

    def batch(self, rows: int, length: int) -> Ids:
        """The next int64 [rows, length + 1]; neighbours overlap by the one token that is input and target."""
        first = self.taken.get(length, 0)
        self.taken[length] = first + rows
        return np.stack([self.window(index, length) for index in range(first, first + rows)])

    def window(self, index: int, length: int) -> Ids:
        """Window number `index` of the endless order for this length: int64 [length + 1]."""
        windows = self.windows(length)
        epoch, place = divmod(index, windows)
        offset, order = self.order(epoch, length)
        start = offset + int(order[place]) * length
        return self.stream[start : start + length + 1].astype(np.int64)

    def windows(self, length: int) -> int:
        """How many windows an epoch has; one less than would fit, because each epoch begins at an offset."""
        return max(1, (len(self.stream) - 1) // length - 1)

    def order(self, epoch: int, length: int) -> tuple[int, Ids]:
        """Offset and shuffled order int64 [windows] of one epoch, remembered until another is asked for."""
        key = (epoch, length)
        if self._order is None or self._order[0] != key:
            generator = np.random.default_rng((self.seed, length, epoch))
            offset = int(generator.integers(0, length))  # a new cut each epoch
            self._order = (key, (offset, generator.permutation(self.windows(length))))
        return self._order[1]

    _order: tuple[tuple[int, int], tuple[int, Ids]] | None = None


def evaluation_windows(documents: Sequence[Document], length: int, count: int) -> Ids:
    """At most `count` windows int64 [n, length + 1] that begin held-out documents of at least that length.

    Spread evenly over the documents; used for the quick figures in the log, not for the final evaluation.
    """
    windows = [
        document.ids[start : start + length + 1]
        for document in documents
        for start in range(0, len(document.ids) - length, length)
    ]
    if not windows:
        joined = np.concatenate([document.ids for document in documents])
        windows = [joined[: length + 1]]
    chosen = np.linspace(0, len(windows) - 1, min(count, len(windows))).astype(int)
    return np.stack([windows[index] for index in chosen])
