"""Statistics of decoding modes at one level of load: discounted sums of measured rounds.

Also detects sudden changes of round times. A neighbour that takes a core for a second slows drafts but not
plain decoding, so plain decoding would never notice that the neighbour has left. Plain Python; decides
nothing.
"""

import math
from dataclasses import dataclass, field
from typing import Generic, TypeVar

ModeT = TypeVar("ModeT")

_DISCOUNT, _OWN_DISCOUNT = 1 - 1 / 1536, 1 - 1 / 256
"""Discount per round of the bucket, and per round of the same mode."""
_SETTLING = 6
"""Rounds after a change that are not counted: a drafter has to catch up, or to fall silent."""


@dataclass(slots=True)
class DiscountedMean:
    """Rounds of one kind: their time by plain decoding (`plain`), their time (`spent`) and their number."""

    plain: float = 0.0
    spent: float = 0.0
    rounds: float = 0.0

    def fade(self) -> None:
        """Discount for another round of the level."""
        self.plain *= _DISCOUNT
        self.spent *= _DISCOUNT
        self.rounds *= _DISCOUNT

    def add(self, plain: float, spent: float) -> None:
        if self.rounds > 8:  # a descheduled process is not a slow mode
            spent = min(spent, 4 * plain / self.gain)
        self.plain = _OWN_DISCOUNT * self.plain + plain
        self.spent = _OWN_DISCOUNT * self.spent + spent
        self.rounds += 1

    def discount(self, rounds: float, slower: float = 1.0) -> None:
        """Limit the weight to `rounds` rounds, and scale their time by `slower`."""
        share = min(1.0, rounds / self.rounds) if self.rounds else 0.0
        self.plain *= share
        self.spent *= share * slower
        self.rounds *= share

    @property
    def gain(self) -> float:
        """Gain as a multiple of plain decoding; 0: unknown."""
        return self.plain / self.spent if self.spent else 0.0


_FAST, _SLOW = 1 / 16, 1 / 256
_CHANGED = 0.25
"""Change of log round time that counts as sudden: something about the machine changed, and earlier
measurements are discounted."""
_RETRY_AFTER = 64
"""Rounds of other modes after which a regressed mode is retried, if a retry costs no more than it may gain;
twice as many the next time."""
_RETRY_COST = 1.5
"""Cost of two switches as a multiple of half of the rounds between them."""
_RECOVERED, _RECOVERED_ROUNDS = 0.9, 64
"""Share of its former gain with which a regressed mode has recovered, after this number of its own rounds."""
_ACCEPTED_AFTER = 1024
"""Number of its own rounds after which the current gain of a regressed mode counts as normal."""


@dataclass(slots=True)
class RoundTimeTrend:
    """Round times of the running mode, lately and before, as logarithms of multiples of plain rounds."""

    lately: float = 0.0
    before: float = 0.0
    rounds: int = 0

    def observe(self, seconds: float) -> float:
        """Return the change of log round time if it is sudden, else 0."""
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
class RegressionTracker:
    """Tracks a mode after a sudden rise of its round time: its former gain and the rounds since."""

    gain: float
    _retry_after: int = _RETRY_AFTER
    _other_rounds: int = 0
    _own_rounds: int = 0

    def observe(self, own: bool) -> None:
        """Count a round of this mode (`own`) or of another."""
        if own:
            self._own_rounds += 1
        else:
            self._other_rounds += 1

    def has_recovered(self, gain: float) -> bool:
        """Return whether the mode has regained its former gain, or has run long enough that the new gain is
        normal."""
        recovered = self._own_rounds >= _RECOVERED_ROUNDS and gain >= _RECOVERED * self.gain
        return recovered or self._own_rounds >= _ACCEPTED_AFTER

    def retry_soon(self) -> None:
        """Retry soon: another mode's rounds suddenly take less time, so the disturbance may have ended."""
        self._retry_after = 0

    def should_retry(self, gives: float, running: float) -> bool:
        """Return whether to retry the mode, which gave `gives` lately (0: forgotten) while the running one
        gives `running`. The next retry comes after twice as many rounds."""
        if not 0 < running < self.gain:
            return False
        may_bring, costs = self.gain / running - 1, _RETRY_COST * (running / gives - 1) if gives else 0.0
        if self._other_rounds * may_bring < self._retry_after * max(may_bring, costs):
            return False
        self._retry_after, self._other_rounds, self._own_rounds = 2 * self._retry_after or _RETRY_AFTER, 0, 0
        return True


@dataclass(slots=True)
class LoadBucket(Generic[ModeT]):
    """Running mode and statistics of all modes at one level of load."""

    running: ModeT
    decoding: dict[ModeT, DiscountedMean]
    """Decode rounds; times are multiples of a plain round."""
    prefill: dict[ModeT, DiscountedMean]
    """Rounds that read prompts, in seconds."""
    rounds: int = 0
    """Since the last change."""
    explores: bool = False
    """True if another mode was the best at the last decision."""
    prior: float = 1.0
    decoding_s: float = 0.0
    prefill_s: float = 0.0
    """Discounted seconds that plain decoding would take for recent rounds of each kind, in any mode."""
    raw_forecast: dict[ModeT, float] = field(default_factory=dict)
    """Forecast of each mode by measured step times."""
    forecast: dict[ModeT, float] = field(default_factory=dict)
    """The same, corrected by the share of it that the modes achieved at other levels."""
    trend: RoundTimeTrend = field(default_factory=RoundTimeTrend)
    regressions: dict[ModeT, RegressionTracker] = field(default_factory=dict)

    @property
    def settled(self) -> bool:
        """True if rounds count: the last switch is some rounds ago."""
        return self.rounds >= _SETTLING

    @property
    def prefill_share(self) -> float:
        """Share of prefill in the time of plain decoding."""
        return self.prefill_s / ((self.prefill_s + self.decoding_s) or 1.0)

    def switch(self, mode: ModeT, settled: bool = False) -> None:
        """Switch to another mode; `settled` if it runs already."""
        self.running, self.rounds, self.trend = mode, _SETTLING if settled else 0, RoundTimeTrend()
        self.explores = False

    def count_time(self, plain_s: float, prefill: bool) -> None:
        """A round, for which plain decoding should take so long, has read prompts or not."""
        self.decoding_s = _OWN_DISCOUNT * self.decoding_s + plain_s * (not prefill)
        self.prefill_s = _OWN_DISCOUNT * self.prefill_s + plain_s * prefill

    def age(self) -> None:
        """A round that only decodes passes."""
        self.rounds += 1
        self.prior *= _DISCOUNT
        for rounds in self.decoding.values():
            rounds.fade()
