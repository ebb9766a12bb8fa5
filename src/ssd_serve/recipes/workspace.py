"""The working folder of a training: corpus as tokens, tokenizer, checkpoints.

Prepared once from the sources; a resumed training reads what is there.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ssd_serve.base.errors import UserError
from ssd_serve.recipes.corpus import SourceFile, added_files, read_sources, split_corpus, standard_library
from ssd_serve.recipes.data import Document, Stream, encode, encode_in_parts, save_stream
from ssd_serve.recipes.packages import PythonPackage
from ssd_serve.recipes.texts import read_texts, split_texts
from ssd_serve.recipes.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

LIBRARY_TIMES = 3
"""How often a stream that packages are in has the library, which is a tenth of it and what is held out."""

_LEAST_HELD_OUT = 64
"""Tokens."""


@dataclass(frozen=True)
class Workspace:
    """Names of the files in one working folder, and how to read them."""

    folder: Path

    def checkpoint(self, role: str) -> Path:
        """The training state of the target or the draft."""
        return self.folder / f"{role}.pt"

    @property
    def summary_file(self) -> Path:
        """What the corpus is: counts, packages, and the held-out files by name and hash."""
        return self.folder / "corpus.json"

    def prepare(
        self,
        library: Path,
        entries: int,
        context: int,
        packages: Sequence[PythonPackage] = (),
        tokenizer: Tokenizer | None = None,
        held_out_share: float = 0.0225,
    ) -> None:
        """Read, split and tokenise, unless that was done before. A new tokenizer learns from the library."""
        if self._is_made(tokenizer):
            return
        corpus = split_corpus(read_sources(library), held_out_share)
        if not corpus.train or not corpus.held_out:
            raise UserError(f"{library} has too few Python sources to train on some and hold out others.")
        added = added_files(corpus, (file for package in packages for file in package.files))
        tokenizer = tokenizer or train_tokenizer((file.text for file in corpus.train), entries)
        train, others = encode_in_parts(corpus.train, tokenizer), encode_in_parts(added, tokenizer)
        held_out = encode(corpus.held_out, tokenizer)
        self.folder.mkdir(parents=True, exist_ok=True)
        save_tokenizer(tokenizer, self.folder, context)
        self._save(
            [*train * (LIBRARY_TIMES if others else 1), *others],
            held_out,
            {
                "library": None if library == standard_library() else library.name,
                "train_files": len(corpus.train),
                "train_bytes": sum(file.bytes for file in corpus.train),
                "train_tokens": sum(len(document.ids) for document in train),
                "removed_files": len(corpus.removed),
                "removed_bytes": sum(file.bytes for file in corpus.removed),
                "packages": _package_lines(packages, others),
                "held_out": [{"path": file.path, "sha256": text_hash(file)} for file in corpus.held_out],
            },
        )

    def prepare_texts(self, texts: Sequence[Path], tokenizer: Tokenizer, least: int) -> None:
        """Read, split and tokenise files of any text, unless that was done before. Raises `UserError` where
        fewer tokens than `least` are left to learn from, or almost none to hold out."""
        files = read_texts(texts)
        named = [{"path": file.path, "sha256": text_hash(file), "bytes": file.bytes} for file in files]
        if self._is_made(tokenizer):
            if self.summary().get("texts") != named:
                raise UserError(f"{self.folder} was made of other texts: choose another folder.")
            return
        corpus = split_texts(files)
        train, held_out = encode(corpus.train, tokenizer), encode(corpus.held_out, tokenizer)
        for documents, needed, use in ((train, least, "learn from"), (held_out, _LEAST_HELD_OUT, "hold out")):
            if (count := sum(len(document.ids) for document in documents)) < needed:
                raise UserError(
                    f"too little text: {count:,} tokens to {use}, and at least {needed:,} are needed"
                )
        self.folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(self.folder / "tokenizer.json"))
        summary: dict[str, Any] = {
            "texts": named,
            "held_out": [],
            "train_tokens": sum(len(document.ids) for document in train),
        }
        self._save(train, held_out, summary)

    def _is_made(self, tokenizer: Tokenizer | None) -> bool:
        """Whether it was prepared, with this tokenizer. Raises `UserError` where it was with another."""
        if not self.summary_file.exists():
            return False
        if tokenizer is not None and self.tokenizer().to_str() != tokenizer.to_str():
            raise UserError(f"{self.folder} was made with another tokenizer: choose another folder.")
        return True

    def _save(self, train: Sequence[Document], held_out: Sequence[Document], summary: dict[str, Any]) -> None:
        """Write the streams, and last of all the summary."""
        save_stream(train, self.folder / "train.npy")
        save_stream(held_out, self.folder / "held_out.npy")
        lengths = [len(document.ids) for document in held_out]
        summary |= {
            "held_out_bytes": sum(document.bytes for document in held_out),
            "held_out_tokens": sum(lengths),
            "held_out_lengths": lengths,
        }
        self.summary_file.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")

    def summary(self) -> dict[str, Any]:
        """The contents of `corpus.json`."""
        contents: dict[str, Any] = json.loads(self.summary_file.read_text(encoding="utf-8"))
        return contents

    def tokenizer(self) -> Tokenizer:
        """The tokenizer trained on the training files."""
        return load_tokenizer(self.folder)

    def stream(self) -> Stream:
        """The training tokens [tokens]."""
        stream: Stream = np.load(self.folder / "train.npy", mmap_mode="r")
        return stream

    def held_out(self) -> tuple[Document, ...]:
        """The held-out documents; paths and bytes are not kept here."""
        stream = np.load(self.folder / "held_out.npy").astype(np.int64)
        lengths = self.summary().get("held_out_lengths")
        starts = np.flatnonzero(stream == stream[0])[1:] if lengths is None else np.cumsum(lengths)[:-1]
        return tuple(Document("", ids, 0) for ids in np.split(stream, starts))


def _package_lines(packages: Sequence[PythonPackage], documents: Sequence[Document]) -> list[dict[str, Any]]:
    files, tokens = Counter[str](), Counter[str]()
    for document in documents:
        name = document.path.split("/")[0]
        files[name] += 1
        tokens[name] += len(document.ids)
    return [
        {
            "name": package.name,
            "version": package.version,
            "licence": package.licence,
            "files": files[package.name],
            "tokens": tokens[package.name],
        }
        for package in packages
        if files[package.name]
    ]


def text_hash(file: SourceFile) -> str:
    """SHA-256 of a file's text, in hexadecimal."""
    return hashlib.sha256(file.text.encode("utf-8")).hexdigest()
