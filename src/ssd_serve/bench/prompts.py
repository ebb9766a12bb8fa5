"""The texts of all benchmarks: short continuations of real text, and none that loops.

A prompt is what stands before a place in a file that the embedded pair has not seen. There is another place
every `NEW_TOKENS` tokens, so that no continuation goes far from real text. A loop is guessed by any drafter:
prompts whose plain continuation comes near one are left out, and a measured text that loops is not counted,
or ends the benchmark. Knows texts, not who continues them.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Protocol

from ssd_serve.base.errors import SsdError, UserError
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.recipes.corpus import standard_library
from ssd_serve.recipes.evaluation import held_out_files

NEW_TOKENS = 48
"""New tokens of each prompt."""
_SHORTEST, _LONGEST = 96, 288
_NGRAM = 8
LOOP, NEARLY = 0.3, 0.2
"""A text of whose 8-grams a larger share repeats earlier ones is a loop; one of the other share nearly is."""
_MOST_LOOPS = 0.1
_AT_ONCE = 16

Continue = Callable[[Sequence["Prompt"]], Sequence[Sequence[int]]]
"""The plain continuations of some prompts."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The beginning of a text as tokens, where it is from, and the seed of its continuations."""

    path: str
    tokens: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """Prompts to measure with, others to tune with, and the share of those tried that was left out."""

    prompts: tuple[Prompt, ...]
    tuning: tuple[Prompt, ...]
    left_out: float


def held_out_prompts(target: Path, tokenizer: Tokenizer, longest: int = _LONGEST) -> list[Prompt]:
    """Places in the files that the embedded pair has not seen: one of every file before the second of any, in
    an order that follows from names. Each has at most `longest` tokens before it."""
    turns: list[list[Prompt]] = []
    for file in held_out_files(target, standard_library()).files:
        tokens = tokenizer.encode(file.text)
        ends = range(_SHORTEST, len(tokens) - NEW_TOKENS, NEW_TOKENS)
        places = [
            Prompt(file.path, tuple(tokens[max(0, end - longest) : end]), _number(file.path, end))
            for end in ends
        ]
        turns.append(sorted(places, key=lambda place: place.seed))
    return [place for turn in zip_longest(*turns) for place in turn if place is not None]


def _number(name: str, index: int) -> int:
    """32 bits that follow from the name."""
    return int.from_bytes(hashlib.sha256(f"prompt:{name}:{index}".encode()).digest()[:4], "big")


def choose(pool: Sequence[Prompt], count: int, tuning: int, go_on: Continue) -> Chosen:
    """The first `tuning` prompts of the pool that do not nearly loop, then `count` others of that kind."""
    fine: list[Prompt] = []
    tried = 0
    for start in range(0, len(pool), _AT_ONCE):
        some = pool[start : start + _AT_ONCE]
        texts = go_on(some)
        fine += [prompt for prompt, text in zip(some, texts, strict=True) if repeated_share(text) <= NEARLY]
        tried += len(some)
        if len(fine) >= count + tuning:
            break
    else:
        raise UserError(
            f"of {tried} prompts {len(fine)} have continuations that do not loop, and {count + tuning} are "
            "wanted: ask for fewer, or for a higher temperature"
        )
    return Chosen(tuple(fine[tuning : tuning + count]), tuple(fine[:tuning]), 1 - len(fine) / tried)


def repeated_share(tokens: Sequence[int]) -> float:
    """Share of 8-grams that have occurred before in the same text."""
    grams = [tuple(tokens[start : start + _NGRAM]) for start in range(len(tokens) - _NGRAM + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


class FromFile(Protocol):
    """Whatever begins with text of a file."""

    @property
    def path(self) -> str:
        """Of the file, for people."""
        ...


def without_loops(prompts: Sequence[FromFile], texts: Mapping[str, Sequence[Sequence[int]]]) -> list[int]:
    """The places of the prompts after which no text is a loop, of all ways by their names.

    A GPU rounds otherwise in another batch, so that a way may write another text than that by which its
    prompt was chosen. Raises `SsdError` where more than one prompt and a tenth of them would go, or all.
    """
    kept = [
        place
        for place in range(len(prompts))
        if all(repeated_share(some[place]) <= LOOP for some in texts.values())
    ]
    if not kept or len(prompts) - len(kept) > max(1, _MOST_LOOPS * len(prompts)):
        for who, some in texts.items():
            refuse_loops(who, prompts, some)
    return kept


def refuse_loops(who: str, prompts: Sequence[FromFile], texts: Iterable[Sequence[int]]) -> None:
    """Raises `SsdError` where the text of a prompt is a loop: what is measured on it means nothing."""
    for prompt, text in zip(prompts, texts, strict=True):
        share = repeated_share(text)
        if share > LOOP:
            raise SsdError(f"{who}: the text after {prompt.path} is a loop ({share:.0%} of it is repeated)")
