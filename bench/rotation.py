"""Who is measured when: everybody in turn on every prompt, and shapes that are tuned like that too.

What a machine does to one of them in a minute it does to all. Knows neither engines nor devices.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

Entry = TypeVar("Entry")
Item = TypeVar("Item")
Got = TypeVar("Got")

_FEWEST = 4


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
    """The fastest entry, with the last measured speeds of all that were tried.

    First by halving: everybody on a few items, then the faster half on twice as many. Then by climbing: the
    best against its neighbours on all items, until none of them is faster. So it is never at the edge of what
    was tried. The fastest of several is often so by chance: a neighbour takes the place of the best only when
    it wins a duel too, on items of its own, or else on all items twice.
    """
    alive, tried = list(dict.fromkeys(start)), dict[Entry, float]()
    few = _FEWEST
    while len(alive) > 1:
        found = speeds(alive, items[:few])
        tried |= found
        alive = sorted(alive, key=found.__getitem__, reverse=True)[: len(alive) // 2]
        few = min(len(items), 2 * few)
    (best,) = alive
    beaten = {best}
    while True:
        new = [each for each in neighbours(best) if each not in beaten]
        if not new:
            return best, tried
        found = speeds([best, *new], items)
        tried |= found
        beaten |= set(new)
        fastest = max(found, key=found.__getitem__)
        if fastest != best:
            found = speeds([best, fastest], duel or [*items, *items])
            tried |= found
            best = max(found, key=found.__getitem__)


def next_to(ladder: Sequence[Item], value: Item) -> list[Item]:
    """The values before and behind this one."""
    place = ladder.index(value)
    return [*ladder[max(0, place - 1) : place], *ladder[place + 1 : place + 2]]
