"""Which way to draft: the fastest runs, and finding out costs little."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from ssd_serve.verifier.control.mode_controller import ModeController

PLAIN_S = 0.002


class World:
    """Rounds whose ways give these multiples of plain decoding's tokens a second, with noise."""

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
        """Tokens a second over these rounds, as a multiple of plain decoding."""
        tokens, seconds = self.tokens, self.seconds
        for _ in range(rounds):
            self.round()
        return (self.tokens - tokens) / (self.seconds - seconds) * PLAIN_S / self.requests


@pytest.mark.parametrize("requests", [1, 5, 32])
@pytest.mark.parametrize("speedup", [0.4, 0.6, 0.8, 0.95, 1.05, 1.2, 2.0])
def test_it_is_hardly_slower_than_the_better_way(speedup: float, requests: int) -> None:
    world = World(speedup, requests)
    world.run(400)
    assert world.run(10000) > 0.96 * max(1.0, speedup)


@pytest.mark.parametrize(
    ("beside", "inline"), [(1.5, 2.0), (2.0, 1.5), (0.7, 0.8), (0.8, 1.3), (1.3, 0.5), (1.2, 1.2)]
)
def test_of_three_ways_it_finds_the_best(beside: float, inline: float) -> None:
    world = World(beside, inline=inline)
    world.run(3000)
    assert world.run(10000) > 0.95 * max(1.0, beside, inline)


def test_a_clear_lead_is_not_disturbed_to_try_plain_decoding() -> None:
    world = World(2.0)
    world.run(5000)
    assert world.speculated == 5000


def test_a_clear_lead_is_not_disturbed_soon_to_try_another_way_to_draft() -> None:
    world = World(2.0, inline=1.9)
    assert {world.round() for _ in range(250)} == {"beside"}
    world.run(200)
    assert world.run(2000) > 1.9


def test_it_notices_when_the_better_way_changes() -> None:
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


def test_what_is_recalled_gives_way_to_what_is_seen() -> None:
    world = World(2.0)
    world.controller.load_prior({1: {"beside": 0.5, "plain": 1.0, "unheard of": 9.0}})
    assert world.controller.choose(1) == "plain"
    world.run(3000)
    assert world.controller.choose(1) == "beside"


def test_a_load_that_moves_about_an_edge_does_not_change_the_way_each_time() -> None:
    controller = ModeController(("beside", "plain"))
    controller.load_prior({8: {"beside": 2.0, "plain": 1.0}, 16: {"beside": 0.5, "plain": 1.0}})
    chosen = [controller.choose(requests) for requests in (16, 12, 10, 16, 9, 13, 11, 10) * 20]
    assert set(chosen) == {"plain"}
    assert [controller.choose(8) for _ in range(40)][-1] == "beside"
    assert [controller.choose(requests) for requests in (9, 14, 13, 12) * 20][-1] == "beside"


def test_loads_of_a_power_of_two_lie_in_the_middle_of_their_level() -> None:
    controller = ModeController(("beside", "plain"))
    controller.load_prior({4: {"beside": 2.0, "plain": 1.0}, 8: {"beside": 0.5, "plain": 1.0}})
    assert {controller.choose(requests) for requests in (4, 3, 4, 5, 4, 3) * 20} == {"beside"}
    assert {controller.choose(requests) for requests in (8, 7, 6, 8, 9, 7) * 20} == {"plain"}


def test_the_first_prompt_of_a_burst_is_read_in_the_way_of_the_last() -> None:
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


@pytest.mark.parametrize("expected_s", [0.01, 0.1, 1.0])
def test_prompts_of_which_too_much_or_too_little_is_expected_favour_no_way(expected_s: float) -> None:
    world = World(1.5)
    for turn in range(4000):
        if (
            world.round() == "beside" and turn % 3 == 0
        ):  # more of them while one way runs than while the other
            world.controller.observe(expected_s, 0.1, expected_s, prefill=True)
    assert world.controller.choose(1) == "beside"


def test_a_way_that_slows_prompts_more_than_it_speeds_up_decoding_is_left() -> None:
    world = World(1.2)
    for _ in range(4000):
        slow = 1.5 if world.round() == "beside" else 1.0
        world.controller.observe(4 * PLAIN_S, slow * 4 * PLAIN_S, 4 * PLAIN_S, prefill=True)
    assert world.controller.choose(1) == "plain"


def test_one_slow_round_with_a_prompt_does_not_end_a_way() -> None:
    """It was descheduled, or read a text for the first time."""
    world, read = World(1.15), 4 * PLAIN_S
    world.controller.load_prior({1: {"beside": 1.0, "plain": 1.3}})
    while world.round() == "plain":
        world.controller.observe(read, read, read, prefill=True)
    world.run(200)
    while world.round() != "beside":
        pass
    world.controller.observe(read, 3 * read, read, prefill=True)
    assert [world.round() for _ in range(64)].count("beside") > 48


def test_what_slows_prompts_at_one_level_is_not_tried_for_them_at_another() -> None:
    gains = {"beside": 0.6, "inline": 1.15, "plain": 1.0}
    controller = ModeController(tuple(gains))
    controller.forecast = lambda _: gains

    def rounds(requests: int, number: int) -> list[str]:
        modes = list[str]()
        for _ in range(number):
            mode = controller.choose(requests)
            modes.append(mode)
            controller.observe(PLAIN_S, PLAIN_S / gains[mode], PLAIN_S)
            slow = 1.5 if mode == "inline" else 1.0
            controller.observe(9 * PLAIN_S, 9 * slow * PLAIN_S, 9 * PLAIN_S, prefill=True)
        return modes

    assert 0 < rounds(1, 600).count("inline") < 30
    assert rounds(16, 600).count("inline") == 0


