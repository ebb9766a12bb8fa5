"""The working folder of a training: corpus as tokens, tokenizer, checkpoint.

Prepared once from the sources; a resumed training reads what is there.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from ssd_serve.recipes.corpus import SourceFile, read_sources, split_corpus
from ssd_serve.recipes.data import Document, encode, save_stream
from ssd_serve.recipes.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer


@dataclass(frozen=True)
class HeldOutFile:
    """A held-out file by its path in the library and the SHA-256 of its UTF-8 text."""

    path: str
    sha256: str


@dataclass(frozen=True)
class Workspace:
    """Names of the files in one working folder, and how to read them."""

    folder: Path

    @property
    def checkpoint(self) -> Path:
        """The training state."""
        return self.folder / "checkpoint.pt"

    @property
    def summary_file(self) -> Path:
        """What the corpus is: counts, and the held-out files by name and hash."""
        return self.folder / "corpus.json"

    def prepare(self, library: Path, entries: int, context: int, held_out_share: float = 0.0225) -> None:
        """Read, split and tokenise the library, unless that was done before."""
        if self.summary_file.exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        corpus = split_corpus(read_sources(library), held_out_share)
        tokenizer = train_tokenizer((file.text for file in corpus.train), entries)
        save_tokenizer(tokenizer, self.folder, context)
        train, held_out = encode(corpus.train, tokenizer), encode(corpus.held_out, tokenizer)
        save_stream(train, self.folder / "train.npy")
        save_stream(held_out, self.folder / "held_out.npy")
        summary = {
            "train_files": len(corpus.train),
            "train_bytes": sum(file.bytes for file in corpus.train),
            "train_tokens": sum(len(document.ids) for document in train),
            "removed_files": len(corpus.removed),
            "removed_bytes": sum(file.bytes for file in corpus.removed),
            "held_out_bytes": sum(file.bytes for file in corpus.held_out),
            "held_out_tokens": sum(len(document.ids) for document in held_out),
            "held_out": [{"path": file.path, "sha256": text_hash(file)} for file in corpus.held_out],
        }
        self.summary_file.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")

    def summary(self) -> dict[str, object]:
        """The contents of `corpus.json`."""
        contents: dict[str, object] = json.loads(self.summary_file.read_text(encoding="utf-8"))
        return contents

    def tokenizer(self) -> Tokenizer:
        """The tokenizer trained on the training files."""
        return load_tokenizer(self.folder)

    def stream(self) -> npt.NDArray[np.uint16]:
        """The training tokens, uint16 [tokens]."""
        stream: npt.NDArray[np.uint16] = np.load(self.folder / "train.npy", mmap_mode="r")
        return stream

    def held_out(self) -> tuple[Document, ...]:
        """The held-out documents, cut at their end-of-text tokens; paths and bytes are not kept here."""
        stream = np.load(self.folder / "held_out.npy").astype(np.int64)
        starts = np.flatnonzero(stream == 0)
        return tuple(Document("", ids, 0) for ids in np.split(stream, starts[1:]))


def text_hash(file: SourceFile) -> str:
    """SHA-256 of a file's text, in hexadecimal."""
    return hashlib.sha256(file.text.encode("utf-8")).hexdigest()
