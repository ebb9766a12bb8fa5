"""The budget: which nodes a round verifies, and whether to let the trees grow first.

Both decisions use the measured cost model: does the choice raise the expected committed tokens per second?
With a long-run rate of `r` tokens per second, a second is worth `r` tokens (renewal reward). A node is
verified if its reach exceeds `r` times the time that its row adds. Growth is awaited if the tokens that it
should add exceed `r` times the wait. Plain numpy; knows no models and no messages.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """Number of best nodes to verify, with the expected tokens and seconds of the round."""

    nodes: int
    tokens: float
    seconds: float
    held_back: bool = False
    """True if more nodes would pay but exceed the time per token."""


def choose(
    reaches: npt.NDArray[np.float64],
    roots: int,
    seconds: npt.NDArray[np.float64],
    rate: float,
    max_tpot_s: float = math.inf,
) -> NodeChoice:
    """Return the best number of nodes to verify in a round with `roots` roots.

    `reaches` [nodes] falls; `seconds` [most + 1], most <= nodes, is what the round takes with 0, 1, ... most
    nodes. `rate` is in tokens a second; 0 means unknown, then the round's own rate is maximised. Rounds in
    which a request's token takes longer than `max_tpot_s` are left out, unless all do: then the shortest is
    taken.
    """
    tokens = roots + np.concatenate(([0.0], np.cumsum(reaches[: len(seconds) - 1])))  # [most + 1]
    value = tokens - rate * seconds if rate > 0 else tokens / np.maximum(seconds, 1e-9)
    paying = 0
    if max_tpot_s < math.inf:
        paying = int(np.argmax(value))
        tpot_s = seconds * roots / np.maximum(tokens, 1e-9)
        kept = tpot_s <= max_tpot_s
        value = np.where(kept, value, -np.inf) if kept.any() else -tpot_s
    best = int(np.argmax(value))
    return NodeChoice(best, float(tokens[best]), float(seconds[best]), best < paying)


class Rate:
    """Long-run committed tokens a second, as an average that follows the number of decoding requests."""

    def __init__(self, memory: float = 0.05) -> None:
        self._memory = memory
        self._tokens_per_request = 0.0
        self._seconds = 0.0

    def observe(self, requests: int, tokens: float, seconds: float) -> None:
        """A round of `requests` decoding requests committed `tokens` tokens in `seconds`, waits included."""
        if requests == 0 or seconds <= 0:
            return
        each = tokens / requests
        if self._seconds == 0.0:
            self._tokens_per_request, self._seconds = each, seconds
            return
        self._tokens_per_request += self._memory * (each - self._tokens_per_request)
        self._seconds += self._memory * (min(seconds, 3 * self._seconds) - self._seconds)

    @property
    def tokens_a_round(self) -> float:
        """Committed tokens of a request in a round; 1 while unknown."""
        return max(1.0, self._tokens_per_request)

    @property
    def seconds_a_round(self) -> float:
        """Seconds of a round; 0 while unknown."""
        return self._seconds

    def value(self, requests: int) -> float:
        """Tokens a second with `requests` decoding requests; 0 while unknown."""
        return self._tokens_per_request * requests / self._seconds if self._seconds else 0.0


class GrowthGain:
    """Estimates the tokens that one draft step adds, as a share of the reach of the leaves that it can
    expand."""

    def __init__(self, share: float = 0.6) -> None:
        self._prior = share
        self.share = share

    def expected(self, leaf_reaches: npt.NDArray[np.float64]) -> float:
        """Tokens that expanding these leaves should add to the round."""
        return self.share * float(leaf_reaches.sum())

    def forget(self) -> None:
        """Drift to the prior after a round without a wait, so that one bad estimate does not end waiting for
        ever."""
        self.share += 0.02 * (self._prior - self.share)

    def observe(self, leaf_reach: float, added: float) -> None:
        """Leaves of total reach `leaf_reach` were awaited; the round's expected tokens rose by `added`."""
        if leaf_reach > 0.05:
            self.share += 0.1 * (min(1.5, max(0.05, added / leaf_reach)) - self.share)


