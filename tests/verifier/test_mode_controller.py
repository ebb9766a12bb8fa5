"""Tests of the mode controller: it finds the fastest mode at little cost."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from ssd_serve.verifier.control.mode_controller import ModeController

PLAIN_S = 0.002


class World:
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


@pytest.mark.parametrize("requests", [1, 5, 32])
@pytest.mark.parametrize("speedup", [0.4, 0.6, 0.8, 0.95, 1.05, 1.2, 2.0])
def test_controller_is_hardly_slower_than_the_better_mode(speedup: float, requests: int) -> None:
    world = World(speedup, requests)
    world.run(400)
    assert world.run(10000) > 0.96 * max(1.0, speedup)


@pytest.mark.parametrize(
    ("beside", "inline"), [(1.5, 2.0), (2.0, 1.5), (0.7, 0.8), (0.8, 1.3), (1.3, 0.5), (1.2, 1.2)]
)
def test_best_of_three_modes_is_found(beside: float, inline: float) -> None:
    world = World(beside, inline=inline)
    world.run(3000)
    assert world.run(10000) > 0.95 * max(1.0, beside, inline)


def test_a_clear_lead_is_not_disturbed_to_try_plain_decoding() -> None:
    world = World(2.0)
    world.run(5000)
    assert world.speculated == 5000


def test_change_of_the_better_mode_is_noticed() -> None:
    world = World(0.5)
    world.run(3000)
    assert world.speculated < 300
    world.speedups["beside"] = 1.6
    world.run(30000)
    assert world.run(2000) > 1.5
    world.speedups["beside"] = 0.6
    world.run(400)
    assert world.run(4000) > 0.95


def test_levels_of_load_are_judged_apart() -> None:
    world = World(2.0)
    world.run(500)
    crowded = World(0.5, requests=32)
    crowded.controller = world.controller
    crowded.run(400)
    assert world.controller.choose(1) == "beside"
    assert world.controller.choose(32) == "plain"
    assert world.controller.choose(2) == "beside"
    gains = world.controller.gains()
    assert gains[1]["beside"] > 1.5
    assert gains[32]["beside"] < 0.7 < gains[32]["plain"]


def test_a_new_process_begins_with_what_an_earlier_one_found() -> None:
    world = World(0.7)
    world.run(3000)
    later = World(0.7)
    assert later.controller.choose(1) == "beside"
    later.controller.load_prior(world.controller.gains())
    assert later.controller.choose(1) == "plain"
    assert later.run(300) > 0.98


def test_measured_gains_replace_loaded_ones() -> None:
    world = World(2.0)
    world.controller.load_prior({1: {"beside": 0.5, "plain": 1.0, "unheard of": 9.0}})
    assert world.controller.choose(1) == "plain"
    world.run(3000)
    assert world.controller.choose(1) == "beside"


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


def test_a_level_that_is_new_begins_like_the_nearest() -> None:
    world = World(0.5, requests=16)
    world.run(400)
    assert world.controller.choose(32) == "plain"
    assert world.controller.choose(1) == "plain"


def test_mode_that_slows_prefill_too_much_is_left() -> None:
    world = World(1.2)
    for _ in range(4000):
        slow = 1.5 if world.round() == "beside" else 1.0
        world.controller.observe(4 * PLAIN_S, slow * 4 * PLAIN_S, 4 * PLAIN_S, prefill=True)
    assert world.controller.choose(1) == "plain"


def test_one_slow_prefill_round_does_not_end_a_mode() -> None:
    world, read = World(1.15), 4 * PLAIN_S
    world.controller.load_prior({1: {"beside": 1.0, "plain": 1.3}})
    while world.round() == "plain":
        world.controller.observe(read, read, read, prefill=True)
    world.run(200)
    while world.round() != "beside":
        pass
    world.controller.observe(read, 3 * read, read, prefill=True)
    assert [world.round() for _ in range(64)].count("beside") > 48


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
    assert rounds(1) == {"beside"}, "it is there already"


QUIET = {"beside": 1.9, "inline": 1.6, "plain": 1.0}
CORE_LOST = {"beside": 1.5, "inline": 0.5, "plain": 0.4}
"""Speeds on two cores when another process takes one, and threads wait for the slower core."""


class ForeseenWorld(World):
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
    found = [ForeseenWorld(speedups, seed, error=0.1).efficiency(400) for seed in range(12)]
    assert sum(found) / len(found) > 0.97
    assert min(found) > 0.9


def test_modes_forecast_far_below_the_best_are_not_tried() -> None:
    world = ForeseenWorld(QUIET, seed=1)
    assert {world.round() for _ in range(1000)} == {"beside"}


def test_low_acceptance_of_one_text_does_not_switch_modes() -> None:
    """Forty rounds yield two thirds of the earlier tokens in the same time."""
    gains = {"beside": 1.6, "inline": 1.75, "plain": 1.0}
    world = ForeseenWorld(gains, seed=1)
    world.run(100)
    modes = {"inline"}
    for _ in range(40):
        modes.add(mode := world.controller.choose(1))
        world.controller.observe(2.5 * 0.67 * PLAIN_S, 2.5 / gains[mode] * PLAIN_S, PLAIN_S)
    assert modes == {"inline"}


@pytest.mark.parametrize("seed", range(4))
def test_a_core_that_is_lost_for_a_while_costs_little(seed: int) -> None:
    world = ForeseenWorld({"beside": 1.5, "inline": 2.0, "plain": 1.0}, seed)
    world.run(1000)
    world.speedups = CORE_LOST
    began = world.seconds
    while world.round() != "beside":
        assert world.seconds - began < 1.0  # virtual time
    assert world.efficiency(1000) > 0.97


def test_one_long_pause_changes_nothing() -> None:
    world = World(1.6)
    world.run(500)
    world.controller.observe(2 * PLAIN_S, 100.0, PLAIN_S)
    world.run(200)
    assert world.controller.choose(1) == "beside"


@given(
    st.lists(
        st.tuples(st.integers(0, 70), st.integers(0, 9), st.floats(0, 10), st.floats(0, 1)), max_size=200
    )
)
@settings(max_examples=50)
def test_nothing_that_is_seen_breaks_it(seen: list[tuple[int, int, float, float]]) -> None:
    controller = ModeController(("beside", "inline", "plain"))
    for requests, tokens, seconds, plain_s in seen:
        controller.observe(tokens, seconds, plain_s)
        assert controller.choose(requests) in ("beside", "inline", "plain")