def test_a_way_that_should_slow_prompts_is_not_begun_for_what_it_gives_in_decoding() -> None:
    gains = {"inline": 1.2, "plain": 1.0}

    def chosen(prefill: int) -> str:
        """With so many rounds that read prompts beside every decoding one."""
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


def tried(gives: float, is_forecast: float) -> list[int]:
    """For how many of 200 rounds with 1, 2 and 4 requests a way is tried that gives so much of plain
    decoding, where more was is_forecast."""
    gains, forecast = {"inline": gives, "plain": 1.0}, {"inline": is_forecast, "plain": 1.0}
    controller = ModeController(tuple(gains))
    controller.forecast = lambda _: forecast
    counts = list[int]()
    for requests in (1, 2, 4):
        modes = list[str]()
        for _ in range(200):
            modes.append(mode := controller.choose(requests))
            controller.observe(PLAIN_S, PLAIN_S / gains[mode], PLAIN_S)
        counts.append(modes.count("inline"))
    return counts


def test_what_falls_short_of_its_forecast_at_one_level_is_tried_less_at_the_next() -> None:
    first, second, third = tried(gives=0.85, is_forecast=1.6)
    assert third < second < 0.7 * first


def test_what_falls_short_of_any_forecast_is_tried_less_at_later_levels_on_the_whole() -> None:
    """Which of the later levels looks again is chance."""
    counts = [tried(gives=0.8, is_forecast=is_forecast / 10) for is_forecast in range(11, 31)]
    first, second, third = (sum(each) for each in zip(*counts, strict=True))
    assert max(second, third) < 0.7 * first


def test_a_way_that_begins_too_late_keeps_no_other_from_beginning() -> None:
    gains = {"beside": 0.6, "inline": 1.5, "plain": 1.0}
    controller = ModeController(tuple(gains))
    controller.forecast = lambda _: gains
    controller.remaining_benefit = {"beside": 1.0, "inline": 0.3, "plain": 1.0}.__getitem__
    for _ in range(64):
        mode = controller.choose(4)
        controller.observe(PLAIN_S, PLAIN_S / gains[mode], PLAIN_S)
    assert controller.choose(4) == "plain"


def test_a_way_that_begins_too_late_for_what_is_left_is_not_begun() -> None:
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


def test_a_level_does_not_begin_late_what_it_has_found_no_better() -> None:
    """It has changed nothing yet, since plain decoding has not led for long enough to be tried."""
    gains = {"beside": 1.0, "plain": 1.0}
    controller = ModeController(tuple(gains))
    controller.load_prior({1: {"beside": 1.0}, 16: {"beside": 0.5, "plain": 1.0}})
    controller.remaining_benefit = {"beside": 0.5, "plain": 1.0}.__getitem__
    assert controller.choose(16) == "plain"
    assert controller.choose(1) == "plain"


QUIET = {"beside": 1.9, "inline": 1.6, "plain": 1.0}
CORE_LOST = {"beside": 1.5, "inline": 0.5, "plain": 0.4}
"""Two cores, of which another process takes one: threads wait for the slower."""


class ForeseenWorld(World):
    """A new process whose start has measured what each way should give, some of it wrong."""

    def __init__(self, speedups: dict[str, float], seed: int, error: float = 0.0) -> None:
        super().__init__(0.0, seed=seed, inline=0.0)
        self.speedups = speedups
        noise = random.Random(seed)
        is_forecast = {mode: gain * (1 + noise.uniform(-error, error)) for mode, gain in speedups.items()}
        self.controller.forecast = lambda requests: is_forecast

    def efficiency(self, rounds: int) -> float:
        """The time of the best way over that of the ways that ran, without the luck of their rounds."""
        best = max(self.speedups.values())
        return rounds / sum(best / self.speedups[self.round()] for _ in range(rounds))


@pytest.mark.parametrize("speedups", [QUIET, CORE_LOST, {"beside": 1.5, "inline": 2.0, "plain": 1.0}])
def test_the_first_thousand_tokens_of_a_process_are_nearly_as_fast_as_the_best_way(
    speedups: dict[str, float],
) -> None:
    found = [ForeseenWorld(speedups, seed, error=0.1).efficiency(400) for seed in range(12)]
    assert sum(found) / len(found) > 0.97
    assert min(found) > 0.9


def test_ways_that_are_forecast_far_below_the_best_are_not_tried() -> None:
    world = ForeseenWorld(QUIET, seed=1)
    assert {world.round() for _ in range(1000)} == {"beside"}


def test_a_way_of_which_more_is_forecast_is_tried_though_all_that_draft_give_more_than_that() -> None:
    """Texts that are drafted better than was is_forecast are so in every way: what the running one gives beyond
    its forecast is no lead over the other."""
    world = ForeseenWorld({"beside": 2.2, "inline": 2.5, "plain": 1.0}, seed=1)
    is_forecast = {"beside": 1.47, "plain": 1.0}
    world.controller.forecast = lambda _: is_forecast
    assert {world.round() for _ in range(60)} == {"beside"}
    is_forecast["inline"] = 1.76  # its draft's step is known late
    assert "inline" in {world.round() for _ in range(70)}


def test_a_way_is_not_left_because_a_text_is_hard_to_draft() -> None:
    """Forty rounds give two thirds of what those before gave, in the time that those took."""
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


def test_a_stale_memory_is_left_where_it_is_wrong() -> None:
    world = ForeseenWorld(CORE_LOST, seed=2)
    world.controller.load_prior({1: {"beside": 1.0, "inline": 2.0, "plain": 1.0}})
    assert world.controller.choose(1) == "inline"
    world.run(60)
    assert world.efficiency(500) > 0.97


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
