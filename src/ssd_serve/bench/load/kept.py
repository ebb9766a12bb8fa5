"""What `ssd bench load` has measured so far, kept in a folder so that a later sitting goes on from it.

Everything has a name: what is known by its name is told and not measured again. Knows files and names, not
servers.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from ssd_serve.bench.journal import Journal, TimeGiven, read_kept, write_kept
from ssd_serve.bench.load.outcome import Burst
from ssd_serve.bench.load.sets import Sets

_SITTING = "sitting"

Figures = Mapping[str, object]
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
        self._figures: Journal[Figures] = Journal(folder / "figures.jsonl", subject, dict[str, object])
        self._sets = folder / "requests.json"
        self._given = given
        self._sittings_before = self._figures.known(_SITTING)
        self.sittings = self._sittings_before
        """That have measured anything; this one is among them as soon as it has."""

    @property
    def earlier(self) -> int:
        """Pairs that sittings before this one measured."""
        return self._pairs.earlier

    def knows(self, pairs: Iterable[str]) -> bool:
        """Whether all of these are known."""
        return all(self._pairs.known(name) for name in pairs)

    async def pair(self, name: str, measure: Callable[[], Awaitable[list[Burst]]]) -> list[Burst]:
        """One set of requests on every server. Raises `OutOfTimeError` rather than begin too late."""
        return await self._known_or_measured(self._pairs, name, measure)

    async def figures(self, name: str, measure: Callable[[], Awaitable[Figures]]) -> Figures:
        """What else is measured. Raises `OutOfTimeError` rather than begin too late."""
        return await self._known_or_measured(self._figures, name, measure)

    def sets(self, choose: Callable[[], ChosenSets]) -> ChosenSets:
        """The requests of all sittings."""
        known = read_kept(self._sets, ChosenSets)
        if known is None:
            known = choose()
            write_kept(self._sets, known)
        return known

    async def _known_or_measured(
        self, journal: Journal[Found], name: str, measure: Callable[[], Awaitable[Found]]
    ) -> Found:
        known = journal.next(name)
        if known is not None:
            return known
        self._given.require()
        found = await measure()
        if self.sittings == self._sittings_before:
            self.sittings += 1
            self._figures.add(_SITTING, {})
        journal.add(name, found)
        return found
