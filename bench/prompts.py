"""Prompts of the benchmarks: prefixes of held-out files, and how repetitive a continuation is."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ssd_serve.errors import UserError
from ssd_serve.models.tokenizer import Tokenizer
from ssd_serve.recipes.corpus import standard_library
from ssd_serve.recipes.evaluation import held_out_files

_SHORTEST, _LONGEST = 96, 320
_NGRAM = 8
MOST_REPEATED = 0.3
"""A continuation that repeats more of its 8-grams than this is a loop, which any drafter guesses."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prefix of a held-out file, as tokens, and the seed of its continuations."""

    path: str
    tokens: tuple[int, ...]
    seed: int


def held_out_prompts(target: Path, tokenizer: Tokenizer) -> list[Prompt]:
    """One prompt a held-out file that is long enough, in an order fixed by a hash of the path."""
    files = held_out_files(target, standard_library()).files
    prompts: list[Prompt] = []
    for file in files:
        digest = hashlib.sha256(f"prompt:{file.path}".encode()).digest()
        length = _SHORTEST + int.from_bytes(digest[:4], "big") % (_LONGEST - _SHORTEST)
        tokens = tokenizer.encode(file.text)
        if len(tokens) >= 2 * length:
            prompts.append(Prompt(file.path, tuple(tokens[:length]), int.from_bytes(digest[4:8], "big")))
    if not prompts:
        raise UserError("no held-out file of the embedded pair is in this Python's standard library")
    return sorted(prompts, key=lambda prompt: prompt.seed)


def repeated_share(tokens: Sequence[int]) -> float:
    """Share of 8-grams that have occurred before in the same text."""
    grams = [tuple(tokens[start : start + _NGRAM]) for start in range(len(tokens) - _NGRAM + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
