"""Prompts from files that the user has: one text a line, JSON lines, and the published data sets' formats.

A JSON line is known by its fields: HumanEval (`task_id`, `prompt`), GSM8K (`question`), MT-Bench (`turns`;
the first is asked), or anybody's own (`prompt` or `text`). Compressed files are read as they are. Knows
files, tokenizers and their chat templates, not what is measured.
"""

import gzip
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ssd_serve.base.errors import UserError
from ssd_serve.bench.prompts import Prompt
from ssd_serve.models.text.tokenizer import Tokenizer

_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Question:
    """One record: its text, and whether it asks for an answer rather than to be continued."""

    name: str
    text: str
    asks: bool


class _Record(msgspec.Struct, frozen=True):
    """The fields by which formats are told apart."""

    task_id: str | None = None
    prompt: str | None = None
    question: str | None = None
    question_id: int | str | None = None
    turns: list[str] | None = None
    text: str | None = None


def read_questions(path: Path) -> list[Question]:
    """All records of a file in their order. Raises `UserError` for what is none."""
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
    return Question(f"line {number}", line, asks=False)


def _question(path: Path, number: int, line: str) -> Question:
    try:
        record = msgspec.json.decode(line, type=_Record)
    except msgspec.MsgspecError as error:
        raise UserError(f"{path}, line {number}: {error}") from error
    for text, asks, name in _readings(record):
        if text:
            return Question(str(name or f"line {number}"), text, asks)
    raise UserError(
        f"{path}, line {number} has no prompt: none of the fields prompt, question, turns and text has a text"
    )


def _readings(record: _Record) -> Iterator[tuple[str | None, bool, object]]:
    """What each known format would say: the text, whether it asks, its name."""
    yield record.turns[0] if record.turns else None, True, record.question_id
    yield record.question, True, record.question_id
    yield record.prompt, False, record.task_id
    yield record.text, False, record.task_id


def as_prompts(
    questions: Sequence[Question], tokenizer: Tokenizer, longest: int, chat: bool | None = None
) -> list[Prompt]:
    """The questions as a model reads them: by its chat template if `chat`, or if None where they ask and it
    has one. Raises `UserError` where one is longer than `longest` tokens, or the model has no template.
    """
    if chat and not tokenizer.has_chat_template:
        raise UserError(f"{tokenizer.name} has no chat template: leave out --chat")
    prompts: list[Prompt] = []
    for each in questions:
        templated = tokenizer.has_chat_template and each.asks if chat is None else chat
        tokens = _templated(tokenizer, each.text) if templated else tokenizer.encode(each.text)
        if not 0 < len(tokens) <= longest:
            raise UserError(
                f"the prompt {each.name} has {len(tokens)} tokens; {tokenizer.name} can take 1 to {longest} "
                "beside the new tokens"
            )
        digest = hashlib.sha256(f"question:{each.name}".encode()).digest()
        prompts.append(Prompt(each.name, tuple(tokens), int.from_bytes(digest[:4], "big")))
    return prompts


def _templated(tokenizer: Tokenizer, text: str) -> list[int]:
    message = {"role": "user", "content": text}
    return tokenizer.encode(tokenizer.apply_chat_template([message]), add_special_tokens=False)
