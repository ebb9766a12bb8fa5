"""Tests of the all-reduce check of `ssd doctor`: correct, wrong, failing and hanging libraries."""

import sys
from pathlib import Path

import pytest

from ssd_serve.app.doctor.collective import failure, main, sums

pytestmark = pytest.mark.slow


def program(text: str) -> tuple[str, ...]:
    """Return a command that runs this code in place of a rank."""
    return (sys.executable, "-c", text)


def test_ranks_on_cpus_sum(tmp_path: Path) -> None:
    assert failure(["cpu", "cpu", "cpu"]) == ""
    assert failure(["cpu"]) == ""
    assert sums("cpu", 0, 1, tmp_path / "one")
    assert sums("cpu", 0, 1, tmp_path / "other")  # a process group that was not destroyed would make it fail


def test_missing_device_error_is_that_of_the_library() -> None:
    assert "cuda" in failure(["cuda:0"]).lower()


def test_hanging_library_is_killed() -> None:
    hanging = program("import time; time.sleep(60)")
    assert failure(["cpu", "cpu"], timeout_s=0.5, program=hanging) == "no answer within 0.5 s"


def test_missing_rank_is_reported() -> None:
    other = "sys.exit('gone' if sys.argv[3] == '1' else main(sys.argv[1:]))"
    text = f"import sys; from ssd_serve.app.doctor.collective import main; {other}"
    assert failure(["cpu", "cpu"], timeout_s=10.0, program=program(text)) == "gone"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import sys; sys.exit('first\\nlast')", "last"),
        ("import os; os._exit(3)", "it ended with code 3"),
        ("import os; os.abort()", "it ended with code -6"),
    ],
)
def test_library_failure_is_reported_in_one_line(text: str, words: str) -> None:
    assert failure(["cpu"], program=program(text)) == words


def test_wrong_sum_is_a_failure() -> None:
    text = "import sys; from ssd_serve.app.doctor import collective; collective.sums = lambda *_: False; "
    assert failure(["cpu"], program=program(text + "collective.main(sys.argv[1:])")) == "the sum is wrong"


def test_capture_failure_is_reported() -> None:
    assert failure(["cpu"], captured=True) != ""


def test_collective_command_reports_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cpu", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["rank 0: right", "rank 1: right"]
    assert main(["--captured", "cpu"]) == 1
    assert capsys.readouterr().out.startswith("rank 0: ")
