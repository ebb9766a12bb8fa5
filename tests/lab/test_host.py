"""The benchmark of host time: its oracle makes every round full, and its figures are of full rounds only."""

import pytest

from lab.host.drafting import PARTS, measure_drafter
from lab.host.experiment import NODES_EACH, measure_rounds
from ssd_serve.bench.prompts import Prompt
from ssd_serve.bench.rig import Rig
from ssd_serve.engine_settings import EMBEDDED
from ssd_serve.messages import SamplingParameters
from ssd_serve.settings import Settings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig(Settings(target=EMBEDDED, draft=EMBEDDED))


def test_rounds_of_a_crowd_are_full_and_each_takes_some_time(rig: Rig) -> None:
    prompts = [Prompt("", tuple(range(10 + index, 40 + index)), index) for index in range(3)]
    sampling = SamplingParameters(temperature=0.8, max_tokens=40, ignore_eos=True)
    rounds = measure_rounds(rig, prompts, sampling)
    assert rounds.nodes == NODES_EACH * 3
    assert 4 <= len(rounds.host_s) <= 40 / 5 + 1  # an oracle's round commits its chain and the bonus token
    assert all(0 < seconds < 1 for seconds in rounds.host_s)


@pytest.mark.parametrize(("width", "times"), [(1, 1), (8, 2)])
def test_a_draft_step_is_measured_part_by_part_at_full_width(rig: Rig, width: int, times: int) -> None:
    figures = measure_drafter(rig, Prompt("", tuple(range(10, 60)), 3), 0.8, width, times)
    assert (figures["width"], figures["vocabulary"]) == (width, times * rig.draft.facts.vocabulary)
    assert isinstance(figures["steps"], int)
    assert figures["steps"] > 30
    parts = [figures[f"{part}_ms"] for part in ("forward", *PARTS)]
    assert all(isinstance(each, float) and each > 0 for each in parts)
