"""Prompts of the benchmarks: prefixes of held-out files, and how repetitive a continuation is."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ssd_serve.errors import UserError
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.recipes.corpus import standard_library
from ssd_serve.recipes.evaluation import held_out_files

_SHORTEST, _LONGEST = 96, 1000
_PER_FILE = 8
_NGRAM = 8
MAX_REPEATED = 0.3
"""A continuation that repeats more of its 8-grams than this is a loop, which any drafter guesses."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prefix of a held-out file, as tokens, and the seed of its continuations."""

    path: str
    tokens: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """Prompts of one temperature, the share of those tried that looped, and how many loops had to be kept."""

    prompts: tuple[Prompt, ...]
    replaced: float
    loops_kept: int


def held_out_prompts(target: Path, tokenizer: Tokenizer) -> list[Prompt]:
    """Prefixes of held-out files, the first prompt of every file before the second of any.

    Lengths, order and seeds come from hashes of the paths.
    """
    files = held_out_files(target, standard_library()).files
    texts = [(file.path, tokenizer.encode(file.text)) for file in files]
    pool: list[Prompt] = []
    for turn in range(_PER_FILE):
        prompts = [_prompt(path, tokens, turn) for path, tokens in texts]
        pool += sorted((prompt for prompt in prompts if prompt), key=lambda prompt: prompt.seed)
    if not pool:
        raise UserError("no held-out file of the embedded pair is in this Python's standard library")
    return pool


def _prompt(path: str, tokens: Sequence[int], turn: int) -> Prompt | None:
    digest = hashlib.sha256(f"prompt:{path}:{turn}".encode()).digest()
    length = _SHORTEST + int.from_bytes(digest[:4], "big") % (_LONGEST - _SHORTEST)
    if len(tokens) < 2 * length:
        return None
    return Prompt(path, tuple(tokens[:length]), int.from_bytes(digest[4:8], "big"))


def repeated_share(tokens: Sequence[int]) -> float:
    """Share of 8-grams that have occurred before in the same text."""
    grams = [tuple(tokens[start : start + _NGRAM]) for start in range(len(tokens) - _NGRAM + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
