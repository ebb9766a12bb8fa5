"""What `ssd bench load` has measured so far, kept in a folder so that a later sitting goes on from it.

Everything has a name: a name that is known is told and not measured again. Knows files and names, not servers.
"""

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from ssd_serve.bench.journal import Journal, TimeGiven, read_kept, write_kept
from ssd_serve.bench.load.outcome import Burst
from ssd_serve.bench.load.sets import Sets

_SITTING = "sitting"

Figures = dict[str, object]
Found = TypeVar("Found")


class ChosenSets(msgspec.Struct, frozen=True):
    """The requests that count, and what is told of the trace among them."""

    sets: Sets
    trace: Figures | None = None


class KeptLoad:
    """Pairs of bursts and single figures by their names, in a folder.

    `subject` names plan and code: a folder of others is refused. Raises `UserError` for files that cannot be
    read.
    """

    def __init__(self, folder: Path, subject: str, given: TimeGiven) -> None:
        self._pairs = Journal(folder / "pairs.jsonl", subject, list[Burst])
        self._figures = Journal(folder / "figures.jsonl", subject, Figures)
        self._capacities = folder / "capacities.json"
        self._sets = folder / "requests.json"
        self._given = given

    @property
    def earlier(self) -> int:
        """Pairs that sittings before this one measured."""
        return self._pairs.earlier

    def count_sitting(self) -> int:
        """How many sittings there were, with this one, which has started servers."""
        known = 0
        while self._figures.next(_SITTING) is not None:
            known += 1
        self._figures.add(_SITTING, {})
        return known + 1

    def knows(self, pairs: Iterable[str]) -> bool:
        """Whether all of these are known."""
        return all(self._pairs.known(name) for name in pairs)

    async def pair(self, name: str, measure: Callable[[], Awaitable[list[Burst]]]) -> list[Burst]:
        """One set of requests on every server. Raises `OutOfTimeError` rather than begin too late."""
        return await _known_or_measured(self._pairs, name, measure, self._given)

    async def figures(self, name: str, measure: Callable[[], Awaitable[Figures]]) -> Figures:
        """What else is measured. Raises `OutOfTimeError` rather than begin too late."""
        return await _known_or_measured(self._figures, name, measure, self._given)

    async def capacities(self, measure: Callable[[], Awaitable[dict[str, float]]]) -> dict[str, float]:
        """Requests a second of each server, by which all sittings offer theirs. Raises `OutOfTimeError`
        rather than begin too late."""
        known = read_kept(self._capacities, dict[str, float])
        if known is None:
            self._given.require()
            known = await measure()
            write_kept(self._capacities, known)
        return known

    def sets(self, choose: Callable[[], ChosenSets]) -> ChosenSets:
        """The requests of all sittings."""
        known = read_kept(self._sets, ChosenSets)
        if known is None:
            known = choose()
            write_kept(self._sets, known)
        return known


async def _known_or_measured(
    journal: Journal[Found], name: str, measure: Callable[[], Awaitable[Found]], given: TimeGiven
) -> Found:
    known = journal.next(name)
    if known is not None:
        return known
    given.require()
    found = await measure()
    journal.add(name, found)
    return found
