"""Tests of the mode controller: forecasts of modes, and simulated rounds in which it finds the fastest mode."""

import random
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from ssd_serve.base.cost import CostTable, HostCost, Timing
from ssd_serve.verifier.acceptance import DraftedLevels
from ssd_serve.verifier.control.mode_controller import (
    DecodingLoad,
    DraftStep,
    ModeController,
    RunningTexts,
    forecast,
)
from ssd_serve.verifier.drafters.pool import SpeculationMode
from tests.examples import examples

ASYNC, SYNC, PLAIN = SpeculationMode.ASYNC, SpeculationMode.SYNC, SpeculationMode.PLAIN
ROWS = (1, 8, 64)


def table(step_s: float, row_s: float) -> CostTable:
    return CostTable([Timing(rows, 0, step_s + row_s * rows) for rows in ROWS])


def gains(
    requests: int = 1,
    one: float = 0.020,
    two: float = 0.012,
    row_s: float = 2e-4,
    draft_s: float = 0.002,
    acceptance: float = 0.7,
) -> dict[SpeculationMode, float]:
    alone = table(two, row_s / 2)
    costs = {ASYNC: table(one, row_s), SYNC: alone, PLAIN: alone}
    steps = {mode: DraftStep(draft_s, 16) for mode in (ASYNC, SYNC)}
    speeds = forecast(DecodingLoad(requests), costs, steps, HostCost(0.0), acceptance)
    return {mode: speed / speeds[PLAIN] for mode, speed in speeds.items()}


@pytest.mark.parametrize(
    ("found", "order"),
    [
        (gains(two=0.019), [ASYNC, SYNC, PLAIN]),  # a second core gains little
        (gains(two=0.010, draft_s=0.0005), [SYNC, ASYNC]),  # two cores are twice as fast
        (gains(acceptance=0.01), [PLAIN, SYNC]),
        (gains(acceptance=0.01), [PLAIN, ASYNC]),
        (gains(requests=32, row_s=2e-3), [PLAIN, SYNC]),
        (gains(requests=32, row_s=2e-3), [PLAIN, ASYNC]),
        (gains(draft_s=0.0), [PLAIN]),
    ],
)
def test_forecast_order_of_modes(found: dict[SpeculationMode, float], order: list[SpeculationMode]) -> None:
    assert found[PLAIN] == pytest.approx(1.0)
    assert [mode for mode in sorted(found, key=lambda each: -found[each]) if mode in order] == order


@given(
    st.integers(1, 64),
    st.floats(1e-4, 0.1),
    st.floats(1e-4, 0.1),
    st.floats(1e-5, 0.1),
    st.floats(0.01, 0.95),
)
@settings(max_examples=examples(50))
def test_forecast_rises_with_acceptance(
    requests: int, one: float, two: float, draft_s: float, acceptance: float
) -> None:
    low = gains(requests, one, two, draft_s=draft_s, acceptance=acceptance)
    high = gains(requests, one, two, draft_s=draft_s, acceptance=min(0.99, acceptance + 0.04))
    assert all(0 < low[mode] <= high[mode] * (1 + 1e-9) for mode in low)


def test_forecast_counts_kv_reads_of_long_contexts() -> None:
    """Saved rounds outweigh drafting at long contexts, because a round then mostly reads the KV cache."""
    cost = CostTable(
        [Timing(rows, read, 0.004 + (2e-6 + 1e-9 * rows) * read) for rows in ROWS for read in (0, 1024)]
    )
    steps = {SYNC: DraftStep(0.006, 16)}
    for load, pays in ((DecodingLoad(1, 0), False), (DecodingLoad(1, 20_000), True)):
        found = forecast(load, {SYNC: cost, PLAIN: cost}, steps, HostCost(0.0), 0.6)
        assert (found[SYNC] > found[PLAIN]) is pays


UNIT_S = 0.010
LEVELS = 4


@dataclass
class Simulation:
    """Rounds of texts with a given acceptance. `truth`: true speed of each mode as a multiple of its forecast."""

    truth: dict[SpeculationMode, float]
    requests: int = 1
    draft_s: float = 0.003
    prefill_s: float = 0.0
    seed: int = 7
    tokens: dict[SpeculationMode, float] = field(
        default_factory=lambda: dict.fromkeys((ASYNC, SYNC, PLAIN), 0.0)
    )

    def __post_init__(self) -> None:
        one, two = table(1.3 * UNIT_S, 2e-4), table(UNIT_S, 1e-4)
        self.costs = {ASYNC: one, SYNC: two, PLAIN: two}
        self.steps: dict[SpeculationMode, DraftStep] = {
            mode: DraftStep(self.draft_s, 16) for mode in (ASYNC, SYNC)
        }
        self.controller = ModeController(self.costs, HostCost(0.0))
        self.texts = 0
        self.random = random.Random(self.seed)
        self.all = DraftedLevels()
        self.levels = self.all.next_text()

    def speeds(self, acceptance: float) -> dict[SpeculationMode, float]:
        """True tokens a second of each mode."""
        load = DecodingLoad(self.requests)
        found = forecast(load, self.costs, self.steps, HostCost(0.0), acceptance)
        return {mode: self.truth[mode] * found[mode] for mode in found}

    def text(self, acceptance: float, rounds: int = 100) -> float:
        """Decode a text; return the speed as a multiple of the best mode's."""
        self.texts += 1
        self.levels = self.all.next_text()
        speeds = self.speeds(acceptance)
        all_tokens = all_s = 0.0
        numbers = tuple(range(self.texts, self.texts + self.requests))
        for _ in range(rounds):
            mode = self.controller.choose(numbers, self.running)
            tokens, levels = 1, 0
            while mode is not PLAIN and levels < LEVELS:
                levels += 1
                if self.random.random() > acceptance:
                    break
                tokens += 1
            mean = 1.0 if mode is PLAIN else sum(acceptance**level for level in range(LEVELS + 1))
            seconds = mean / speeds[mode] * self.random.uniform(0.8, 1.2)
            self.controller.observe(self.requests, tokens * self.requests, seconds)
            for each in (self.all, self.levels):
                each.observe(tokens - 1, levels, tokens)
            self.tokens[mode] += tokens
            all_tokens += tokens
            all_s += seconds
        return all_tokens / all_s / max(speeds.values())

    def running(self) -> RunningTexts:
        pending = dict.fromkeys(self.steps, self.prefill_s)
        levels = self.levels
        return RunningTexts(
            DecodingLoad(self.requests), levels.share, levels.hopeful, self.steps, 200.0, pending
        )


