"""Which way to draft: what each really gives, timed on live rounds, by level of load.

The budget prices nodes; it does not see what a drafter costs by being there: messages, waits, a memory bus
that two devices share, a core that the target could have. So the ways are the arms of a bandit with a prior
(discounted upper confidence bounds), which is what step times forecast: the one runs of which most may be
hoped, which is what it gave and a bonus that grows while it does not run. When rounds suddenly take longer or
less long, all that was found is doubted. `python -m lab.governor` measures what finding out costs. Plain
Python; knows no drafters and no trees.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Generic

from ssd_serve.verifier.control.load_bucket import LoadBucket, DiscountedMean, Way
from ssd_serve.verifier.control.load_bucket import RegressionTracker

_BONUS = 0.6
"""What may be hoped beyond what a way gave in one round; less with the root of their number."""
_PRIOR_GAIN = 1.2
"""Of a way to draft of which nothing is known; weighs one round."""
_FORECAST = 32.0
"""Rounds that a forecast weighs: a way that is forecast clearly below the best is not tried, nor is one left
because the texts that it met were hard to draft."""
_KEPT = 4.0
"""Rounds that weighs that ways give just what is foreseen."""
_PLAIN_PRIOR = 64.0
"""Rounds that weighs, for ever, what the cost model says of plain decoding: who leads clearly over it is not
disturbed to look at it."""
_RECALLED = 6.0
"""Rounds that weighs what an earlier process has found."""
_PROMPTS_PRIOR, _PROMPTS_FORESEEN = 4.0, 32.0
"""Rounds that weighs that a way slows prompts as it does elsewhere, or not at all, and that it slows them as
is foreseen: one that was descheduled is no slow way to read."""
_CHECK, _FORESEE = 8, 64
_STICK = 1.02
"""By this factor more must be hoped of another way: a change costs drafters their trees."""
_LOAD_BLEND = 1 / 16
_DOUBTED, _CONTINUED = 4.0, 16.0
"""Rounds that what was found of the other ways weighs, and of the running one, when rounds suddenly take
longer or less long: something has changed about the machine."""
_EDGE = 0.15
"""How far past the edge of a level, as a share of it, the load must be."""


class ModeController(Generic[Way]):
    """Chooses among ways to draft; the first is the first to run, the last is plain decoding. Levels of load
    lie about powers of two of requests, those whose prompt is still to be read included."""

    def __init__(self, ways: Sequence[Way]) -> None:
        self.forecast: Callable[[int], Mapping[Way, float]] | None = None
        """What ways should give with so many requests, as far as that is known without trying them."""
        self.slowed: Callable[[Way], float | None] = lambda _: None
        """By how much a way should slow rounds that read prompts; None: not known without trying it."""
        self.lasting: Callable[[Way], float] = lambda _: 1.0
        """The share of what running requests still have to come for which a way is really there, when it
        begins now: its drafters may have to read texts first."""
        self._ways = tuple(ways)
        self._plain = self._ways[-1]
        self._levels: dict[int, LoadBucket[Way]] = {}
        self._load = 0.0
        self._exponent = 0
        self._last: Way | None = None
        """That of the last round."""

    def choose(self, requests: int, decoding: bool = True) -> Way:
        """The way of the next round while `requests` requests run, of which some decode or none.

        What changes the level is the load of some rounds, clearly past its edge, or a sudden jump: changing
        the way costs drafters their trees. It does not fall while nothing decodes: a first prompt may be that
        of a burst. Nor does the way change where another level begins with one that begins too late.
        """
        if decoding or requests >= self._load:
            jumped = requests >= 2 * self._load or 2 * requests <= self._load
            self._load += (1.0 if jumped else _LOAD_BLEND) * (requests - self._load)
            least = 2 ** (self._exponent - 0.5) if self._exponent else 0.0
            if not least * (1 - _EDGE) <= self._load < 2 ** (self._exponent + 0.5) * (1 + _EDGE):
                self._exponent = _exponent(self._load)
        level = self._at(self._exponent)
        way = self._last
        if way is not None and level.running != way and self._late(level, way):
            level.begin(way, settled=True)
        self._last = level.running
        return level.running

    def _late(self, level: LoadBucket[Way], now: Way) -> bool:
        """Whether the way that the level has chosen takes so long to begin that no more may be hoped of it
        than of the one that runs."""
        share = self.lasting(level.running)
        return share < 1 and share * self._hope(level, level.running) <= self._hope(level, now)

    @property
    def trying(self) -> bool:
        """Whether the way of the next round is only tried: another one was the best when that was last looked
        at."""
        level = self._levels.get(self._exponent)
        return level is not None and level.tries

    def standing(self) -> tuple[float, float]:
        """What the running way gives at this level of load, and the best of the others, in the units of
        `gains`; 0: unknown."""
        level = self._levels.get(self._exponent)
        if level is None:
            return 0.0, 0.0
        others = [rounds.gain for way, rounds in level.decoding.items() if way != level.running]
        return level.decoding[level.running].gain, max(others, default=0.0)

    def gains(self) -> dict[int, dict[Way, float]]:
        """By the middle number of requests of each level: what each way gives, in units of plain decoding as
        the cost model expects it; 0: unknown."""
        return {
            1 << exponent: {way: rounds.gain for way, rounds in level.decoding.items()}
            for exponent, level in sorted(self._levels.items())
        }

    def recall(self, gains: Mapping[int, Mapping[Way, float]]) -> None:
        """Start with what an earlier process found (`gains`): the best way runs, all are still tried in their
        time."""
        for requests, by_way in gains.items():
            level = self._at(_exponent(requests))
            for way, gain in by_way.items():
                if way in level.decoding and gain > 0:
                    level.decoding[way] = DiscountedMean(gain * _RECALLED, _RECALLED, _RECALLED)
            level.running = self._best(level)

    def observe(self, gained_s: float, seconds: float, plain_s: float, prompts: bool = False) -> None:
        """The round that was last chosen for took `seconds`.

        Plain decoding should take `gained_s` for the same, and `plain_s` for one of its rounds. Rounds that
        read `prompts` count too, since drafting slows them, but apart: less is known of what they take,
        and how many there are is no merit of a way.
        """
        if gained_s <= 0 or seconds <= 0 or plain_s <= 0:
            return
        level = self._at(self._exponent)
        level.share(gained_s, prompts)
        settled = level.settled
        if prompts:
            if settled:
                level.prompts[level.running].add(gained_s, seconds)
            return
        level.age()
        if settled:
            level.decoding[level.running].add(gained_s / plain_s, seconds / plain_s)
            change = level.pace.observe(seconds / plain_s)
            if change:
                self._set_back(level, slower=change > 0)
                self._doubt(level, math.exp(change))
        for way, setback in level.setbacks.items():
            setback.observe(own=way == level.running)
        if level.rounds % _CHECK == 0:
            self._try_again(level)
            self._forecast(level)
            self._reconsider(level)

    def _reconsider(self, level: LoadBucket[Way]) -> None:
        """Begin the way of which most may be hoped, if that is clearly more than of the running one."""
        hopes = {way: self._hope(level, way) for way in self._ways}
        stays = hopes[level.running]
        worth = {way: hope * self.lasting(way) for way, hope in hopes.items() if hope > _STICK * stays}
        way = max(worth, key=worth.__getitem__, default=level.running)
        if worth.get(way, 0.0) > stays:
            level.begin(way)
        best = self._best(level)
        lead = self._gain(level, best) * self.lasting(best)
        level.tries = best != level.running and lead > self._gain(level, level.running)

    def _set_back(self, level: LoadBucket[Way], slower: bool) -> None:
        """The running way's rounds suddenly take longer, which may pass, or less long: that has passed."""
        way = level.running
        if slower:
            level.setbacks.setdefault(way, RegressionTracker(level.decoding[way].gain))
            return
        level.setbacks.pop(way, None)
        for setback in level.setbacks.values():
            setback.may_be_over()

    def _try_again(self, level: LoadBucket[Way]) -> None:
        """Hope for as much as they once gave of ways that fell behind, from time to time."""
        for way, setback in tuple(level.setbacks.items()):
            gives = level.decoding[way].gain
            if setback.over(gives):
                del level.setbacks[way]
            elif level.running != way and setback.again(gives, self._decoding(level, level.running)):
                level.decoding[way] = DiscountedMean(setback.gain, 1.0, 1.0)

    def _doubt(self, changed: LoadBucket[Way], slower: float) -> None:
        """Rounds take `slower` times as long as before: all that was found is older than that."""
        for level in self._levels.values():
            level.prior = min(level.prior, _DOUBTED / _FORECAST)
            for way, rounds in level.decoding.items():
                if level is changed and way == level.running:
                    rounds.doubt(_CONTINUED, slower)
                else:
                    rounds.doubt(_DOUBTED, math.sqrt(slower))  # it may be slower too

    def _forecast(self, level: LoadBucket[Way]) -> None:
        if self.forecast is not None and (not level.forecast or level.rounds % _FORESEE == 0):
            level.foreseen = dict(self.forecast(1 << self._exponent))
        level.forecast = {way: self._kept(level, way) * gain for way, gain in level.foreseen.items()}

    def _kept(self, level: LoadBucket[Way], way: Way) -> float:
        """The share of what was foreseen that the way gave at other levels, and that all ways to draft gave
        here: texts that are drafted well are so in each of them. The nearest count most."""
        seen = [(level, each, level.prior) for each in self._ways if self._plain not in (each, way)]
        for exponent, other in self._levels.items():
            if other is not level:
                seen.append((other, way, 1 / abs(exponent - self._exponent)))
        kept, weights = 0.0, _KEPT
        for where, each, share in seen:
            gave, foreseen = where.decoding[each], where.foreseen.get(each, 0.0)
            if gave.gain and foreseen > 0:
                weight = share * min(gave.rounds, _FORECAST)
                kept += weight * math.log(gave.gain / foreseen)
                weights += weight
        return math.exp(kept / weights)

    def _at(self, exponent: int) -> LoadBucket[Way]:
        """The level; a new one begins with what is best at the nearest that is known."""
        level = self._levels.get(exponent)
        if level is None:
            nearest = min(self._levels, key=lambda known: abs(known - exponent), default=None)
            best = self._ways[0] if nearest is None else self._best(self._levels[nearest])
            decoding, prompts = ({way: DiscountedMean() for way in self._ways} for _ in range(2))
            level = self._levels[exponent] = LoadBucket(best, decoding, prompts)
        return level

    def _best(self, level: LoadBucket[Way]) -> Way:
        """The way that gives most, of those that were measured; the running one among equals."""
        known = [way for way in self._ways if level.decoding[way].gain or way in (self._plain, level.running)]
        return max(known, key=lambda way: (self._gain(level, way), way == level.running))

    def _gain(self, level: LoadBucket[Way], way: Way) -> float:
        """What the way is worth at this level's shares of decoding and of prompts."""
        return self._worth(level, self._decoding(level, way), self._slowness(level, way)[0])

    def _hope(self, level: LoadBucket[Way], way: Way) -> float:
        """What the way may be worth: more than it gave, the less it was measured lately."""
        decoding, (slowness, foreseen) = self._decoding(level, way), self._slowness(level, way)
        rounds = level.decoding[way].rounds + self._prior(level, way)[1]
        more = 1 + _BONUS / math.sqrt(max(rounds, 1e-6)) / decoding
        return self._worth(level, decoding * more, slowness if foreseen else slowness / more)

    @staticmethod
    def _worth(level: LoadBucket[Way], decoding: float, slowness: float) -> float:
        share = level.prompts_share
        return 1 / ((1 - share) / decoding + share * slowness)

    def _prior(self, level: LoadBucket[Way], way: Way) -> tuple[float, float]:
        """What the way should give without having been tried, and how many rounds that weighs."""
        if way in level.forecast:
            return level.forecast[way], level.prior * (1.0 if way in level.setbacks else _FORECAST)
        return (1.0, _PLAIN_PRIOR) if way == self._plain else (_PRIOR_GAIN, level.prior)

    def _slowness(self, level: LoadBucket[Way], way: Way) -> tuple[float, bool]:
        """What rounds that read prompts take, in units of the cost model, and whether it is foreseen. As far
        as none was measured with the way, they take as long as with the one that slows them least, but for
        what it should slow them, or does at other levels."""
        mine = level.prompts[way]
        known = {each: rounds.gain for each, rounds in level.prompts.items() if rounds.gain}
        if not known:
            return 1 / self._decoding(level, way), False
        least = {each: 1 / (gain * self._slows_prompts(each)) for each, gain in known.items()}
        best = min(least, key=least.__getitem__)
        foreseen = None not in (self.slowed(way), self.slowed(best))
        weight = _PROMPTS_FORESEEN if foreseen else _PROMPTS_PRIOR
        seen = mine.rounds / mine.gain if mine.gain else 0.0
        slowness = (seen + weight * self._slows_prompts(way) * least[best]) / (mine.rounds + weight)
        return slowness, foreseen

    def _slows_prompts(self, way: Way) -> float:
        """By how much rounds that read prompts take longer than in plain decoding: as it should be, and over
        all levels that know both."""
        slowed = self.slowed(way)
        rounds = _PROMPTS_PRIOR if slowed is None else _PROMPTS_FORESEEN
        slower = rounds * ((slowed or 1.0) - 1)
        for level in self._levels.values():
            plain, mine = level.prompts[self._plain], level.prompts[way]
            if plain.gain and mine.gain:
                both = min(plain.rounds, mine.rounds)
                slower += both * (plain.gain / mine.gain - 1)
                rounds += both
        return 1 + slower / rounds

    def _decoding(self, level: LoadBucket[Way], way: Way) -> float:
        """Its gain in decoding: what it gave and, as far as it was hardly tried, what it should give."""
        seen, (prior, weight) = level.decoding[way], self._prior(level, way)
        if way not in level.forecast:
            return seen.gain or prior
        return (seen.gain * seen.rounds + prior * weight) / max(seen.rounds + weight, 1e-9)


def _exponent(requests: float) -> int:
    """Of the power of two that is nearest by ratio."""
    return round(math.log2(max(1.0, requests)))
