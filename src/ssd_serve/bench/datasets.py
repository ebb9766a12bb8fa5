"""Prompts from the user's files: one text a line, JSON lines, and the formats of published data sets.

The fields of a JSON line decide: HumanEval (`task_id`, `prompt`), GSM8K (`question`), MT-Bench (`turns`; the
first is used), or `prompt` or `text`. Files may be compressed with gzip.
"""

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ssd_serve.base.errors import UserError
from ssd_serve.bench.prompts import Prompt, named_seed
from ssd_serve.models.text.tokenizer import Tokenizer

_GZIP = b"\x1f\x8b"


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