def mean(speeds: list[float]) -> float:
    return sum(speeds) / len(speeds)


RIGHT = {ASYNC: 1.0, SYNC: 1.0, PLAIN: 1.0}
WORSE = {ASYNC: 0.6, SYNC: 0.9, PLAIN: 1.0}
OTHER = {ASYNC: 1.5, SYNC: 0.7, PLAIN: 1.0}


@pytest.mark.parametrize("truth", [RIGHT, WORSE, OTHER])
@pytest.mark.parametrize("acceptance", [0.05, 0.4, 0.8])
@pytest.mark.parametrize("requests", [1, 16])
def test_controller_is_hardly_slower_than_the_best_mode(
    truth: dict[SpeculationMode, float], acceptance: float, requests: int
) -> None:
    for seed in (7, 8):
        simulation = Simulation(truth, requests, seed=seed)
        for _ in range(6):
            simulation.text(acceptance)
        assert mean([simulation.text(acceptance) for _ in range(40)]) > 0.97


def test_forecast_that_is_twice_too_high_costs_a_few_trials() -> None:
    simulation = Simulation({ASYNC: 0.5, SYNC: 0.5, PLAIN: 1.0})
    assert mean([simulation.text(0.4) for _ in range(60)]) > 0.9


@pytest.mark.parametrize("truth", [RIGHT, WORSE, OTHER])
def test_texts_of_different_acceptance_in_turn(truth: dict[SpeculationMode, float]) -> None:
    simulation = Simulation(truth)
    assert mean([simulation.text((0.2, 0.5, 0.8)[text % 3]) for text in range(60)]) > 0.94


def test_text_that_cannot_be_drafted_costs_little() -> None:
    simulation = Simulation(RIGHT)
    for _ in range(10):
        simulation.text(0.7)
    assert simulation.text(0.02, rounds=800) > 0.98
    for _ in range(10):
        simulation.text(0.02)
    assert mean([simulation.text(0.02) for _ in range(10)]) > 0.98


def test_disturbed_drafts_are_left_and_tried_again() -> None:
    simulation = Simulation(dict(RIGHT))
    for _ in range(10):
        simulation.text(0.7)
    simulation.truth = {ASYNC: 0.4, SYNC: 0.5, PLAIN: 1.0}
    assert mean([simulation.text(0.7) for _ in range(12)]) > 0.75
    simulation.truth = dict(RIGHT)
    for _ in range(24):
        simulation.text(0.7)
    assert mean([simulation.text(0.7) for _ in range(12)]) > 0.95


def test_prefill_of_drafters_must_pay_within_the_text() -> None:
    assert Simulation(RIGHT).text(0.7) > 0.8
    late = Simulation(RIGHT, prefill_s=10.0)
    late.text(0.7)
    assert {mode for mode, tokens in late.tokens.items() if tokens} <= {ASYNC, PLAIN}
    assert late.controller.choose((99,), late.running) is PLAIN or not late.tokens[SYNC]


def test_decisions_are_made_every_few_rounds_or_when_other_requests_run() -> None:
    simulation, asked = Simulation(RIGHT), list[int]()

    def texts() -> RunningTexts:
        asked.append(len(asked))
        return simulation.running()

    for numbers in [(1,)] * 4 + [(1, 2)] * 4:
        simulation.controller.choose(numbers, texts)
        simulation.controller.observe(1, 1, UNIT_S)
    assert len(asked) == 2
    for _ in range(16):
        simulation.controller.choose((1, 2), texts)
        simulation.controller.observe(2, 2, UNIT_S)
    assert 3 <= len(asked) <= 5
    simulation.controller.choose((), texts)
    assert len(asked) <= 5


def test_gains_are_multiples_of_plain_decoding_by_load() -> None:
    simulation = Simulation(RIGHT)
    simulation.text(0.8)
    gains = simulation.controller.gains[1]
    assert gains[PLAIN] == 1.0
    assert gains[SYNC] > 1.3
    mine, best = simulation.controller.current_gains()
    assert mine > 1.0 < best
