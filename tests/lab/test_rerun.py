"""Measuring stale results again: every committed one, in order, whatever happens to one of them."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from lab import rerun as module
from lab.rerun import COMMANDS, ELSEWHERE, VARIABLES, main, rerun, stale
from lab.stale import Judged
from ssd_serve.bench.provenance import ROOT
from ssd_serve.errors import UserError


def test_every_committed_result_has_its_command() -> None:
    committed = {
        str(file.relative_to(ROOT))
        for folder in ("bench/results", "lab/results")
        for file in (ROOT / folder).rglob("*.json")
    }
    assert committed <= {*COMMANDS, *ELSEWHERE}
    assert set(VARIABLES) <= set(COMMANDS)


def test_stale_ones_and_missing_ones_come_in_the_order_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh, old, *_ = COMMANDS
    judged = [Judged(old, "", "", "old"), Judged(fresh, "", "", "")]
    monkeypatch.setattr(module, "judge_results", lambda _root: judged)
    assert stale(ROOT) == list(COMMANDS)[1:]


def test_one_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    ran: list[tuple[Sequence[str], dict[str, str], Path]] = []
    told: list[str] = []

    def run(words: Sequence[str], variables: dict[str, str], log: Path) -> int:
        ran.append((words, variables, log))
        return 3 * (len(ran) == 1)

    files = ["bench/results/lossless.json", "bench/results/lossless-torch.json"]
    clock = iter([0.0, 60.0, 60.0, 240.0])
    outcomes = rerun(files, tmp_path / "logs", run, told.append, lambda: next(clock))
    assert [(each.file, each.code, each.minutes) for each in outcomes] == [
        (files[0], 3, 1.0),
        (files[1], 0, 3.0),
    ]
    assert [words[-2:] for words, *_ in ran] == [["--json", file] for file in files]
    assert [variables for _, variables, _ in ran] == [{}, {"SSD_NATIVE_KERNELS": "false"}]
    assert [log.name for *_, log in ran] == [
        "bench-results-lossless.log",
        "bench-results-lossless-torch.log",
    ]
    assert "ended with 3" in told[1]


def test_an_unknown_result_is_an_error_that_names_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench/results/nothing.json"])
    assert "known are bench/results/modes.json" in capsys.readouterr().err


def test_logs_that_cannot_be_written_are_an_error_before_anything_is_measured(tmp_path: Path) -> None:
    def run(*_: object) -> int:
        raise AssertionError("measured")

    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--logs .* cannot be a folder to write to"):
        rerun(["bench/results/lossless.json"], tmp_path / "file" / "logs", run, print, lambda: 0.0)
