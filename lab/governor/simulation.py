"""What finding out which layout is best costs the governor: `python -m lab.governor`.

Loads have layouts of known gains. A round's is that of its layout at its level of load, with noise on tokens
and on time; the first rounds after a change give less, since drafters must catch up. Texts follow each other:
some are drafted better than others, whichever layout drafts. The governor is told once at each level what
every layout should give, with an error common to those that draft and one of each, and not when it changes.
Beside it stands a chooser that tries each layout once at each level and keeps what gave most. Knows
choosers by what they are asked and shown; no engine, no models and no trees.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Protocol

from ssd_serve.bench.tables import text_table
from ssd_serve.verifier.planning.governor import Governor

WAYS = ("async", "sync", "off")
Gains = Mapping[str, float]
PLAIN_S = 0.02
NOISE = 0.2
SETTLING_ROUNDS, SETTLING_GAIN = 4, 0.6
FRESH_ROUNDS = 400
FORECAST_ERROR, COMMON_ERROR = 0.15, 0.25
TEXT_ROUNDS, TEXTS_DIFFER = 20, 0.25
"""How long a text is on average, and by how much in logarithms texts differ in what drafts of them give."""


class Chooser(Protocol):
    """What a round asks, and what it shows; see `Governor`."""

    def choose(self, requests: int, decoding: bool = True) -> str:
        """The layout of the next round."""
        ...

    def observe(self, gained_s: float, seconds: float, plain_s: float, prompts: bool = False) -> None:
        """The round that was last chosen for took `seconds`."""
        ...


class Foreseeing(Governor[str]):
    """A governor that is told at the start, and not again, about what each layout gives."""

    def __init__(self) -> None:
        super().__init__(WAYS)


@dataclass(frozen=True, slots=True)
class _Cost:
    """Of one run: time beyond that of the best layout at each moment, the share of rounds in another than the
    best, and changes of the layout in 1000 rounds."""

    regret: float
    elsewhere: float
    changes: float


def run(chooser: Chooser, load: Iterator[tuple[int, Gains]], seed: int) -> _Cost:
    """Show a chooser the rounds of a load (requests, gains) of which it chooses the layouts."""
    noise = random.Random(seed)
    forecasts: dict[int, Gains] = {}
    if isinstance(chooser, Foreseeing):
        chooser.forecast = lambda load: _nearest(forecasts, load)
    spent = best_spent = 0.0
    rounds = elsewhere = changes = 0
    since, last = 0, WAYS[0]
    common, text = noise.lognormvariate(0.0, COMMON_ERROR), 1.0
    for requests, gains in load:
        if requests not in forecasts:
            forecasts[requests] = {
                way: gain * noise.gauss(1.0, FORECAST_ERROR) * (1.0 if way == "off" else common)
                for way, gain in gains.items()
            }
        if noise.random() < requests / TEXT_ROUNDS:
            share = 1 / requests  # of a round is the text that has ended
            text = math.exp((1 - share) * math.log(text) + share * noise.gauss(0.0, TEXTS_DIFFER))
        way = chooser.choose(requests)
        changes, since = (changes, since + 1) if way == last else (changes + 1, 0)
        last, best_way = way, max(gains, key=gains.__getitem__)
        gain, best = (gains[each] * (1.0 if each == "off" else text) for each in (way, best_way))
        if way != "off" and since < SETTLING_ROUNDS:
            gain *= SETTLING_GAIN
        tokens = 1.0
        if way != "off":
            tokens = text * sum(noise.choices((1, 2, 3, 4), k=requests)) / requests
        seconds = PLAIN_S * (1.0 if way == "off" else 2.5 * text) / gain
        chooser.observe(tokens * PLAIN_S, seconds * max(0.3, noise.gauss(1.0, NOISE)), PLAIN_S)
        spent += 1 / gain
        best_spent += 1 / best
        elsewhere += gains[way] < gains[best_way]
        rounds += 1
    return _Cost(spent / best_spent - 1, elsewhere / rounds, 1000 * changes / rounds)


def _nearest(forecasts: Mapping[int, Gains], load: int) -> Gains:
    return forecasts[min(forecasts, key=lambda known: abs(math.log(known / load)))]


def _drawn(source: random.Random, low: float = 0.5, high: float = 2.2) -> Gains:
    return {"async": source.uniform(low, high), "sync": source.uniform(low, high), "off": 1.0}


def steady(source: random.Random, rounds: int) -> Iterator[tuple[int, Gains]]:
    """One request, and gains that stay."""
    gains = _drawn(source)
    return ((1, gains) for _ in range(rounds))


def close(source: random.Random, rounds: int) -> Iterator[tuple[int, Gains]]:
    """Four requests, and layouts that give nearly the same."""
    gains = _drawn(source, 0.95, 1.1)
    return ((4, gains) for _ in range(rounds))


def changing(source: random.Random, rounds: int) -> Iterator[tuple[int, Gains]]:
    """One request, and gains that change every 5000 rounds."""
    gains = _drawn(source)
    for round_ in range(rounds):
        if round_ and round_ % 5000 == 0:
            gains = _drawn(source)
        yield 1, gains


def coming(source: random.Random, rounds: int) -> Iterator[tuple[int, Gains]]:
    """Loads of 1 to 32 requests that come and go, with gains of their own that fall with the load."""
    levels = {
        requests: {way: gain if way == "off" else gain * fall for way, gain in _drawn(source).items()}
        for requests, fall in ((1, 1.0), (4, 0.9), (16, 0.7), (32, 0.5))
    }
    requests = 1
    for _ in range(rounds):
        if source.random() < 1 / 300:
            requests = source.choice(tuple(levels))
        yield requests, levels[requests]


QUIET: Gains = {"async": 1.9, "sync": 1.6, "off": 1.0}
CORE_LOST: Gains = {"async": 1.6, "sync": 0.5, "off": 0.4}
"""Layouts on two cores while another process has one of them: threads wait for the slower core."""
OTHER_CORE_LOST: Gains = {"async": 0.7, "sync": 0.5, "off": 0.4}
DRAFTS_DISTURBED: Gains = {"async": 0.8, "sync": 0.6, "off": 1.0}
"""A target on a GPU, and another process on the cores that draft or feed it."""
NEIGHBOURS_ASLEEP: Gains = {"async": 1.5, "sync": 2.0, "off": 1.0}
NEIGHBOURS_AWAKE: Gains = {"async": 1.5, "sync": 1.2, "off": 0.9}


def fresh(source: random.Random, rounds: int) -> Iterator[tuple[int, Gains]]:
    """One request of a new process, in which the first layout is best or not."""
    gains = source.choice((QUIET, CORE_LOST, NEIGHBOURS_ASLEEP, NEIGHBOURS_AWAKE))
    return ((1, gains) for _ in range(rounds))


def losing(source: random.Random, rounds: int) -> Iterator[tuple[int, Gains]]:
    """One request; another process takes a core and leaves it, some hundred rounds each."""
    gains = QUIET
    for _ in range(rounds):
        if source.random() < 1 / 2000:
            gains = source.choice((CORE_LOST, OTHER_CORE_LOST)) if gains is QUIET else QUIET
        yield 1, gains


def disturbed(source: random.Random, rounds: int) -> Iterator[tuple[int, Gains]]:
    """One request; for some hundred rounds at a time another process slows drafts and not plain decoding."""
    gains = QUIET
    for _ in range(rounds):
        if source.random() < (1 / 2000 if gains is QUIET else 1 / 300):
            gains = DRAFTS_DISTURBED if gains is QUIET else QUIET
        yield 1, gains


def waking(source: random.Random, rounds: int) -> Iterator[tuple[int, Gains]]:
    """Four requests; neighbours that share the memory bus sleep and wake."""
    gains = NEIGHBOURS_ASLEEP
    for _ in range(rounds):
        if source.random() < 1 / 2000:
            gains = NEIGHBOURS_AWAKE if gains is NEIGHBOURS_ASLEEP else NEIGHBOURS_ASLEEP
        yield 4, gains


Load = Callable[[random.Random, int], Iterator[tuple[int, Gains]]]
LOADS: Mapping[str, Load] = {
    "fresh": fresh,
    "a core lost": losing,
    "drafts disturbed": disturbed,
    "neighbours": waking,
    "steady": steady,
    "close": close,
    "changing": changing,
    "coming and going": coming,
}


class Once:
    """Tries each layout for some rounds at each number of requests, and keeps the one that gave most."""

    ROUNDS = 64

    def __init__(self) -> None:
        self._seen: dict[int, list[tuple[float, float, int]]] = {}
        self._requests, self._way = 1, 0

    def choose(self, requests: int, decoding: bool = True) -> str:
        """The layout of the next round."""
        del decoding
        seen = self._seen.setdefault(requests, [(0.0, 0.0, 0)] * len(WAYS))
        short = [way for way, (_, _, rounds) in enumerate(seen) if rounds < self.ROUNDS]
        best = max(range(len(WAYS)), key=lambda way: seen[way][0] / max(seen[way][1], 1e-9))
        self._requests, self._way = requests, short[0] if short else best
        return WAYS[self._way]

    def observe(self, gained_s: float, seconds: float, plain_s: float, prompts: bool = False) -> None:
        """The round that was last chosen for took `seconds`."""
        del plain_s, prompts
        gained, spent, rounds = self._seen[self._requests][self._way]
        if rounds < self.ROUNDS:
            self._seen[self._requests][self._way] = gained + gained_s, spent + seconds, rounds + 1


CHOOSERS: Mapping[str, Callable[[], Chooser]] = {
    "governor": Foreseeing,
    "once": Once,
}


@dataclass(frozen=True, slots=True)
class _Row:
    """A chooser under a load: means over the seeds, and the greatest regret of one."""

    load: str
    chooser: str
    regret: float
    worst_regret: float
    elsewhere: float
    changes: float


def compare(seeds: int, rounds: int, loads: Mapping[str, Load] = LOADS) -> list[_Row]:
    """Every chooser under every load."""
    rows: list[_Row] = []
    for name, load in loads.items():
        length = min(rounds, FRESH_ROUNDS) if load is fresh else rounds
        for chooser, make in CHOOSERS.items():
            costs = [run(make(), load(random.Random(seed), length), seed) for seed in range(seeds)]
            regrets = [cost.regret for cost in costs]
            elsewhere, changes = mean(cost.elsewhere for cost in costs), mean(cost.changes for cost in costs)
            rows.append(_Row(name, chooser, mean(regrets), max(regrets), elsewhere, changes))
    return rows


def table(rows: Sequence[_Row]) -> str:
    """For people."""
    head = ("load", "chooser", "regret %", "worst %", "not in the best %", "changes in 1000")
    return text_table(
        head,
        [
            (
                row.load,
                row.chooser,
                *(f"{100 * share:.2f}" for share in (row.regret, row.worst_regret)),
                f"{100 * row.elsewhere:.1f}",
                f"{row.changes:.1f}",
            )
            for row in rows
        ],
    )
