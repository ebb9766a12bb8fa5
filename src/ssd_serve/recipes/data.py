"""Token streams on disk and the order in which training reads them.

The order depends only on a seed and on the number of windows of each length that were taken, so a resumed
training continues where it stopped.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from ssd_serve.base.errors import UserError
from ssd_serve.recipes.corpus import Corpus, SourceFile

Ids = npt.NDArray[np.int64]
Stream: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
"""Documents one after the other, as they are stored."""
_MIN_HELD_OUT_TOKENS = 64


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load `tokenizer.json` of a folder, without truncation and padding."""
    path = folder / "tokenizer.json"
    try:
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

    def prepare(
        self, corpus: Corpus, tokenizer: Tokenizer, min_tokens: int, summary: Mapping[str, Any]
    ) -> None:
        """Tokenise the corpus, unless that was done before from the same texts (`summary`) and tokenizer.

        Raises `UserError` for too little text, and for a folder of other texts or another tokenizer.
        """
        if self._is_prepared(tokenizer, summary):
            return
        train, held_out = _encode(corpus.train, tokenizer), _encode(corpus.held_out, tokenizer)
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
        counts = {
            "train_tokens": sum(map(len, train)),
            "held_out_tokens": sum(map(len, held_out)),
            "held_out_lengths": [len(document) for document in held_out],
        }
        self._summary_file.write_text(json.dumps({**summary, **counts}, indent=1) + "\n", encoding="utf-8")

    @property
    def _summary_file(self) -> Path:
        return self.folder / "corpus.json"

    def _is_prepared(self, tokenizer: Tokenizer, summary: Mapping[str, Any]) -> bool:
        if not self._summary_file.exists():
            return False
        if load_tokenizer(self.folder).to_str() != tokenizer.to_str():
            raise UserError(f"{self.folder} was made with another tokenizer: choose another folder.")
        if any(self.summary().get(name) != value for name, value in summary.items()):
            raise UserError(f"{self.folder} was made of other texts: choose another folder.")
        return True

    def summary(self) -> dict[str, Any]:
        """Return the contents of `corpus.json`."""
        contents: dict[str, Any] = json.loads(self._summary_file.read_text(encoding="utf-8"))
        return contents

    def stream(self) -> Stream:
        """Return the training tokens [tokens], mapped from disk."""
        stream: Stream = np.load(self.folder / "train.npy", mmap_mode="r")
        return stream

    def held_out(self) -> list[Ids]:
        """Return the tokens of each held-out document."""
        stream = np.load(self.folder / "held_out.npy").astype(np.int64)
        return np.split(stream, np.cumsum(self.summary()["held_out_lengths"])[:-1])


def text_summary(texts: Sequence[SourceFile]) -> dict[str, Any]:
    """Describe files that a user gave, for `corpus.json`."""
    return {"texts": [{"path": file.path, "sha256": file.sha256, "bytes": file.bytes} for file in texts]}


def library_summary(corpus: Corpus, library: Path) -> dict[str, Any]:
    """Describe a folder of Python sources and its held-out files, for `corpus.json`."""
    return {
        "library": library.name,
        "train_files": len(corpus.train),
        "held_out": [{"path": file.path, "sha256": file.sha256} for file in corpus.held_out],
    }


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
