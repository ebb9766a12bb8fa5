"""A comparison in several sittings: what was measured is told, and the rest measured, with equal choices."""

from pathlib import Path

import pytest

from ssd_serve.base.errors import UserError
from ssd_serve.bench.journal import Journal, OutOfTimeError, TimeGiven, read_kept, write_kept
from ssd_serve.bench.kept_stage import KeptStage
from ssd_serve.bench.modes import Entry, run_modes
from ssd_serve.bench.prompts import Chosen, Prompt
from ssd_serve.bench.timed_request import TimedRequest
from tests.bench.test_modes import CHOSEN, FakeStage


def journal_in(folder: Path) -> Journal[TimedRequest]:
    return Journal(folder / "runs", "code", TimedRequest)


def ignore(_line: str) -> None:
    pass


def test_a_comparison_that_was_ended_goes_on_where_it_ended(tmp_path: Path) -> None:
    class Ending(FakeStage):
        def run(self, entry: Entry, prompt: Prompt, temperature: float) -> TimedRequest:
            if len(self.runs) == 300:
                raise KeyboardInterrupt
            return super().run(entry, prompt, temperature)

    first, second = Ending(), FakeStage()
    with pytest.raises(KeyboardInterrupt):
        run_modes(KeptStage(first, journal_in(tmp_path), TimeGiven(None)), {0.0: CHOSEN}, ignore)
    now = journal_in(tmp_path)
    rows = run_modes(KeptStage(second, now, TimeGiven(None)), {0.0: CHOSEN}, ignore)
    assert now.earlier == 300
    assert now.answers == len(second.runs) + 300
    again, third = journal_in(tmp_path), FakeStage()
    assert run_modes(KeptStage(third, again, TimeGiven(None)), {0.0: CHOSEN}, ignore) == rows
    assert (third.runs, again.answers - again.earlier) == ([], 0)


def test_a_sitting_ends_with_its_time_and_keeps_what_it_has(tmp_path: Path) -> None:
    stage = FakeStage()
    with pytest.raises(OutOfTimeError, match="the same command goes on"):
        run_modes(KeptStage(stage, journal_in(tmp_path), TimeGiven(1e-9)), {0.0: CHOSEN}, ignore)
    assert stage.runs == []


def test_the_prompts_are_those_of_the_first_sitting(tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    assert read_kept(file, dict[float, Chosen]) is None
    write_kept(file, {0.0: CHOSEN, 0.6: CHOSEN})
    assert read_kept(file, dict[float, Chosen]) == {0.0: CHOSEN, 0.6: CHOSEN}
    file.write_text('{"0.0": ')
    with pytest.raises(UserError, match="give another --work"):
        read_kept(file, dict[float, Chosen])
