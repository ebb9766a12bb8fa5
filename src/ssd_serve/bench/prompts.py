"""Prompts of the benchmarks: short pieces of real text with continuations that do not loop.

A prompt is the text before a position in a file that was held out from the embedded pair's training. Any
drafter predicts a loop, so prompts are left out if their plain continuation nearly loops, and measured
texts that loop are not counted.

Files of users have one text a line, or JSON lines. The fields of a JSON line decide: HumanEval (`task_id`,
`prompt`), GSM8K (`question`), MT-Bench (`turns`; the first is used), or `prompt` or `text`. Files may be
compressed with gzip.
"""

import gzip
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import msgspec

from ssd_serve.base.errors import SsdError, UserError
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.recipes.data import held_out_files, standard_library

NEW_TOKENS = 48
"""New tokens of each prompt."""
_SHORTEST, _LONGEST = 96, 288
_NGRAM = 8
LOOP, NEAR_LOOP = 0.3, 0.2
"""Shares of repeated 8-grams above which a text is a loop, or nearly one."""
_MAX_LOOPS = 0.1
_BATCH = 16
_GZIP = b"\x1f\x8b"

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


@dataclass(frozen=True, slots=True)
class Question:
    """A record of a file; `is_chat` is False for a text that is to be continued."""

    name: str
    text: str
    is_chat: bool


class _Record(msgspec.Struct, frozen=True):
    """The fields that distinguish the formats."""

    task_id: str | None = None
    prompt: str | None = None
    question: str | None = None
    question_id: int | str | None = None
    turns: list[str] | None = None
    text: str | None = None


def read_questions(path: Path) -> list[Question]:
    """Read all records of a file. Raises `UserError` for a file without prompts."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data.startswith(_GZIP) else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the prompts in {path}: {error}") from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    as_json = ".jsonl" in path.suffixes or ".json" in path.suffixes
    found = [_question(path, *line) if as_json else _line(*line) for line in lines]
    if not found:
        raise UserError(f"{path} has no prompts")
    return found


def _line(number: int, line: str) -> Question:
    return Question(f"line {number}", line, is_chat=False)


def _question(path: Path, number: int, line: str) -> Question:
    try:
        record = msgspec.json.decode(line, type=_Record)
    except msgspec.MsgspecError as error:
        raise UserError(f"{path}, line {number}: {error}") from error
    for text, is_chat, name in _candidates(record):
        if text:
            return Question(str(name or f"line {number}"), text, is_chat)
    raise UserError(
        f"{path}, line {number} has no prompt: none of the fields prompt, question, turns and text has a text"
    )


def _candidates(record: _Record) -> Iterator[tuple[str | None, bool, object]]:
    """Yield (text, is_chat, name) of each known format."""
    yield record.turns[0] if record.turns else None, True, record.question_id
    yield record.question, True, record.question_id
    yield record.prompt, False, record.task_id
    yield record.text, False, record.task_id


def as_prompts(
    questions: Sequence[Question], tokenizer: Tokenizer, longest: int, chat: bool | None = None
) -> list[Prompt]:
    """Tokenise the questions, with the chat template if `chat`; None applies it to chat questions.

    Raises `UserError` for a prompt of more than `longest` tokens, and for `chat` without a template.
    """
    if chat and not tokenizer.has_chat_template:
        raise UserError(f"{tokenizer.name} has no chat template: leave out --chat")
    prompts: list[Prompt] = []
    for each in questions:
        templated = tokenizer.has_chat_template and each.is_chat if chat is None else chat
        tokens = _templated(tokenizer, each.text) if templated else tokenizer.encode(each.text)
        if not 0 < len(tokens) <= longest:
            raise UserError(
                f"the prompt {each.name} has {len(tokens)} tokens; {tokenizer.name} can take 1 to {longest} "
                "besides the new tokens"
            )
        prompts.append(Prompt(each.name, tuple(tokens), named_seed(each.name)))
    return prompts


def _templated(tokenizer: Tokenizer, text: str) -> list[int]:
    message = {"role": "user", "content": text}
    return tokenizer.encode(tokenizer.apply_chat_template([message]), add_special_tokens=False)
