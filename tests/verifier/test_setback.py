"""A way to draft that is slow for a moment runs again soon after it."""

import math
import random

import pytest

from ssd_serve.verifier.control.mode_controller import ModeController
from ssd_serve.verifier.control.load_bucket import RoundTimeTrend, RegressionTracker

PLAIN_S = 0.02
QUIET = {"beside": 1.9, "inline": 1.6, "plain": 1.0}


def test_a_pace_tells_by_how_much_rounds_take_longer() -> None:
    trend = RoundTimeTrend()
    assert not any(trend.observe(2.0) for _ in range(500))
    changes = [trend.observe(4.0) for _ in range(40)]
    assert max(changes) == pytest.approx(math.log(2.0), abs=0.45)
    assert sum(change != 0 for change in changes) <= 2


def test_one_long_round_is_no_change_of_pace() -> None:
    trend = RoundTimeTrend()
    for _ in range(200):
        trend.observe(2.0)
    assert trend.observe(500.0) == 0.0


def after(regression: RegressionTracker, rounds: int, own: bool = False) -> RegressionTracker:
    for _ in range(rounds):
        regression.observe(own)
    return regression


def test_it_is_tried_again_after_a_while_and_then_after_twice_that() -> None:
    regression = RegressionTracker(2.0)
    waited = [0, 0]
    for explores in range(2):
        while not regression.should_retry(0.9, 1.0):
            after(regression, 1)
            waited[explores] += 1
    assert 0 < waited[0] <= 100
    assert waited[1] == 2 * waited[0]


def test_it_is_tried_more_rarely_where_that_costs_more_than_it_may_bring() -> None:
    assert after(RegressionTracker(2.0), 200).should_retry(1.2, 1.5)
    assert not after(RegressionTracker(2.0), 200).should_retry(0.3, 1.5)


def test_it_is_not_tried_where_another_gives_as_much_as_it_ever_gave() -> None:
    assert not after(RegressionTracker(1.4), 10_000).should_retry(1.0, 1.5)


def test_it_is_tried_again_where_what_it_gave_lately_is_forgotten() -> None:
    assert after(RegressionTracker(2.0), 100).should_retry(0.0, 1.5)


def test_it_is_tried_at_once_when_another_way_is_faster_again() -> None:
    regression = after(RegressionTracker(2.0), 1)
    regression.retry_soon()
    assert regression.should_retry(0.5, 1.0)
    assert not regression.should_retry(0.5, 1.0)


def test_it_is_over_when_the_way_gives_again_what_it_gave_or_runs_for_long_without() -> None:
    regression = after(RegressionTracker(2.0), 100, own=True)
    assert regression.has_recovered(1.9)
    assert not regression.has_recovered(1.2)
    assert after(regression, 1000, own=True).has_recovered(1.2)


def round_of(controller: ModeController[str], gains: dict[str, float], noise: random.Random) -> str:
    mode = controller.choose(1)
    tokens = 1 if mode == "plain" else noise.choice((1, 2, 3, 4))
    seconds = PLAIN_S * (1.0 if mode == "plain" else 2.5) / gains[mode]
    controller.observe(tokens * PLAIN_S, seconds * noise.uniform(0.9, 1.1), PLAIN_S)
    return mode


@pytest.mark.parametrize("rounds", [50, 150, 500])
@pytest.mark.parametrize("disturbed", [0.5, 0.8])
def test_drafts_that_were_disturbed_run_again_soon_where_plain_decoding_never_was(
    rounds: int, disturbed: float
) -> None:
    late = 0
    for seed in range(12):
        controller, noise = ModeController(tuple(QUIET)), random.Random(seed)
        controller.forecast = lambda _: QUIET
        for _ in range(1000):
            round_of(controller, QUIET, noise)
        for _ in range(rounds):
            round_of(controller, {"beside": disturbed, "inline": 0.75 * disturbed, "plain": 1.0}, noise)
        drafted = [round_of(controller, QUIET, noise) != "plain" for _ in range(rounds + 400)]
        late += not all(drafted[-100:])
    assert late <= 1


def test_a_way_that_stays_slow_costs_little() -> None:
    controller, noise = ModeController(tuple(QUIET)), random.Random(3)
    controller.forecast = lambda _: QUIET
    for _ in range(1000):
        round_of(controller, QUIET, noise)
    slow = {"beside": 0.5, "inline": 0.4, "plain": 1.0}
    modes = [round_of(controller, slow, noise) for _ in range(5000)]
    assert modes[1000:].count("plain") > 0.97 * 4000
