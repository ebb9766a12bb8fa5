"""Whether to speculate at all: what speculation really gives against plain decoding, by level of load.

The budget prices nodes; it does not see what a drafter costs by being there: messages, waits, a memory bus
that two devices share. So both ways are timed on live rounds, and the faster one runs. Speculation that leads
clearly is not disturbed by trials. Plain Python; knows no drafters and no trees.
"""

from dataclasses import dataclass, field
from enum import Enum

_MEMORY = 1 - 1 / 256
_SETTLING = 6
"""Rounds after a switch that are not counted: a drafter has to catch up, or to fall silent."""
_CHECK = 64
_PROBE = 24
_TRIAL = 96
_CLEAR_LEAD = 1.3
_STALE = 4096
_FIRST_PATIENCE, _MOST_PATIENCE = 512, 16384
_MOST_LOST = 16.0
"""A first or later trial of speculation ends early when it has cost this many plain rounds."""


class _Phase(Enum):
    SPECULATING = "speculating"
    PROBING = "probing"
    """A few plain rounds, to know what plain decoding gives."""
    PLAIN = "plain"
    TRYING = "trying"
    """A few speculative rounds, to see whether it pays by now."""


@dataclass(slots=True)
class _Side:
    """One way to decode: tokens, as the time that plain rounds should take for them, and the time spent."""

    gained_s: float = 0.0
    spent_s: float = 0.0
    rounds: int = 0

    def add(self, gained_s: float, spent_s: float) -> None:
        if self.rounds > 8:  # a descheduled process is not a slow way to decode
            spent_s = min(spent_s, 4 * self.spent_s * (1 - _MEMORY) / (1 - _MEMORY**self.rounds))
        self.gained_s = _MEMORY * self.gained_s + gained_s
        self.spent_s = _MEMORY * self.spent_s + spent_s
        self.rounds += 1

    @property
    def gain(self) -> float:
        return self.gained_s / self.spent_s if self.spent_s else 0.0


@dataclass(slots=True)
class _Level:
    phase: _Phase = _Phase.SPECULATING
    rounds: int = 0
    """Rounds in this phase."""
    speculative: _Side = field(default_factory=_Side)
    plain: _Side = field(default_factory=_Side)
    plain_age: int = 0
    patience: int = _FIRST_PATIENCE
    lost: float = 0.0
    """Plain rounds that this phase has cost, against what plain decoding is known or expected to give."""

    @property
    def on(self) -> bool:
        return self.phase in (_Phase.SPECULATING, _Phase.TRYING)

    @property
    def plain_gain(self) -> float:
        """What plain decoding gives; 1, as the cost model says, until it was measured."""
        return self.plain.gain if self.plain.rounds else 1.0

    def enter(self, phase: _Phase) -> None:
        self.phase, self.rounds, self.lost = phase, 0, 0.0


class Governor:
    """Switches speculation on and off, by level of load: a power of two of decoding requests."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}

    def speculate(self, requests: int) -> bool:
        """Whether a round of `requests` decoding requests should speculate."""
        return self._level(requests).on

    def gains(self) -> dict[int, tuple[float, float]]:
        """By the least number of requests of each level: gain of speculating and of plain decoding; 0:
        unknown."""
        return {
            1 << (bits - 1): (level.speculative.gain, level.plain.gain)
            for bits, level in sorted(self._levels.items())
        }

    def observe(self, requests: int, tokens: int, seconds: float, plain_s: float) -> None:
        """A round gave `tokens` tokens in `seconds`; the cost model expects a plain one to take `plain_s`."""
        if requests < 1 or seconds <= 0 or plain_s <= 0:
            return
        level = self._level(requests)
        level.rounds += 1
        level.plain_age += 1
        if level.rounds > _SETTLING:
            side = level.speculative if level.on else level.plain
            side.add(tokens / requests * plain_s, seconds)
        level.lost = max(0.0, level.lost + level.plain_gain * seconds / plain_s - tokens / requests)
        self._move(level)

    def _level(self, requests: int) -> _Level:
        return self._levels.setdefault(max(1, requests).bit_length(), _Level())

    @staticmethod
    def _move(level: _Level) -> None:
        match level.phase:
            case _Phase.SPECULATING:
                if level.rounds % _CHECK == 0 or level.lost > _MOST_LOST:
                    _check(level)
            case _Phase.PROBING:
                if level.rounds >= _PROBE + _SETTLING:
                    level.plain_age = 0
                    worse = level.speculative.gain < level.plain.gain
                    level.enter(_Phase.PLAIN if worse else _Phase.SPECULATING)
            case _Phase.PLAIN:
                if level.rounds >= level.patience:
                    level.speculative = _Side()
                    level.enter(_Phase.TRYING)
            case _Phase.TRYING:
                if level.rounds >= _TRIAL + _SETTLING or level.lost > _MOST_LOST:
                    _judge_trial(level)


def _check(level: _Level) -> None:
    """Every `_CHECK` speculative rounds: go on, look again what plain decoding gives, or stop."""
    level.lost = 0.0
    if level.speculative.gain > _CLEAR_LEAD * level.plain_gain:
        return
    if level.plain.rounds and level.plain_age < _STALE and level.speculative.gain >= level.plain.gain:
        return
    level.plain = _Side()
    level.enter(_Phase.PROBING)


def _judge_trial(level: _Level) -> None:
    if level.speculative.gain > level.plain.gain:
        level.patience = _FIRST_PATIENCE
        level.enter(_Phase.SPECULATING)
    else:
        level.patience = min(2 * level.patience, _MOST_PATIENCE)
        level.enter(_Phase.PLAIN)
