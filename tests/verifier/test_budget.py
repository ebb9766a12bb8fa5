"""The budget equals trying every number of nodes; the averages behind it follow what is measured."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from ssd_serve.verifier.control.budget import GrowthGain, Rate, choose

REACHES = st.lists(st.floats(0.0, 1.0), max_size=20).map(lambda values: sorted(values, reverse=True))
STEPS = st.lists(st.floats(0.0, 0.01), min_size=1, max_size=30)


def value(tokens: float, seconds: float, rate: float) -> float:
    return tokens - rate * seconds if rate > 0 else tokens / max(seconds, 1e-9)


@given(REACHES, STEPS, st.integers(1, 12), st.sampled_from([0.0, 10.0, 100.0, 1000.0]))
def test_it_chooses_what_trying_everything_chooses(
    reaches: list[float], steps: list[float], roots: int, rate: float
) -> None:
    most = min(len(reaches), len(steps))
    seconds = np.cumsum(np.array([0.01, *steps[:most]], dtype=np.float64))
    choice = choose(np.array(reaches), roots, seconds, rate)
    possible = [value(roots + sum(reaches[:nodes]), float(seconds[nodes]), rate) for nodes in range(most + 1)]
    assert 0 <= choice.nodes <= most
    assert possible[choice.nodes] == pytest.approx(max(possible))
    assert value(choice.tokens, choice.seconds, rate) == pytest.approx(max(possible))


def test_free_rows_are_all_taken_and_dear_ones_not() -> None:
    reaches = np.array([0.9, 0.5, 0.1, 0.01])
    assert choose(reaches, 1, np.full(5, 0.02), 50.0).nodes == 4
    assert choose(reaches, 1, np.array([0.02, 0.04, 0.06, 0.08, 0.1]), 50.0).nodes == 0
    middle = np.array([0.02, 0.024, 0.028, 0.032, 0.036])  # a row is worth 0.2 tokens at 50 tokens a second
    assert choose(reaches, 1, middle, 50.0).nodes == 2


def test_a_latency_target_comes_before_the_rate() -> None:
    reaches = np.array([0.9, 0.5, 0.4])
    seconds = np.array([0.020, 0.030, 0.050, 0.051])
    assert choose(reaches, 1, seconds, 10.0).nodes == 3
    assert choose(reaches, 1, seconds, 10.0, max_tpot_s=0.018).nodes == 1  # 15.8 ms a token
    assert choose(reaches, 1, seconds, 10.0, max_tpot_s=0.001).nodes == 1  # none fits: the shortest
    assert choose(reaches, 1, seconds, 10.0, max_tpot_s=0.019).nodes == 3  # 18.2 ms a token


def test_nothing_to_choose_from() -> None:
    assert choose(np.array([]), 3, np.full(1, 0.02), 0.0).nodes == 0
    assert choose(np.array([0.5]), 0, np.full(1, 0.02), 0.0).nodes == 0


def test_the_rate_is_unknown_then_scales_with_the_requests() -> None:
    rate = Rate()
    assert rate.value(4) == 0.0
    rate.observe(0, 5.0, 1.0)
    rate.observe(2, 5.0, 0.0)
    assert rate.value(4) == 0.0
    rate.observe(2, 4.0, 0.1)
    assert rate.value(1) == pytest.approx(20.0)
    assert rate.value(3) == pytest.approx(60.0)


def test_the_rate_follows_and_a_pause_hardly_counts() -> None:
    rate = Rate()
    rate.observe(1, 2.0, 0.1)
    rate.observe(1, 2.0, 1000.0)
    assert rate.value(1) == pytest.approx(2.0 / 0.11)
    for _ in range(200):
        rate.observe(1, 3.0, 0.1)
    assert rate.value(1) == pytest.approx(30.0, rel=0.01)


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(-2.0, 5.0)), max_size=40))
def test_the_gain_of_growing_stays_sensible(observed: list[tuple[float, float]]) -> None:
    gain = GrowthGain()
    for leaves, added in observed:
        gain.observe(leaves, added)
        gain.forget()
    assert 0.04 <= gain.share <= 1.5
    assert gain.expected(np.array([])) == 0.0
    assert gain.expected(np.array([0.5, 0.25])) == pytest.approx(0.75 * gain.share)


def test_the_gain_follows_what_waiting_brought() -> None:
    gain = GrowthGain(share=0.6)
    for _ in range(80):
        gain.observe(1.0, 0.2)
    assert gain.share == pytest.approx(0.2, abs=0.01)
    for _ in range(400):
        gain.forget()
    assert gain.share == pytest.approx(0.6, abs=0.01)
