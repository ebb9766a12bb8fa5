"""Tests of the budget: the number of nodes, the averages behind it, and waits for growth."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from ssd_serve.verifier.control.budget import (
    CostBasedWait,
    FixedSteps,
    GrowthGain,
    NodeChoice,
    NoWait,
    Rate,
    RoundEstimate,
    choose,
)

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


def test_growth_gain_follows_the_results_of_waits() -> None:
    gain = GrowthGain(share=0.6)
    for _ in range(80):
        gain.observe(1.0, 0.2)
    assert gain.share == pytest.approx(0.2, abs=0.01)
    assert gain.expected(np.array([0.5, 0.25])) == pytest.approx(0.75 * gain.share)
    for _ in range(400):
        gain.forget()
    assert gain.share == pytest.approx(0.6, abs=0.01)
    for added, bound in ((-2.0, 0.05), (5.0, 1.5)):
        for _ in range(200):
            gain.observe(1.0, added)
        assert gain.share == pytest.approx(bound, abs=0.01)


def estimate(
    leaves: tuple[float, ...] = (1.0,),
    rate: float = 50.0,
    step_s: float = 0.002,
    steps: int = 0,
    tokens: float = 1.0,
    missed: int = 1,
) -> RoundEstimate:
    return RoundEstimate(NodeChoice(0, tokens, 0.02), np.array(leaves), rate, step_s, steps, missed)


def test_wait_if_the_gain_exceeds_the_cost_of_the_time() -> None:
    policy = CostBasedWait()
    assert policy.should_wait(estimate(leaves=(1.0,)))  # 0.6 tokens for 0.1
    assert not policy.should_wait(estimate(leaves=(0.1, 0.05)))  # 0.09 tokens for 0.1
    assert not policy.should_wait(estimate(step_s=0.02))  # 0.6 tokens for 1
    assert policy.should_wait(estimate(rate=0.0))  # an unknown rate is that of the round
    assert not policy.should_wait(estimate(rate=0.0, step_s=0.02))


def test_concurrent_drafter_is_awaited_after_a_miss_only() -> None:
    policy = CostBasedWait(concurrent=True)
    assert not policy.should_wait(estimate(missed=0))
    assert policy.should_wait(estimate(missed=1))
    assert policy.should_wait(estimate(missed=0, steps=1))
    assert not policy.should_wait(estimate(missed=0))


def test_no_wait_without_leaves_or_step_time_or_beyond_the_limit() -> None:
    policy = CostBasedWait(max_steps=3)
    assert not policy.should_wait(estimate(step_s=0.0))
    assert not policy.should_wait(estimate(leaves=()))
    assert policy.should_wait(estimate(steps=2))
    assert not policy.should_wait(estimate(steps=3))


def test_useless_waits_are_retried_later() -> None:
    policy = CostBasedWait()
    for _ in range(60):
        policy.observe(estimate(tokens=1.0), estimate(tokens=1.01), 0.002)
    hopeful = estimate(leaves=(0.8,), rate=100.0)
    assert not policy.should_wait(hopeful)
    rounds = 0
    while not policy.should_wait(hopeful):
        rounds += 1
        assert rounds < 1000


def rounds_until_awaited(policy: CostBasedWait, step_s: float, most: int = 500) -> int | None:
    for rounds in range(most):
        if policy.should_wait(estimate(step_s=step_s)):
            return rounds
    return None


def test_synchronous_drafter_that_seems_too_slow_is_tried_again() -> None:
    policy, a_third_too_slow = CostBasedWait(), 0.016  # 0.6 tokens for 0.8
    assert 20 < (rounds_until_awaited(policy, a_third_too_slow) or 0) < 40
    assert policy.should_wait(estimate(step_s=a_third_too_slow, steps=1))
    assert not policy.should_wait(estimate(step_s=a_third_too_slow, steps=2, leaves=(0.1,)))
    assert not policy.should_wait(estimate(step_s=a_third_too_slow))
    assert 20 < (rounds_until_awaited(policy, a_third_too_slow) or 0) < 40


def test_far_slower_or_concurrent_drafter_is_not_tried_again() -> None:
    assert rounds_until_awaited(CostBasedWait(), 0.03) is None  # 0.6 tokens for 1.5
    assert rounds_until_awaited(CostBasedWait(concurrent=True), 0.012) is None


def test_fixed_wait_policies() -> None:
    assert not NoWait().should_wait(estimate())
    policy = FixedSteps(2)
    assert [policy.should_wait(estimate(steps=steps)) for steps in range(4)] == [True, True, False, False]
    assert not policy.should_wait(estimate(leaves=()))
    policy.observe(estimate(), estimate(), 0.002)
    NoWait().observe(estimate(), estimate(), 0.002)
