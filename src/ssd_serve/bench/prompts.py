"""Prompts of the benchmarks: short pieces of real text with continuations that do not loop.

A prompt is the text before a position in a file that was held out from the embedded pair's training. Any
drafter predicts a loop, so prompts are left out if their plain continuation nearly loops, and measured
texts that loop are not counted.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from ssd_serve.base.errors import SsdError, UserError
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.recipes.corpus import held_out_files, standard_library

NEW_TOKENS = 48
"""New tokens of each prompt."""
_SHORTEST, _LONGEST = 96, 288
_NGRAM = 8
LOOP, NEAR_LOOP = 0.3, 0.2
"""Shares of repeated 8-grams above which a text is a loop, or nearly one."""
_MAX_LOOPS = 0.1
_BATCH = 16

Continue = Callable[[Sequence["Prompt"]], Sequence[Sequence[int]]]
"""Computes the plain continuations of prompts."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a prompt, its source, and the seed of its continuations."""

    path: str
    tokens: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class ChosenPrompts:
    """Prompts to measure with, others to tune with, and the share of candidates that was left out."""

    prompts: tuple[Prompt, ...]
    tuning: tuple[Prompt, ...]
    left_out: float


def held_out_prompts(target: Path, tokenizer: Tokenizer, longest: int = _LONGEST) -> list[Prompt]:
    """Return prompts of at most `longest` tokens from held-out files, one of each file in turn.

    The order depends only on the files' names.
    """
    turns: list[list[Prompt]] = []
    for file in held_out_files(target, standard_library()):
        tokens = tokenizer.encode(file.text)
        ends = range(_SHORTEST, len(tokens) - NEW_TOKENS, NEW_TOKENS)
        places = [
            Prompt(file.path, tuple(tokens[max(0, end - longest) : end]), named_seed(f"{file.path}:{end}"))
            for end in ends
        ]
        turns.append(sorted(places, key=lambda place: place.seed))
    return [place for turn in zip_longest(*turns) for place in turn if place is not None]


def named_seed(name: str) -> int:
    """Return 32 bits that depend only on the name."""
    return int.from_bytes(hashlib.sha256(f"prompt:{name}".encode()).digest()[:4], "big")


def choose(pool: Sequence[Prompt], count: int, tuning: int, go_on: Continue) -> ChosenPrompts:
    """Take the first prompts of the pool with a continuation that does not nearly loop, tuning prompts first.

    Raises `UserError` if the pool has too few.
    """
    fine: list[Prompt] = []
    tried = 0
    for start in range(0, len(pool), _BATCH):
        some = pool[start : start + _BATCH]
        texts = go_on(some)
        fine += [
            prompt for prompt, text in zip(some, texts, strict=True) if repeated_share(text) <= NEAR_LOOP
        ]
        tried += len(some)
        if len(fine) >= count + tuning:
            break
    else:
        raise UserError(
            f"of {tried} prompts {len(fine)} have continuations that do not loop, and {count + tuning} are "
            "wanted: ask for fewer, or for a higher temperature"
        )
    return ChosenPrompts(tuple(fine[tuning : tuning + count]), tuple(fine[:tuning]), 1 - len(fine) / tried)


def repeated_share(tokens: Sequence[int]) -> float:
    """Return the share of 8-grams that have occurred before in the same text."""
    grams = [tuple(tokens[start : start + _NGRAM]) for start in range(len(tokens) - _NGRAM + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def without_loops(prompts: Sequence[Prompt], texts: Mapping[str, Sequence[Sequence[int]]]) -> list[int]:
    """Return the indices of the prompts after which no engine's text is a loop.

    A GPU rounds differently in another batch, so an engine may write another text than the one by which its
    prompt was chosen. Raises `SsdError` if more than one prompt and a tenth of them loop, or all.
    """
    loops = {
        index: name
        for index in range(len(prompts))
        for name, some in texts.items()
        if repeated_share(some[index]) > LOOP
    }
    if len(loops) == len(prompts) or len(loops) > max(1, _MAX_LOOPS * len(prompts)):
        index, name = next(iter(loops.items()))
        raise SsdError(f"{name}: the text after {prompts[index].path} is a loop: measure other prompts")
    return [index for index in range(len(prompts)) if index not in loops]
