"""Tests of wait policies: whether a round waits for one more draft step."""

import numpy as np
import pytest

from ssd_serve.verifier.control.budget import NodeChoice
from ssd_serve.verifier.control.wait import CostBasedWait, FixedSteps, RoundEstimate, WaitPolicy


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


def test_no_wait_without_leaves_or_step_time() -> None:
    policy = CostBasedWait()
    assert not policy.should_wait(estimate(step_s=0.0))
    assert not policy.should_wait(estimate(leaves=()))
    assert policy.should_wait(estimate(steps=2))


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


def test_gain_of_a_step_follows_waits_and_returns_to_its_prior() -> None:
    policy = CostBasedWait()
    for added, gain in ((0.2, 0.2), (-2.0, 0.0), (5.0, 1.0)):
        for _ in range(80):
            policy.observe(estimate(rate=0.0), estimate(rate=0.0, tokens=1.0 + added), 0.002)
        assert policy.gain == pytest.approx(gain, abs=0.01)
    for _ in range(400):
        policy.should_wait(estimate(step_s=1.0))
    assert policy.gain == pytest.approx(0.6, abs=0.01)


def test_concurrent_growth_may_have_been_half_done() -> None:
    policy = CostBasedWait(concurrent=True)
    for _ in range(80):
        policy.observe(estimate(rate=0.0), estimate(rate=0.0, tokens=1.3), 0.001)
    assert policy.gain == pytest.approx(0.6, abs=0.01)


def test_fixed_wait_policies() -> None:
    assert not WaitPolicy().should_wait(estimate())
    policy = FixedSteps(2)
    assert [policy.should_wait(estimate(steps=steps)) for steps in range(4)] == [True, True, False, False]
    assert not policy.should_wait(estimate(leaves=()))
    policy.observe(estimate(), estimate(), 0.002)
    WaitPolicy().observe(estimate(), estimate(), 0.002)
