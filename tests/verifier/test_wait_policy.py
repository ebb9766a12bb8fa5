"""Verify now, or grow first."""

import numpy as np

from ssd_serve.verifier.control.budget import CostBasedWait, FixedSteps, NodeChoice, NoWait, RoundEstimate


def estimate(
    leaves: tuple[float, ...] = (1.0,),
    rate: float = 50.0,
    step_s: float = 0.002,
    steps: int = 0,
    tokens: float = 1.0,
    missed: int = 1,
) -> RoundEstimate:
    return RoundEstimate(NodeChoice(0, tokens, 0.02), np.array(leaves), rate, step_s, steps, missed)


def test_it_waits_where_the_gain_exceeds_the_price_of_the_time() -> None:
    policy = CostBasedWait()
    assert policy.should_wait(estimate(leaves=(1.0,)))  # 0.6 tokens for 0.1
    assert not policy.should_wait(estimate(leaves=(0.1, 0.05)))  # 0.09 tokens for 0.1
    assert not policy.should_wait(estimate(step_s=0.02))  # 0.6 tokens for 1


def test_concurrent_drafter_is_awaited_after_a_miss_only() -> None:
    policy = CostBasedWait(concurrent=True)
    assert not policy.should_wait(estimate(missed=0))
    assert policy.should_wait(estimate(missed=1))
    assert policy.should_wait(estimate(missed=0, steps=1))
    assert not policy.should_wait(estimate(missed=0))


def test_an_unknown_rate_is_the_rounds_own() -> None:
    assert CostBasedWait().should_wait(estimate(rate=0.0))
    assert not CostBasedWait().should_wait(estimate(rate=0.0, step_s=0.02))


def test_no_wait_without_leaves_or_step_time_or_beyond_the_limit() -> None:
    policy = CostBasedWait(max_steps=3)
    assert not policy.should_wait(estimate(step_s=0.0))
    assert not policy.should_wait(estimate(leaves=()))
    assert policy.should_wait(estimate(steps=2))
    assert not policy.should_wait(estimate(steps=3))


def test_it_learns_that_waiting_brings_little_and_tries_again_later() -> None:
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


def test_the_fixed_policies() -> None:
    assert not NoWait().should_wait(estimate())
    policy = FixedSteps(2)
    assert [policy.should_wait(estimate(steps=steps)) for steps in range(4)] == [True, True, False, False]
    assert not policy.should_wait(estimate(leaves=()))
    policy.observe(estimate(), estimate(), 0.002)
    NoWait().observe(estimate(), estimate(), 0.002)
