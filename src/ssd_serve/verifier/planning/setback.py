"""What changes suddenly about a way to draft: how long its rounds take, and so its worth, maybe for a moment.

Beside a target on a GPU, a neighbour that takes a core for a second slows drafts and not plain decoding,
which then runs and sees nothing of the neighbour's end. Plain Python; knows no drafters and no other ways.
"""

import math
from dataclasses import dataclass

_FAST, _SLOW = 1 / 16, 1 / 256
_CHANGED = 0.25
"""By so much, in logarithms, rounds take longer or less long than they did: something has changed about the
machine, and what was found before is known less surely."""
_AGAIN = 64
"""Rounds of other ways after which a way that fell behind is tried again where that costs no more than it may
bring; twice as many the next time."""
_TRIAL = 1.5
"""Two changes of the way cost as much again as half of the rounds between them."""
_RECOVERED, _RECOVERED_ROUNDS = 0.9, 64
"""The share of what it gave that it gives again, after so many rounds of its own."""
_LASTING = 1024
"""Rounds of its own after which what it gives now is what it gives."""


@dataclass(slots=True)
class Pace:
    """What the running way's rounds take lately, and what they took, in logarithms of plain rounds."""

    lately: float = 0.0
    before: float = 0.0
    rounds: int = 0

    def observe(self, seconds: float) -> float:
        """By what rounds take longer than before if that has changed; 0: it has not."""
        self.rounds += 1
        taken = math.log(seconds)
        if self.rounds > 1:
            taken = min(max(taken, self.before - 1.0), self.before + 1.0)  # one round is no change
        self.lately += max(_FAST, 1 / self.rounds) * (taken - self.lately)
        self.before += max(_SLOW, 1 / self.rounds) * (taken - self.before)
        change = self.lately - self.before
        if self.rounds < 2 / _FAST or abs(change) < _CHANGED:
            return 0.0
        self.before, self.rounds = self.lately, int(1 / _FAST)
        return change


@dataclass(slots=True)
class Setback:
    """Of a way whose rounds suddenly took longer: what it gave until then, and the rounds since."""

    gain: float
    _wait: int = _AGAIN
    _elsewhere: int = 0
    _own: int = 0

    def observe(self, own: bool) -> None:
        """A round is over, the way's own or another's."""
        if own:
            self._own += 1
        else:
            self._elsewhere += 1

    def over(self, gain: float) -> bool:
        """Whether the way, which gives so much lately, has recovered, or has run for long without."""
        recovered = self._own >= _RECOVERED_ROUNDS and gain >= _RECOVERED * self.gain
        return recovered or self._own >= _LASTING

    def may_be_over(self) -> None:
        """Another way's rounds suddenly take less long: what slowed this one may have passed."""
        self._wait = 0

    def again(self, gives: float, running: float) -> bool:
        """Whether to try the way again, which gave `gives` lately (0: forgotten) where the running one gives
        `running`; the next time is later by twice as many rounds."""
        if not 0 < running < self.gain:
            return False
        may_bring, costs = self.gain / running - 1, _TRIAL * (running / gives - 1) if gives else 0.0
        if self._elsewhere * may_bring < self._wait * max(may_bring, costs):
            return False
        self._wait, self._elsewhere, self._own = 2 * self._wait or _AGAIN, 0, 0
        return True