_ASYNC_STEP_COST = 1.2
_STEP_COST_DISCOUNT, _MIN_STEP_COST = 0.99, 0.5
"""Factor by which the cost of a step shrinks with each round without a wait, and the least share of it."""


@dataclass(frozen=True, slots=True)
class RoundEstimate:
    """Expected result of a round before it starts."""

    choice: NodeChoice
    leaves: npt.NDArray[np.float64]
    """Reach of the leaves that one draft step could expand, best first, less the cost of a row."""
    rate: float
    """Long-run tokens a second; 0 while unknown."""
    step_s: float
    """Seconds until the growth of one more draft step arrives."""
    steps: int
    """Draft steps already awaited in this round."""
    missed: int = 0
    """Decoding requests without growth below their root."""

    def worth(self, rate: float) -> float:
        """Return the expected tokens, less the round's time multiplied by the rate."""
        return self.choice.tokens - rate * self.choice.seconds


class WaitPolicy:
    """Decides whether to wait for one more draft step; by default, never."""

    def should_wait(self, estimate: RoundEstimate) -> bool:
        """Return whether to wait for one more draft step."""
        del estimate
        return False

    def observe(self, before: RoundEstimate, after: RoundEstimate, waited_s: float) -> None:
        """Observe that growth arrived after `waited_s` seconds."""


class NoWait(WaitPolicy):
    """Verify the available nodes at once."""


class FixedSteps(WaitPolicy):
    """Exactly `steps` draft steps a round: the synchronous baseline with a fixed draft length."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def should_wait(self, estimate: RoundEstimate) -> bool:
        """Return whether fewer than `steps` steps were awaited and a leaf can still grow."""
        return estimate.steps < self._steps and len(estimate.leaves) > 0


class CostBasedWait(WaitPolicy):
    """Wait while the tokens that a step should add exceed its time multiplied by the long-run rate.

    An asynchronous drafter (`concurrent`) is awaited after a miss only. After a hit it grows the tree during
    the forward in any case, ready for the next round. In simulated time, waiting after hits lost a tenth at
    temperature 0 and gained nothing at 1. A wait also costs slightly more than its time (`_ASYNC_STEP_COST`).
    A synchronous drafter is idle during the target's forward, and its steps are measured only while it is
    awaited. So it is retried from time to time (`_STEP_COST_DISCOUNT`).
    """

    def __init__(self, concurrent: bool = False, max_steps: int = 16) -> None:
        self._gain = GrowthGain()
        self._concurrent = concurrent
        self._max_steps = max_steps
        self._declined = 0
        """Rounds since it was awaited last, where it is synchronous."""
        self._awaited = False
        """True if the drafter was awaited in this round, or in the last one that could have waited."""

    def should_wait(self, estimate: RoundEstimate) -> bool:
        """Return whether the expected gain of one more step exceeds its cost."""
        if estimate.steps >= self._max_steps or estimate.step_s <= 0 or not len(estimate.leaves):
            return False
        if self._concurrent and estimate.steps == 0 and not estimate.missed:
            return False  # later steps are awaited only after the first one
        rate = estimate.rate or estimate.choice.tokens / max(estimate.choice.seconds, 1e-9)
        pays = self._gain.expected(estimate.leaves) > self._price(estimate.steps) * rate * estimate.step_s
        if not pays:
            self._gain.forget()
        self._awaited = pays or estimate.steps > 0
        return pays

    def _price(self, steps: int) -> float:
        """Cost of a step as a multiple of its time. A new trial lasts for a whole round: the first step may
        include prefill, and only the next ones show the time of a step."""
        if self._concurrent:
            return _ASYNC_STEP_COST
        if not steps:
            self._declined = 0 if self._awaited else self._declined + 1
        return max(_MIN_STEP_COST, _STEP_COST_DISCOUNT**self._declined)

    def observe(self, before: RoundEstimate, after: RoundEstimate, waited_s: float) -> None:
        """Adjust the share of the leaves' reach by which a whole step makes the round worth more."""
        steps = 1.0
        if self._concurrent:  # what arrives may have been half done already
            steps = min(2.0, max(0.3, waited_s / before.step_s))
        added = after.worth(before.rate) - before.worth(before.rate)
        self._gain.observe(steps * float(before.leaves.sum()), added)
