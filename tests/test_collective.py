"""A sum in a group of one process: right, wrong, failing and hanging libraries are told apart."""

import sys

import pytest

from ssd_serve.collective import all_reduce, failure, main


def program(text: str) -> tuple[str, ...]:
    """A stand-in for the process that sums."""
    return (sys.executable, "-c", text)


def test_the_library_for_cpus_sums() -> None:
    assert failure("gloo", "cpu") == ""
    assert all_reduce("gloo", "cpu")  # and here: a group that was left behind would be in the way


def test_a_library_that_is_not_there_is_told_by_its_own_words() -> None:
    assert "nothing" in failure("nothing", "cpu").lower()


def test_a_library_that_hangs_is_ended() -> None:
    assert failure("gloo", "cpu", 0.5, program("import time; time.sleep(60)")) == "no answer within 0.5 s"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import sys; sys.exit('first\\nlast')", "last"),
        ("import os; os._exit(3)", "it ended with code 3"),
        ("import os; os.abort()", "it ended with code -6"),
    ],
)
def test_a_library_that_fails_is_told_in_a_line(text: str, words: str) -> None:
    assert failure("gloo", "cpu", program=program(text)) == words


def test_a_wrong_sum_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ssd_serve.collective.all_reduce", lambda backend, device: False)
    assert main(["gloo", "cpu"]) == 1
    assert "wrong" in capsys.readouterr().err
