"""Tests of the budget: the number of nodes, and the rate behind it."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from ssd_serve.verifier.control.budget import Rate, choose

REACHES = st.lists(st.floats(0.0, 1.0), max_size=20).map(lambda values: sorted(values, reverse=True))
STEPS = st.lists(st.floats(0.0, 0.01), min_size=1, max_size=30)


def value(tokens: float, seconds: float, rate: float) -> float:
    return tokens - rate * seconds if rate > 0 else tokens / max(seconds, 1e-9)


@given(REACHES, STEPS, st.integers(1, 12), st.sampled_from([0.0, 10.0, 100.0, 1000.0]))
def test_budget_equals_trying_every_number_of_nodes(
    reaches: list[float], steps: list[float], roots: int, rate: float
) -> None:
    most = min(len(reaches), len(steps))
    seconds = np.cumsum(np.array([0.01, *steps[:most]], dtype=np.float64))
    choice = choose(np.array(reaches), roots, seconds, rate)
    possible = [value(roots + sum(reaches[:nodes]), float(seconds[nodes]), rate) for nodes in range(most + 1)]
    assert 0 <= choice.nodes <= most
    assert possible[choice.nodes] == pytest.approx(max(possible))
    assert value(choice.tokens, choice.seconds, rate) == pytest.approx(max(possible))


def test_budget_keeps_the_target_for_time_per_token() -> None:
    reaches = np.array([0.9, 0.5, 0.4])
    seconds = np.array([0.020, 0.030, 0.050, 0.051])
    assert choose(reaches, 1, seconds, 10.0).nodes == 3
    assert choose(reaches, 1, seconds, 10.0, max_tpot_s=0.018).nodes == 1  # 15.8 ms a token
    assert choose(reaches, 1, seconds, 10.0, max_tpot_s=0.001).nodes == 1  # none fits: the shortest
    assert choose(reaches, 1, seconds, 10.0, max_tpot_s=0.019).nodes == 3  # 18.2 ms a token


def test_budget_without_nodes_or_requests() -> None:
    assert choose(np.array([]), 3, np.full(1, 0.02), 0.0).nodes == 0
    assert choose(np.array([0.5]), 0, np.full(1, 0.02), 0.0).nodes == 0


def test_rate_scales_with_requests_and_follows_measurements() -> None:
    rate = Rate()
    assert rate.value(4) == 0.0
    rate.observe(0, 5.0, 1.0)
    rate.observe(2, 5.0, 0.0)
    assert rate.value(4) == 0.0
    rate.observe(2, 4.0, 0.1)
    assert rate.value(1) == pytest.approx(20.0)
    assert rate.value(3) == pytest.approx(60.0)
    rate.observe(2, 4.0, 1000.0)  # a pause hardly counts
    assert rate.value(1) == pytest.approx(2.0 / 0.11)
    for _ in range(200):
        rate.observe(1, 3.0, 0.1)
    assert rate.value(1) == pytest.approx(30.0, rel=0.01)


def test_forced_nodes_are_verified_whatever_they_cost() -> None:
    reaches, seconds = np.array([0.1, 0.05, 0.9]), np.array([0.01, 1.0, 2.0, 2.01])
    assert choose(reaches, 1, seconds, 50.0).nodes == 0
    assert choose(reaches, 1, seconds, 50.0, forced=2).nodes == 3
    assert choose(reaches, 1, seconds, 500.0, max_tpot_s=0.01, forced=2).nodes == 2
    assert choose(reaches, 1, seconds[:2], 50.0, forced=2).nodes == 1, "the cost table ends"
