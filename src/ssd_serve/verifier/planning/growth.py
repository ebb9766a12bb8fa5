"""Verify now, or grow first: how long a round waits for its drafters before it starts.

Knows expected tokens and seconds, not trees' contents and not how growth arrives.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ssd_serve.verifier.planning.budget import GrowthGain, NodeChoice

_CONCURRENT_PRICE = 1.2
_DOUBT, _MOST_DOUBT = 0.99, 0.5
"""A price that was not paid is believed less with each round, but half of it at least."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a round looks like before it starts."""

    choice: NodeChoice
    leaves: npt.NDArray[np.float64]
    """Reach of the leaves that one draft step could expand, best first, less the price of a row."""
    rate: float
    """Long-run tokens a second; 0 while unknown."""
    step_s: float
    """Seconds until one more draft step's growth is here."""
    steps: int
    """Draft steps already awaited in this round."""
    missed: int = 0
    """Decoding requests below whose root nothing has grown."""

    def worth(self, rate: float) -> float:
        """Expected tokens, less what the time of the round is worth: more nodes also make it longer."""
        return self.choice.tokens - rate * self.choice.seconds


class GrowPolicy(Protocol):
    """Decides whether to wait for one more draft step."""

    def wants(self, outlook: Outlook) -> bool:
        """Whether to wait."""
        ...

    def learn(self, before: Outlook, after: Outlook, waited_s: float) -> None:
        """Something arrived after `waited_s` seconds."""
        ...


class WhenItPays:
    """Wait while the tokens that a step should add exceed what its time is worth at the long-run rate.

    A drafter of its own (`concurrent`) is awaited after a miss only. What it would add below a hit it grows
    during the forward anyway, and where the text passes there the next round finds it ready: in simulated
    time, waiting after hits lost a tenth at temperature 0 and won nothing at 1. It is also a little dearer
    than its time (`_CONCURRENT_PRICE`). A synchronous drafter stands still while the target works, and nobody
    learns what its steps take while it is not awaited: it is tried again now and then (`_DOUBT`).
    """

    def __init__(self, concurrent: bool = False, max_steps: int = 16) -> None:
        self._gain = GrowthGain()
        self._concurrent = concurrent
        self._max_steps = max_steps
        self._declined = 0
        """Rounds since it was awaited last, where it is synchronous."""
        self._awaited = False
        """In this round, or in the last one that could have."""

    def wants(self, outlook: Outlook) -> bool:
        """Whether the expected gain of one more step exceeds its price."""
        if outlook.steps >= self._max_steps or outlook.step_s <= 0 or not len(outlook.leaves):
            return False
        if self._concurrent and outlook.steps == 0 and not outlook.missed:
            return False  # later steps are asked for only where the first one was
        rate = outlook.rate or outlook.choice.tokens / max(outlook.choice.seconds, 1e-9)
        pays = self._gain.expected(outlook.leaves) > self._price(outlook.steps) * rate * outlook.step_s
        if not pays:
            self._gain.forget()
        self._awaited = pays or outlook.steps > 0
        return pays

    def _price(self, steps: int) -> float:
        """Of a step's time. Whoever is tried again is tried for the whole round: the first step may have a
        text to read, and only the next ones tell what a step takes."""
        if self._concurrent:
            return _CONCURRENT_PRICE
        if not steps:
            self._declined = 0 if self._awaited else self._declined + 1
        return max(_MOST_DOUBT, _DOUBT**self._declined)

    def learn(self, before: Outlook, after: Outlook, waited_s: float) -> None:
        """Adjust the share of the leaves' reach by which a whole step makes the round worth more."""
        steps = 1.0
        if self._concurrent:  # what arrives may have been half done already
            steps = min(2.0, max(0.3, waited_s / before.step_s))
        added = after.worth(before.rate) - before.worth(before.rate)
        self._gain.observe(steps * float(before.leaves.sum()), added)


class Never:
    """Verify at once what is there."""

    def wants(self, outlook: Outlook) -> bool:
        """Never."""
        del outlook
        return False

    def learn(self, before: Outlook, after: Outlook, waited_s: float) -> None:
        """Nothing to learn."""


class FixedSteps:
    """Exactly `steps` draft steps a round: the synchronous baseline with a fixed draft length."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def wants(self, outlook: Outlook) -> bool:
        """Whether the fixed number is not reached yet and anything can still grow."""
        return outlook.steps < self._steps and len(outlook.leaves) > 0

    def learn(self, before: Outlook, after: Outlook, waited_s: float) -> None:
        """Nothing to learn."""
