"""Who is measured when: everybody in turn on every prompt, and shapes that are tuned like that too.

What a machine does to one of them in a minute it does to all. Knows neither engines nor devices.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

Entry = TypeVar("Entry")
Item = TypeVar("Item")
Got = TypeVar("Got")


def turn(entries: Sequence[Entry], index: int) -> list[Entry]:
    """Each order twice, the second time backwards: over two turns everybody's mean place is the same, and in
    the end everybody has been at every place."""
    start = index // 2 % len(entries)
    order = [*entries[start:], *entries[:start]]
    return order[::-1] if index % 2 else order


def rotate(
    entries: Iterable[Entry], items: Sequence[Item], run: Callable[[Entry, Item], Got]
) -> dict[Entry, list[Got]]:
    """Every item on every entry, in turn."""
    order = list(dict.fromkeys(entries))
    found: dict[Entry, list[Got]] = {entry: [] for entry in order}
    for index, item in enumerate(items):
        for entry in turn(order, index):
            found[entry].append(run(entry, item))
    return found


def tune(
    start: Iterable[Entry],
    neighbours: Callable[[Entry], Iterable[Entry]],
    speeds: Callable[[Sequence[Entry], Sequence[Item]], Mapping[Entry, float]],
    items: Sequence[Item],
    duel: Sequence[Item] = (),
) -> tuple[Entry, dict[Entry, float]]:
    """The fastest entry, and the speeds of all that were tried, in units of the first rotation's.

    It starts with the best of `start`, on all items, and climbs: the best against its neighbours, until none
    of them is faster, so that it is never at the edge of what was tried. The fastest of several is often so
    by chance: whoever seems faster than the best takes its place only by a duel, on items of its own, or else
    on all items twice.
    """
    order = list(dict.fromkeys(start))
    tried = dict(speeds(order, items)) if len(order) > 1 else {}
    best = max(order, key=lambda entry: tried.get(entry, 0.0))
    met = {best}
    while new := [each for each in neighbours(best) if each not in met]:
        tried |= _in_units(tried.get(best, 0.0), best, speeds([best, *new], items))
        met |= set(new)
        for challenger in sorted(new, key=tried.__getitem__, reverse=True):
            if tried[challenger] > tried[best]:
                found = speeds([best, challenger], duel or [*items, *items])
                tried |= _in_units(tried[best], best, found)
                best = max(best, challenger, key=tried.__getitem__)
    return best, tried


def _in_units(known: float, best: Entry, found: Mapping[Entry, float]) -> dict[Entry, float]:
    """The speeds of a rotation as they are where the best has its known speed: a machine has slow minutes.
    0: not known, or it failed."""
    scale = known / found[best] if known > 0 and found[best] > 0 else 1.0
    return {each: scale * speed for each, speed in found.items()}


def next_to(ladder: Sequence[Item], value: Item) -> list[Item]:
    """The values before and behind this one."""
    place = ladder.index(value)
    return [*ladder[max(0, place - 1) : place], *ladder[place + 1 : place + 2]]
