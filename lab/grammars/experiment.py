"""How long both libraries compile schemas, and mask the rows of trees along texts that match them.

Texts are walks at random through the schemas, with each library's own masks, and both follow both kinds.
Knows tokenizers and clocks, no models.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from lab.grammars.matchers import Library, Llguidance, Matcher, Xgrammar, allowed
from lab.grammars.schemas import make_schema
from ssd_serve.models.hub import embedded_folder
from ssd_serve.recipes.corpus import read_sources, standard_library

_LONGEST = 80
"""Tokens of a text."""
_TREE = 8
"""Nodes below each token that is followed: a chain, which is taken back."""
_END, _END_ID = "<|endoftext|>", 0


@dataclass(slots=True)
class _Seen:
    """What one library took with one tokenizer: seconds."""

    compiled: list[float] = field(default_factory=list[float])
    first_masks: list[float] = field(default_factory=list[float])
    masks: list[float] = field(default_factory=list[float])
    not_compiled: int = 0
    refused: int = 0
    """Texts of the other library that it does not have."""

    def told(self) -> dict[str, object]:
        return {
            "schemas": len(self.compiled),
            "not_compiled": self.not_compiled,
            "texts_refused": self.refused,
            "compile_ms": _quantiles(self.compiled, 1e3),
            "first_mask_ms": _quantiles(self.first_masks, 1e3),
            "row_us": _quantiles(self.masks, 1e6),
        }


def run_grammars(schemas: int, vocabulary: int) -> dict[str, object]:
    """Rows by tokenizer and library."""
    tokenizers = {
        "embedded": Backend.from_file(str(embedded_folder("target") / "tokenizer.json")),
        "larger": larger_tokenizer(vocabulary),
    }
    rows: list[dict[str, object]] = []
    for name, tokenizer in tokenizers.items():
        makers: Mapping[str, Callable[[Backend, int], Library]] = {
            "llguidance": Llguidance,
            "xgrammar": Xgrammar,
        }
        libraries = {library: make(tokenizer, _END_ID) for library, make in makers.items()}
        size = tokenizer.get_vocab_size()
        for library, seen in compare(libraries, size, _END_ID, schemas).items():
            rows.append({"tokenizer": name, "vocabulary": size, "library": library, **seen.told()})
    return {"benchmark": "grammars", "tree": _TREE, "results": rows}


def compare(libraries: Mapping[str, Library], vocabulary: int, end: int, schemas: int) -> dict[str, _Seen]:
    """By library, over all schemas."""
    seen = {library: _Seen() for library in libraries}
    for seed in range(schemas):
        begun = {name: matcher for name in libraries if (matcher := _begin(libraries, name, seed, seen))}
        texts = {
            name: _walk(libraries[name].begin(make_schema(seed)), vocabulary, end, seed) for name in begun
        }
        for name in begun:
            for author, text in texts.items():
                whole = _follow(libraries[name].begin(make_schema(seed)), text, vocabulary, seen[name])
                seen[name].refused += author != name and not whole
    return seen


def _begin(
    libraries: Mapping[str, Library], name: str, seed: int, seen: Mapping[str, _Seen]
) -> Matcher | None:
    started = time.perf_counter()
    try:
        matcher = libraries[name].begin(make_schema(seed))
    except (ValueError, RuntimeError):  # what either library says of a schema
        seen[name].not_compiled += 1
        return None
    seen[name].compiled.append(time.perf_counter() - started)
    return matcher


def _walk(matcher: Matcher, vocabulary: int, end: int, seed: int) -> list[int]:
    """Tokens at random among those that may come."""
    chance, text = random.Random(seed), list[int]()
    row = _row(vocabulary)
    while len(text) < _LONGEST:
        matcher.fill(row)
        tokens = [token for token in allowed(row, vocabulary) if token != end]
        if not tokens:
            break
        text.append(chance.choice(tokens))
        matcher.accept(text[-1])
    return text


def _follow(matcher: Matcher, text: Sequence[int], vocabulary: int, seen: _Seen) -> bool:
    """As the engine does: the masks of a root and of a chain below it, then one token on. False where the
    text is refused."""
    row = _row(vocabulary)
    seen.first_masks.append(_timed(matcher, row))
    for place, token in enumerate(text):
        below = text[place : place + _TREE]
        taken = 0
        for guess in below:
            if not matcher.accept(guess):
                break
            taken += 1
            seen.masks.append(_timed(matcher, row))
        matcher.back(taken)
        if not taken:
            return False
        matcher.accept(token)
    return True


def _timed(matcher: Matcher, row: torch.Tensor) -> float:
    started = time.perf_counter()
    matcher.fill(row)
    return time.perf_counter() - started


def _row(vocabulary: int) -> torch.Tensor:
    return torch.full((-(-vocabulary // 32),), -1, dtype=torch.int32)


def _quantiles(values: Sequence[float], times: float) -> dict[str, float]:
    shares = {"p50": 50, "p99": 99, "max": 100}
    return {name: round(times * float(np.percentile(values, share)), 3) for name, share in shares.items()}


def larger_tokenizer(vocabulary: int) -> Backend:
    """Byte-level pairs of the standard library's sources, about as many as models have."""
    tokenizer = Backend(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[_END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((file.text for file in read_sources(standard_library())), trainer)
    return tokenizer
