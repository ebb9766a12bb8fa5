"""Tests of the mode controller: it finds the fastest mode at little cost."""

import math
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from ssd_serve.verifier.control.load_bucket import RegressionTracker, RoundTimeTrend
from ssd_serve.verifier.control.mode_controller import ModeController
from tests.examples import examples

PLAIN_S = 0.002


class Simulation:
    def __init__(self, speedup: float, requests: int = 1, seed: int = 0, inline: float | None = None) -> None:
        self.speedups = {"beside": speedup, "plain": 1.0}
        if inline is not None:
            self.speedups = {"beside": speedup, "inline": inline, "plain": 1.0}
        self.controller = ModeController(tuple(self.speedups))
        self.requests = requests
        self.random = random.Random(seed)
        self.tokens = 0.0
        self.seconds = 0.0
        self.speculated = 0

    def round(self) -> str:
        mode = self.controller.choose(self.requests)
        tokens, seconds = self.requests, PLAIN_S
        if mode != "plain":
            tokens = sum(self.random.choice((1, 2, 3, 4)) for _ in range(self.requests))
            seconds = PLAIN_S * 2.5 / self.speedups[mode]
        seconds *= self.random.uniform(0.9, 1.1)
        self.controller.observe(tokens / self.requests * PLAIN_S, seconds, PLAIN_S)
        self.tokens += tokens
        self.seconds += seconds
        self.speculated += mode != "plain"
        return mode

    def run(self, rounds: int) -> float:
        """Run rounds, and return their tokens per second as a multiple of plain decoding."""
        tokens, seconds = self.tokens, self.seconds
        for _ in range(rounds):
            self.round()
        return (self.tokens - tokens) / (self.seconds - seconds) * PLAIN_S / self.requests


@pytest.mark.parametrize(("speedup", "requests"), [(0.4, 1), (0.95, 5), (1.2, 1), (2.0, 32)])
def test_controller_is_hardly_slower_than_the_better_mode(speedup: float, requests: int) -> None:
    simulation = Simulation(speedup, requests)
    simulation.run(400)
    assert simulation.run(5000) > 0.96 * max(1.0, speedup)
    assert speedup < 2.0 or simulation.speculated == 5400, "a clear lead is not interrupted"


@pytest.mark.parametrize(("beside", "inline"), [(1.5, 2.0), (0.7, 0.8), (1.3, 0.5)])
def test_best_of_three_modes_is_found(beside: float, inline: float) -> None:
    simulation = Simulation(beside, inline=inline)
    simulation.run(3000)
    assert simulation.run(5000) > 0.95 * max(1.0, beside, inline)


def test_change_of_the_better_mode_is_noticed() -> None:
    simulation = Simulation(0.5)
    simulation.run(3000)
    assert simulation.speculated < 300
    simulation.controller.observe(2 * PLAIN_S, 100.0, PLAIN_S)  # a pause
    simulation.speedups["beside"] = 1.6
    simulation.run(30000)
    assert simulation.run(2000) > 1.5
    simulation.speedups["beside"] = 0.6
    simulation.run(400)
    assert simulation.run(4000) > 0.95


def test_loads_are_judged_separately() -> None:
    simulation = Simulation(2.0)
    simulation.run(500)
    loaded = Simulation(0.5, requests=32)
    loaded.controller = simulation.controller
    loaded.run(400)
    assert simulation.controller.choose(1) == "beside"
    assert simulation.controller.choose(32) == "plain"
    assert simulation.controller.choose(64) == "plain", "a new load starts like the nearest"
    assert simulation.controller.choose(2) == "beside"
    gains = simulation.controller.gains()
    assert gains[1]["beside"] > 1.5
    assert gains[32]["beside"] < 0.7 < gains[32]["plain"]


def test_loaded_gains_choose_the_first_mode_until_measured() -> None:
    simulation = Simulation(2.0)
    assert simulation.controller.choose(1) == "beside"
    simulation.controller.load_prior({1: {"beside": 0.5, "plain": 1.0, "unknown": 9.0}})
    assert simulation.controller.choose(1) == "plain"
    simulation.run(3000)
    assert simulation.controller.choose(1) == "beside"


