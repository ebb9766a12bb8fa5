"""Comparison by paired ratios: interleaved runs in random order, intervals, verdicts, tuning."""

import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Entry = TypeVar("Entry")
Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

_AS_GOOD = 0.97
_LEVEL = 0.95
_MANY, _DRAWS = 32, 10_000


@dataclass(frozen=True, slots=True)
class Interval:
    """Ratios of pairs: their median, their geometric mean, and the 95 % interval of the mean."""

    median: float
    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """`better` if all of it lies above 1, `as good` above 0.97, `worse` below 1, else `not shown`."""
        if self.low > 1:
            return "better"
        if self.low >= _AS_GOOD:
            return "as good"
        return "worse" if self.high < 1 else "not shown"

    def __str__(self) -> str:
        return f"{self.mean:.2f}x ({self.low:.2f} to {self.high:.2f})"


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile of a non-empty sequence, interpolated linearly."""
    return float(np.percentile(values, percent))


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the three quartiles, rounded to hundredths."""
    return [round(percentile(values, part), 2) for part in (25, 50, 75)]


def ratio_interval(ratios: Sequence[float]) -> Interval | None:
    """Return the interval of the mean of the log ratios, as ratios; None for fewer than two pairs.

    32 pairs or more are resampled (bootstrap), which assumes that pairs are independent. Fewer pairs use
    Student's t, which also assumes normal logarithms, because resampling few gives too narrow an interval.
    """
    if len(ratios) < 2:
        return None
    logs = np.log(ratios)
    low, high = _bootstrap(logs) if len(logs) >= _MANY else _students(logs)
    found = statistics.median(ratios), math.exp(logs.mean()), math.exp(low), math.exp(high)
    return Interval(*(round(value, 9) for value in found))


def _bootstrap(values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> tuple[float, float]:
    drawn = np.random.default_rng(1).integers(len(values), size=(_DRAWS, len(values)))
    low, high = np.percentile(values[drawn].mean(1), (50 * (1 - _LEVEL), 50 * (1 + _LEVEL)))
    return float(low), float(high)


def _students(values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> tuple[float, float]:
    from scipy.stats import t  # part of the extra `bench`

    mean, count = float(values.mean()), len(values)
    half = float(t.ppf((1 + _LEVEL) / 2, count - 1) * values.std(ddof=1) / math.sqrt(count))
    return mean - half, mean + half


def random_order(entries: Sequence[Entry], index: int) -> list[Entry]:
    """Return the entries in an order that is random, and the same for the same index."""
    return random.Random(index).sample(entries, len(entries))


def interleave(
    entries: Iterable[Entry], items: Sequence[Item], run: Callable[[Entry, Item, int], Outcome]
) -> dict[Entry, list[Outcome]]:
    """Run every item on every entry, item by item, in a random order of entries for each item.

    `run` receives the place of the entry in that order.
    """
    unique = list(dict.fromkeys(entries))
    found: dict[Entry, list[Outcome]] = {entry: [] for entry in unique}
    for index, item in enumerate(items):
        for place, entry in enumerate(random_order(unique, index)):
            found[entry].append(run(entry, item, place))
    return found


def tune(
    start: Iterable[Entry],
    neighbours: Callable[[Entry], Iterable[Entry]],
    speeds: Callable[[Sequence[Entry], Sequence[Item]], Mapping[Entry, float]],
    items: Sequence[Item],
) -> tuple[Entry, dict[Entry, float]]:
    """Return the fastest entry, and the speeds of all that were tried.

    The search is hill climbing from the best of `start`. The fastest of several is often so by chance: an
    entry replaces the best one only if it is faster again in a comparison on all items twice.
    """
    order = list(dict.fromkeys(start))
    tried = dict(speeds(order, items)) if len(order) > 1 else {}
    best = max(order, key=lambda entry: tried.get(entry, 0.0))
    seen = {best}
    while new := [each for each in neighbours(best) if each not in seen]:
        tried |= _scaled(tried.get(best, 0.0), best, speeds([best, *new], items))
        seen |= set(new)
        for challenger in sorted(new, key=tried.__getitem__, reverse=True):
            if tried[challenger] > tried[best]:
                tried |= _scaled(tried[best], best, speeds([best, challenger], [*items, *items]))
                best = max(best, challenger, key=tried.__getitem__)
    return best, tried


def _scaled(known: float, best: Entry, found: Mapping[Entry, float]) -> dict[Entry, float]:
    """Scale the speeds of one comparison so that the best entry keeps its known speed."""
    scale = known / found[best] if known > 0 and found[best] > 0 else 1.0
    return {each: scale * speed for each, speed in found.items()}


def adjacent(values: Sequence[Item], value: Item) -> list[Item]:
    """Return the values before and behind this one."""
    place = values.index(value)
    return [*values[max(0, place - 1) : place], *values[place + 1 : place + 2]]
