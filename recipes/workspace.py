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
import numpy.typing as npt
from tokenizers import Tokenizer

from ssd_serve.errors import UserError
from ssd_serve.recipes.corpus import SourceFile, added_files, read_sources, split_corpus
from ssd_serve.recipes.data import Document, encode, encode_in_parts, save_stream
from ssd_serve.recipes.packages import PythonPackage
from ssd_serve.recipes.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

LIBRARY_TIMES = 3
"""How often a stream that packages are in has the library, which is a tenth of it and what is held out."""


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
        if self.summary_file.exists():
            if tokenizer is not None and self.tokenizer().to_str() != tokenizer.to_str():
                raise UserError(
                    f"{self.folder} was made with another tokenizer than that of the pair to start from: "
                    "choose another folder."
                )
            return
        corpus = split_corpus(read_sources(library), held_out_share)
        if not corpus.train or not corpus.held_out:
            raise UserError(f"{library} has too few Python sources to train on some and hold out others.")
        self.folder.mkdir(parents=True, exist_ok=True)
        added = added_files(corpus, (file for package in packages for file in package.files))
        tokenizer = tokenizer or train_tokenizer((file.text for file in corpus.train), entries)
        save_tokenizer(tokenizer, self.folder, context)
        train, held_out = encode_in_parts(corpus.train, tokenizer), encode(corpus.held_out, tokenizer)
        others = encode_in_parts(added, tokenizer)
        save_stream([*train * (LIBRARY_TIMES if others else 1), *others], self.folder / "train.npy")
        save_stream(held_out, self.folder / "held_out.npy")
        summary = {
            "train_files": len(corpus.train),
            "train_bytes": sum(file.bytes for file in corpus.train),
            "train_tokens": sum(len(document.ids) for document in train),
            "removed_files": len(corpus.removed),
            "removed_bytes": sum(file.bytes for file in corpus.removed),
            "packages": _package_lines(packages, others),
            "held_out_bytes": sum(file.bytes for file in corpus.held_out),
            "held_out_tokens": sum(len(document.ids) for document in held_out),
            "held_out": [{"path": file.path, "sha256": text_hash(file)} for file in corpus.held_out],
        }
        self.summary_file.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")

    def summary(self) -> dict[str, Any]:
        """The contents of `corpus.json`."""
        contents: dict[str, Any] = json.loads(self.summary_file.read_text(encoding="utf-8"))
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
