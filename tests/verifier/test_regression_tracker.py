"""A way to draft that is slow for a moment runs again soon after it."""

import math
import random

import pytest

from ssd_serve.verifier.control.load_bucket import RegressionTracker, RoundTimeTrend
from ssd_serve.verifier.control.mode_controller import ModeController

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


def test_regressed_mode_is_retried_when_another_speeds_up() -> None:
    regression = after(RegressionTracker(2.0), 1)
    regression.retry_soon()
    assert regression.should_retry(0.5, 1.0)
    assert not regression.should_retry(0.5, 1.0)


def test_regression_ends_by_recovery_or_after_many_rounds() -> None:
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
def test_disturbed_drafting_resumes_soon(rounds: int, disturbed: float) -> None:
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
