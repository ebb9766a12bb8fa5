"""Waiting: whether a round lets the trees grow by one more draft step before it starts.

A step is awaited if the tokens that it should add exceed its time multiplied by the long-run rate. Plain numpy;
knows no models and no messages.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ssd_serve.verifier.control.budget import NodeChoice

_GAIN, _GAIN_DRIFT, _GAIN_BLEND = 0.6, 0.02, 0.1
"""Tokens that a draft step adds, as a share of the reach of the leaves. Its prior, the weight of the prior for
each round without a wait, and the weight of a step. Without the drift one bad estimate would last."""


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


class FixedSteps(WaitPolicy):
    """Exactly `steps` draft steps a round: the synchronous baseline with a fixed draft length."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def should_wait(self, estimate: RoundEstimate) -> bool:
        """Return whether fewer than `steps` steps were awaited and a leaf can still grow."""
        return estimate.steps < self._steps and len(estimate.leaves) > 0


class CostBasedWait(WaitPolicy):
    """Wait while the tokens that a step should add exceed its time multiplied by the long-run rate.

    An asynchronous drafter (`concurrent`) is awaited after a miss only. After a hit it grows the tree during the
    forward in any case. In simulated time, such waits lost a tenth at temperature 0 and gained nothing at 1.
    """

    def __init__(self, concurrent: bool = False) -> None:
        self._concurrent = concurrent
        self.gain = _GAIN
        """Tokens that a step adds, as a share of the reach of the leaves that it can expand."""

    def should_wait(self, estimate: RoundEstimate) -> bool:
        """Return whether the expected gain of one more step exceeds its cost."""
        if estimate.step_s <= 0 or not len(estimate.leaves):
            return False
        if self._concurrent and estimate.steps == 0 and not estimate.missed:
            return False  # later steps are awaited only after the first one
        rate = estimate.rate or estimate.choice.tokens / max(estimate.choice.seconds, 1e-9)
        pays = self.gain * float(estimate.leaves.sum()) > rate * estimate.step_s
        if not pays:
            self.gain += _GAIN_DRIFT * (_GAIN - self.gain)
        return pays

    def observe(self, before: RoundEstimate, after: RoundEstimate, waited_s: float) -> None:
        """Adjust the share of the leaves' reach by which a whole step makes the round worth more."""
        steps = waited_s / before.step_s if self._concurrent else 1.0  # it may have been half done already
        reach = steps * float(before.leaves.sum())
        added = after.worth(before.rate) - before.worth(before.rate)
        if reach > 0:
            self.gain += _GAIN_BLEND * (min(1.0, max(0.0, added / reach)) - self.gain)
