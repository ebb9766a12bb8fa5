"""The questions of the comparison: five kinds, from data sets that the user gives.

Chat is MT-Bench with both turns, code HumanEval, mathematics GSM8K. Copying and editing are made from HumanEval's
solutions: whole programs, one after the other, that are to be repeated or changed.
"""

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ssd_serve.base.errors import UserError
from ssd_serve.bench.prompts import named_seed

KINDS = ("chat", "code", "mathematics", "copying", "editing")
_FILES = {"chat": "mt_bench.jsonl", "mathematics": "gsm8k_test.jsonl"}
_PROGRAMS = "HumanEval.jsonl.gz"
_CHARACTERS = 900
"""Least characters of the programs that are copied or edited: about 256 tokens."""


@dataclass(frozen=True, slots=True)
class Question:
    """The user's turns of a question, of which the last is asked; `chat`: in the model's chat template."""

    kind: str
    name: str
    turns: tuple[str, ...]
    chat: bool = True

    @property
    def seed(self) -> int:
        """Seed of every answer to this question."""
        return named_seed(f"{self.kind} {self.name}")


class _Record(msgspec.Struct, frozen=True):
    question_id: int | str = ""
    turns: list[str] = []
    question: str = ""
    task_id: str = ""
    prompt: str = ""
    entry_point: str = ""
    canonical_solution: str = ""

    @property
    def program(self) -> str:
        return self.prompt + self.canonical_solution


def read_kind(kind: str, folder: Path) -> list[Question]:
    """Return all questions of a kind, in an order that is random and always the same.

    Raises `UserError` for a folder without the kind's file.
    """
    path = folder / _FILES.get(kind, _PROGRAMS)
    records = _records(path)
    if kind == "chat":
        groups = [_turns(record) for record in records if record.turns]
    elif kind == "mathematics":
        numbered = enumerate(records, 1)
        groups = [[Question(kind, f"line {at}", (one.question,))] for at, one in numbered if one.question]
    elif kind == "code":
        groups = [[Question(kind, one.task_id, (one.prompt,), chat=False)] for one in records if one.prompt]
    else:
        groups = [[_task(kind, records, start)] for start in range(0, len(records), 2)]
    if not groups:
        raise UserError(f"{path} has no questions of the kind {kind}")
    return [question for group in sorted(groups, key=lambda group: group[0].seed) for question in group]


def _turns(record: _Record) -> list[Question]:
    counts = range(1, len(record.turns) + 1)
    return [
        Question("chat", f"{record.question_id} turn {count}", tuple(record.turns[:count]))
        for count in counts
    ]


def _task(kind: str, records: Sequence[_Record], start: int) -> Question:
    """Return the task to copy programs from `start` on, or to rename the first one's function."""
    first, code = records[start], "\n\n".join(_programs(records, start))
    fenced = f"```python\n{code}\n```"
    if kind == "copying":
        asked = f"Repeat this code exactly, all of it:\n\n{fenced}"
    else:
        name = first.entry_point
        asked = f"Rename the function {name} to renamed_{name} and write all of the code again:\n\n{fenced}"
    return Question(kind, first.task_id, (asked,))


def _programs(records: Sequence[_Record], start: int) -> Iterator[str]:
    written = 0
    for record in (*records[start:], *records[:start]):
        yield record.program.strip()
        written += len(record.program)
        if written >= _CHARACTERS:
            return


def _records(path: Path) -> list[_Record]:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        return [msgspec.json.decode(line, type=_Record) for line in text.splitlines() if line.strip()]
    except (OSError, EOFError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise UserError(f"cannot read the questions in {path}: {error}") from error