def test_load_near_a_bucket_edge_does_not_switch_modes() -> None:
    controller = ModeController(("beside", "plain"))
    controller.load_prior({8: {"beside": 2.0, "plain": 1.0}, 16: {"beside": 0.5, "plain": 1.0}})
    chosen = [controller.choose(requests) for requests in (16, 12, 10, 16, 9, 13, 11, 10) * 20]
    assert set(chosen) == {"plain"}
    assert [controller.choose(8) for _ in range(40)][-1] == "beside"
    assert [controller.choose(requests) for requests in (9, 14, 13, 12) * 20][-1] == "beside"


def test_first_prefill_of_a_burst_keeps_the_mode() -> None:
    controller = ModeController(("beside", "plain"))
    controller.load_prior({1: {"beside": 2.0, "plain": 1.0}, 4: {"beside": 0.5, "plain": 1.0}})
    assert controller.choose(4) == "plain"
    assert controller.choose(1, decoding=False) == "plain"
    assert controller.choose(4) == "plain"
    assert controller.choose(1) == "beside"
    assert controller.choose(4, decoding=False) == "plain"


def test_mode_is_left_if_it_slows_many_rounds_with_prefill() -> None:
    simulation, read = Simulation(1.15), 4 * PLAIN_S
    simulation.controller.load_prior({1: {"beside": 1.0, "plain": 1.3}})
    while simulation.round() == "plain":
        simulation.controller.observe(read, read, read, prefill=True)
    simulation.run(200)
    while simulation.round() != "beside":
        pass
    simulation.controller.observe(read, 3 * read, read, prefill=True)
    assert [simulation.round() for _ in range(64)].count("beside") > 48
    for _ in range(4000):
        slow = 1.5 if simulation.round() == "beside" else 1.0
        simulation.controller.observe(read, slow * read, read, prefill=True)
    assert simulation.controller.choose(1) == "plain"


def test_forecast_prefill_slowdown_keeps_a_mode_from_starting() -> None:
    gains = {"inline": 1.2, "plain": 1.0}

    def chosen(prefill: int) -> str:
        controller = ModeController(tuple(gains))
        controller.forecast = lambda _: gains
        controller.prefill_slowdown = {"inline": 1.4, "plain": 1.0}.__getitem__
        controller.load_prior({8: {"inline": 0.9, "plain": 1.0}})
        for _ in range(64):
            mode = controller.choose(8)
            controller.observe(PLAIN_S, PLAIN_S / gains[mode], PLAIN_S)
            for _ in range(prefill if mode == "plain" else 0):
                controller.observe(4 * PLAIN_S, 4 * PLAIN_S, 4 * PLAIN_S, prefill=True)
        return controller.choose(8)

    assert chosen(prefill=0) == "inline"
    assert chosen(prefill=2) == "plain"


def test_mode_that_would_start_too_late_is_not_started() -> None:
    gains = {"beside": 1.5, "plain": 1.0}
    controller = ModeController(tuple(gains))
    controller.load_prior({1: gains, 16: {"beside": 0.5, "plain": 1.0}})
    remaining_benefit = {"beside": 0.4, "plain": 1.0}
    controller.remaining_benefit = remaining_benefit.__getitem__

    def rounds(requests: int) -> set[str]:
        modes = set[str]()
        for _ in range(40):
            mode = controller.choose(requests)
            controller.observe(PLAIN_S, PLAIN_S / gains[mode], PLAIN_S)
            modes.add(mode)
        return modes

    assert rounds(16) == {"plain"}
    assert rounds(1) == {"plain"}
    assert not controller.exploring
    remaining_benefit["beside"] = 0.9
    assert "beside" in rounds(1)
    remaining_benefit["beside"] = 0.1
    assert rounds(1) == {"beside"}, "it runs already"


QUIET = {"beside": 1.9, "inline": 1.6, "plain": 1.0}
CORE_LOST = {"beside": 1.5, "inline": 0.5, "plain": 0.4}
"""Speeds on two cores when another process uses one, and threads wait for the slower core."""


