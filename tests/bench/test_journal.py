"""Answers survive the process that asked for them, in the order in which they came."""

from pathlib import Path

import pytest

from ssd_serve.base.errors import UserError
from ssd_serve.bench.journal import Journal, work_folder
from ssd_serve.bench.peers.client import Sample


def sample(first_s: float) -> Sample:
    return Sample(16, 15, first_s, 1.0)


def test_answers_come_back_in_their_order_and_then_there_are_none(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    journal = Journal(file, "code", Sample)
    assert journal.next("a") is None
    for first_s in (0.1, 0.2):
        journal.add("a", sample(first_s))
    journal.add("b", sample(0.3))
    assert journal.next("a") is None, "its own answers are not new"
    again = Journal(file, "code", Sample)
    assert again.answers == 3
    assert [again.next("a"), again.next("b"), again.next("a"), again.next("a")] == [
        sample(0.1),
        sample(0.3),
        sample(0.2),
        None,
    ]


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    journal = Journal(file, "code", Sample)
    journal.add("a", sample(0.1))
    with file.open("ab") as out:
        out.write(b'{"key": "a", "sam')
    again = Journal(file, "code", Sample)
    assert again.next("a") == sample(0.1)
    assert again.next("a") is None
    again.add("a", sample(0.2))
    assert Journal(file, "code", Sample).answers == 2


def test_answers_of_another_code_are_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "answers.jsonl", "code", Sample)
    with pytest.raises(UserError, match="another code"):
        Journal(tmp_path / "answers.jsonl", "other code", Sample)


def test_a_file_that_cannot_be_read_is_a_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_bytes(b'"code"\n{"key": 3}\n')
    with pytest.raises(UserError, match=r"cannot be read .*give another --work"):
        Journal(file, "code", Sample)
    with pytest.raises(UserError, match="cannot be a folder"), work_folder(file):
        pass
