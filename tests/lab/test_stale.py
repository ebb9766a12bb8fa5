"""Results that are older than the code that they measure are named, in a small repository made for it."""

import json
import subprocess
from pathlib import Path

import pytest

from lab import stale
from lab.stale import judge_results
from ssd_serve.bench.provenance import code_of

SIGNED = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
CODE, RESULT = "kernels/code.py", "bench/results/speed.json"


def git(folder: Path, *words: str) -> str:
    """What git prints in this folder."""
    command = ["git", "-C", str(folder), *SIGNED, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def change(clone: Path, file: str, text: str) -> None:
    """Commit another content of one file."""
    (clone / file).parent.mkdir(parents=True, exist_ok=True)
    (clone / file).write_text(text, encoding="utf-8")
    git(clone, "add", ".")
    git(clone, "commit", "-qm", f"{file} holds {text!r}")


def measure(clone: Path, file: str = RESULT, **changes: object) -> None:
    """Write and commit a result of the code as it is at HEAD."""
    provenance = {
        "commit": git(clone, "rev-parse", "HEAD"),
        "dirty": False,
        "measures": ["kernels"],
        "code": code_of(clone, "HEAD", ["kernels"]),
        "started": "2026-11-22T01:40:00+00:00",
    }
    change(clone, file, json.dumps({"speed": 1, "provenance": provenance | changes}))


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with some code and a result of it."""
    git(tmp_path, "init", "-q")
    change(tmp_path, CODE, "1\n")
    measure(tmp_path)
    return tmp_path


def why(clone: Path) -> str:
    (found,) = judge_results(clone)
    assert (found.file, found.measured) == (RESULT, "2026-11-22")
    return found.why


def test_a_result_is_as_new_as_its_code_until_a_commit_changes_that(clone: Path) -> None:
    assert why(clone) == ""
    change(clone, "server/code.py", "what it does not measure\n")
    assert why(clone) == ""
    change(clone, CODE, "2\n")
    change(clone, "kernels/new.py", "3\n")
    assert why(clone) == "2 commits since"


def test_code_that_is_as_it_was_again_was_measured(clone: Path) -> None:
    change(clone, CODE, "2\n")
    change(clone, CODE, "1\n")
    assert why(clone) == ""


def test_a_rebased_commit_is_known_by_its_code(clone: Path) -> None:
    measure(clone, commit="0" * 40)
    assert why(clone) == ""
    change(clone, CODE, "2\n")
    assert why(clone) == "its code differs, its commit is not in this history"


def test_what_is_compiled_for_cores_makes_attention_on_a_gpu_no_older(clone: Path) -> None:
    """But it does all else that ran there: a drafter may have computed on a core."""
    attention, modes = "bench/results/h100/kernels.json", "bench/results/h100/modes.json"
    for file in (attention, modes):
        measure(clone, file)
    change(clone, "kernels/native/products.c", "4\n")
    whys = {found.file: found.why for found in judge_results(clone)}
    assert whys == {RESULT: "1 commits since", attention: "", modes: "1 commits since"}
    change(clone, CODE, "2\n")
    assert all(found.why for found in judge_results(clone))


def test_code_that_was_in_no_commit_was_measured_by_nobody_else(clone: Path) -> None:
    measure(clone, dirty=True)
    assert why(clone) == "its code was in no commit"


@pytest.mark.parametrize("content", ["{}", '{"provenance": {"commit": ""}}'])
def test_a_result_that_names_no_commit_is_stale(clone: Path, content: str) -> None:
    change(clone, RESULT, content)
    (found,) = judge_results(clone)
    assert found.why == "names no commit"


def test_the_command_lists_all_results_and_fails_where_one_is_stale(
    clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(clone, "lab/results/other.json")
    assert stale.main(clone) == 0
    change(clone, CODE, "2\n")
    measure(clone, "lab/results/other.json")
    capsys.readouterr()
    assert stale.main(clone) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith(RESULT)
    assert lines[1].endswith("1 commits since")
    assert lines[2].endswith("as new as its code")