class ForecastSimulation(Simulation):
    def __init__(self, speedups: dict[str, float], seed: int, error: float = 0.0) -> None:
        super().__init__(0.0, seed=seed, inline=0.0)
        self.speedups = speedups
        noise = random.Random(seed)
        is_forecast = {mode: gain * (1 + noise.uniform(-error, error)) for mode, gain in speedups.items()}
        self.controller.forecast = lambda requests: is_forecast

    def efficiency(self, rounds: int) -> float:
        """Run rounds, and return the time of the best mode divided by that of the chosen modes, without noise."""
        best = max(self.speedups.values())
        return rounds / sum(best / self.speedups[self.round()] for _ in range(rounds))


@pytest.mark.parametrize("speedups", [QUIET, CORE_LOST, {"beside": 1.5, "inline": 2.0, "plain": 1.0}])
def test_first_rounds_are_nearly_as_fast_as_the_best_mode(
    speedups: dict[str, float],
) -> None:
    found = [ForecastSimulation(speedups, seed, error=0.1).efficiency(400) for seed in range(6)]
    assert sum(found) / len(found) > 0.97
    assert min(found) > 0.9


@given(
    st.lists(
        st.tuples(st.integers(0, 70), st.integers(0, 9), st.floats(0, 10), st.floats(0, 1)), max_size=200
    )
)
@settings(max_examples=examples(50))
def test_any_observations_leave_a_valid_mode(seen: list[tuple[int, int, float, float]]) -> None:
    controller = ModeController(("beside", "inline", "plain"))
    for requests, tokens, seconds, plain_s in seen:
        controller.observe(tokens, seconds, plain_s)
        assert controller.choose(requests) in ("beside", "inline", "plain")


def test_round_time_trend_returns_a_lasting_change_of_log_time() -> None:
    trend = RoundTimeTrend()
    assert not any(trend.observe(2.0) for _ in range(300))
    assert trend.observe(500.0) == 0.0, "one long round is no change"
    assert not any(trend.observe(2.0) for _ in range(100))
    changes = [trend.observe(4.0) for _ in range(40)]
    assert max(changes) == pytest.approx(math.log(2.0), abs=0.45)
    assert sum(change != 0 for change in changes) <= 2


def after(regression: RegressionTracker, rounds: int, own: bool = False) -> RegressionTracker:
    for _ in range(rounds):
        regression.observe(own)
    return regression


def test_regressed_mode_is_retried_after_twice_as_many_rounds() -> None:
    regression, waited = RegressionTracker(2.0), [0, 0]
    for attempt in range(2):
        while not regression.should_retry(0.9, 1.0):
            after(regression, 1)
            waited[attempt] += 1
    assert 0 < waited[0] <= 100
    assert waited[1] == 2 * waited[0]
    regression = after(RegressionTracker(2.0), 1)
    regression.retry_soon()  # another mode speeds up
    assert regression.should_retry(0.5, 1.0)
    assert not regression.should_retry(0.5, 1.0)


def test_regression_ends_by_recovery_or_after_many_rounds() -> None:
    regression = after(RegressionTracker(2.0), 100, own=True)
    assert regression.has_recovered(1.9)
    assert not regression.has_recovered(1.2)
    assert after(regression, 1000, own=True).has_recovered(1.2)


@pytest.mark.parametrize(("rounds", "disturbed"), [(50, 0.8), (500, 0.5)])
def test_disturbed_drafting_resumes_soon(rounds: int, disturbed: float) -> None:
    late = 0
    for seed in range(5):
        simulation = ForecastSimulation(QUIET, seed)
        simulation.run(1000)
        simulation.speedups = {"beside": disturbed, "inline": 0.75 * disturbed, "plain": 1.0}
        simulation.run(rounds)
        simulation.speedups = QUIET
        drafted = [simulation.round() != "plain" for _ in range(rounds + 400)]
        late += not all(drafted[-100:])
    assert late <= 1
