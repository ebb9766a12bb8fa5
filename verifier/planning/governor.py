"""Which way to draft: what each really gives, timed on live rounds, by level of load.

The budget prices nodes; it does not see what a drafter costs by being there: messages, waits, a memory bus
that two devices share, a core that the target could have. So every way is tried, and the fastest one runs. A
clear lead over plain decoding is not disturbed to look at plain decoding, nor soon to look at others. Plain
Python; knows no drafters and no trees.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Way = TypeVar("Way")

_MEMORY = 1 - 1 / 256
_SETTLING = 6
"""Rounds after a change that are not counted: a drafter has to catch up, or to fall silent."""
_CHECK = 64
_TRIAL, _PLAIN_TRIAL = 96, 24
_MIN_LEAD = 1.03
"""Drafting must beat plain decoding by this factor: a smaller gain is within what trials can tell apart, and
drafting takes memory bandwidth from everybody else."""
_LOAD_BLEND = 1 / 16
_EDGE = 0.15
"""How far past the edge of a level, as a share of it, the load must be."""
_CLEAR_LEAD = 1.3
_UNDISTURBED = 256
"""Rounds for which a clear lead over plain decoding is not disturbed to try what may be better still."""
_FIRST_PATIENCE, _MAX_PATIENCE = 512, 16384
_RECALLED_S = 0.2
"""What was remembered weighs as much as this time of live rounds."""
_MAX_LOST, _MIN_LOST = 10.0, 2.5
"""A trial ends early when it has cost this many plain rounds; the least after several trials in vain."""


@dataclass(slots=True)
class _Record:
    """What one way gave: tokens, as the time that plain rounds should take for them, and the time spent."""

    gained_s: float = 0.0
    spent_s: float = 0.0
    prompts_gained_s: float = 0.0
    prompts_spent_s: float = 0.0
    """The same of rounds that read prompts."""
    rounds: int = 0
    tried: bool = False
    age: int = 0
    """Rounds since it was last used."""
    patience: int = _FIRST_PATIENCE

    def add(self, gained_s: float, spent_s: float) -> None:
        if self.rounds > 8:  # a descheduled process is not a slow way to decode
            spent_s = min(spent_s, 4 * gained_s / self.gain)
        self.gained_s = _MEMORY * self.gained_s + gained_s
        self.spent_s = _MEMORY * self.spent_s + spent_s
        self.rounds += 1

    def add_prompts(self, gained_s: float, spent_s: float) -> None:
        self.prompts_gained_s = _MEMORY * self.prompts_gained_s + gained_s
        self.prompts_spent_s = _MEMORY * self.prompts_spent_s + spent_s

    def forget(self) -> None:
        self.gained_s = self.spent_s = 0.0
        self.prompts_gained_s = self.prompts_spent_s = 0.0
        self.rounds = 0

    @property
    def gain(self) -> float:
        return self.gained_s / self.spent_s if self.spent_s else 0.0

    @property
    def slowness(self) -> float:
        """Time of rounds that read prompts, as a multiple of what plain decoding should take; 0: unknown."""
        return self.prompts_spent_s / self.prompts_gained_s if self.prompts_gained_s else 0.0


@dataclass(slots=True)
class _Level(Generic[Way]):
    best: Way
    running: Way
    records: dict[Way, _Record] = field(default_factory=dict)
    rounds: int = 0
    """Rounds since the last change."""
    lost: float = 0.0
    """Plain rounds that the running way has cost lately, against the best other way."""
    decoding_s: float = 0.0
    prompts_s: float = 0.0
    """What plain decoding should take for recent rounds of each kind, whichever way ran."""

    def enter(self, way: Way) -> None:
        self.running, self.rounds, self.lost = way, 0, 0.0


class Governor(Generic[Way]):
    """Chooses among ways to draft; the first is taken to be the best until others are measured, the last is
    plain decoding. Levels of load lie about powers of two of requests, those whose prompt is read
    included."""

    def __init__(self, ways: Sequence[Way]) -> None:
        self._ways = tuple(ways)
        self._plain = self._ways[-1]
        self._levels: dict[int, _Level[Way]] = {}
        self._load = 0.0
        self._exponent = 0

    def choose(self, requests: int, decoding: bool = True) -> Way:
        """The way of the next round of `requests` requests, of which some decode or none.

        What changes the level is the load of some rounds, clearly past its edge, or a sudden jump: changing
        the way costs drafters their trees. It does not fall while nothing decodes: a first prompt may be that
        of a burst.
        """
        if not decoding and requests < self._load:
            return self._at(self._exponent).running
        jumped = requests >= 2 * self._load or 2 * requests <= self._load
        self._load += (1.0 if jumped else _LOAD_BLEND) * (requests - self._load)
        least = 2 ** (self._exponent - 0.5) if self._exponent else 0.0
        if not least * (1 - _EDGE) <= self._load < 2 ** (self._exponent + 0.5) * (1 + _EDGE):
            self._exponent = _exponent(self._load)
        return self._at(self._exponent).running

    @property
    def trying(self) -> bool:
        """Whether the way of the next round is only tried: another one is the best so far."""
        level = self._levels.get(self._exponent)
        return level is not None and level.running != level.best

    def standing(self) -> tuple[float, float]:
        """What the running way gives at this level of load, and the best of the others, in the units of
        `gains`; 0: unknown."""
        level = self._levels.get(self._exponent)
        if level is None:
            return 0.0, 0.0
        others = [record.gain for way, record in level.records.items() if way != level.running]
        return level.records[level.running].gain, max(others, default=0.0)

    def gains(self) -> dict[int, dict[Way, float]]:
        """By the middle number of requests of each level: what each way gives, in units of plain decoding as
        the cost model expects it; 0: unknown."""
        return {
            1 << exponent: {way: record.gain for way, record in level.records.items()}
            for exponent, level in sorted(self._levels.items())
        }

    def recall(self, gains: Mapping[int, Mapping[Way, float]]) -> None:
        """Start with what an earlier process found (`gains`): the best way runs, all are still tried in their
        time."""
        for requests, by_way in gains.items():
            level = self._at(_exponent(requests))
            for way, gain in by_way.items():
                record = level.records.get(way)
                if record is not None and gain > 0:
                    record.gained_s, record.spent_s = gain * _RECALLED_S, _RECALLED_S
                    record.rounds = 1
            level.best = max(self._ways, key=lambda way: self._gain(level, way))
            level.running = level.best
            for way, record in level.records.items():  # what was close is compared again
                record.tried = 0 < _CLEAR_LEAD * self._gain(level, way) < self._gain(level, level.best)

    def observe(self, gained_s: float, seconds: float, plain_s: float, prompts: bool = False) -> None:
        """The round that was last chosen for took `seconds`.

        Plain decoding should take `gained_s` for the same, and `plain_s` for one of its rounds. Rounds that
        read `prompts` count too, since drafting slows them, but apart: less is known of what they take,
        and how many there are is no merit of a way.
        """
        if gained_s <= 0 or seconds <= 0 or plain_s <= 0:
            return
        level = self._at(self._exponent)
        level.decoding_s = _MEMORY * level.decoding_s + gained_s * (not prompts)
        level.prompts_s = _MEMORY * level.prompts_s + gained_s * prompts
        if prompts:
            if level.rounds > _SETTLING:
                level.records[level.running].add_prompts(gained_s, seconds)
            return
        level.rounds += 1
        for record in level.records.values():
            record.age += 1
        running = level.records[level.running]
        running.age = 0
        if level.rounds > _SETTLING:
            running.add(gained_s, seconds)
            loss = (self._rival(level) * seconds - gained_s) / plain_s
            level.lost = max(0.0, level.lost + loss)
        self._move(level)

    def _at(self, exponent: int) -> _Level[Way]:
        """The level; a new one begins with what is best at the nearest that is known."""
        level = self._levels.get(exponent)
        if level is None:
            nearest = min(self._levels, key=lambda known: abs(known - exponent), default=None)
            best = self._ways[0] if nearest is None else self._levels[nearest].best
            records = {way: _Record() for way in self._ways}
            level = self._levels[exponent] = _Level(best, best, records)
        return level

    def _rival(self, level: _Level[Way]) -> float:
        """Gain of the best way but the running one, in decoding."""
        return max((self._decoding(level, way) for way in self._ways if way != level.running), default=0.0)

    def _gain(self, level: _Level[Way], way: Way) -> float:
        """What the way is worth at this level's shares of decoding and of prompts."""
        decoding = self._decoding(level, way)
        known = [record.slowness for record in level.records.values() if record.slowness]
        if not decoding or not known:
            return decoding
        slowness = level.records[way].slowness or sum(known) / len(known)
        share = level.prompts_s / (level.prompts_s + level.decoding_s)
        return 1 / ((1 - share) / decoding + share * slowness)

    def _decoding(self, level: _Level[Way], way: Way) -> float:
        """Its gain in decoding. Plain decoding gives 1, as the cost model says, until it was measured."""
        record = level.records[way]
        if way != self._plain:
            return record.gain
        return _MIN_LEAD * (record.gain if record.rounds else 1.0)

    def _move(self, level: _Level[Way]) -> None:
        trial = _PLAIN_TRIAL if level.running == self._plain else _TRIAL
        if level.running != level.best:
            # What has lost before is given up sooner: less is expected of it.
            bearable = max(_MIN_LOST, _MAX_LOST * _FIRST_PATIENCE / level.records[level.running].patience)
            if level.rounds >= trial + _SETTLING or level.lost > bearable:
                self._judge(level)
        elif level.rounds % _CHECK == 0 or level.lost > _MAX_LOST:
            level.lost = 0.0
            rival = self._candidate(level)
            if rival is not None:
                level.records[rival].forget()
                level.enter(rival)

    def _candidate(self, level: _Level[Way]) -> Way | None:
        """A way that deserves a trial now: never measured, or not for as long as its patience."""
        mine = self._gain(level, level.best)
        clear = mine > _CLEAR_LEAD * self._gain(level, self._plain)
        for way in self._ways:
            record = level.records[way]
            if way == level.best:
                continue
            if clear and (way == self._plain or level.rounds < _UNDISTURBED):
                continue
            if not record.tried or record.age >= record.patience or self._gain(level, way) > mine:
                return way
        return None

    def _judge(self, level: _Level[Way]) -> None:
        """The end of a trial: the better one of the tried way and the best so far goes on."""
        tried, best = level.records[level.running], level.records[level.best]
        tried.tried = best.tried = True
        if self._gain(level, level.running) > self._gain(level, level.best):
            tried.patience = best.patience = _FIRST_PATIENCE
            level.best = level.running
            level.rounds = 0
        else:
            tried.patience = min(2 * tried.patience, _MAX_PATIENCE)
            level.enter(level.best)


def _exponent(requests: float) -> int:
    """Of the power of two that is nearest by ratio."""
    return round(math.log2(max(1.0, requests)))
