"""Which drafter has which request: one of each team, of those that guess with the same model.

A request moves where drafters come, go, lag or have more than others. Knows links and teams; not what
drafters say.
"""

from collections.abc import Iterable, Iterator, Mapping

from ssd_serve.verifier.drafts.link import Link
from ssd_serve.verifier.drafts.links import Links
from ssd_serve.verifier.drafts.teams import Move, Team
from ssd_serve.verifier.request import Request

Requests = Mapping[int, Request]
"""The open ones, by number."""


class Homes:
    """The teams of some drafters, and their requests."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._teams: dict[tuple[bool, str], Team] = {}
        self.moves = 0
        """Requests that went from one drafter to another."""

    @property
    def sources(self) -> set[str]:
        """The draft models of the drafters beside the target."""
        return {source for synchronous, source in self._teams if not synchronous}

    def count(self, link: Link) -> int:
        """How many requests a drafter has."""
        return link.team.requests(link.number) if link.team is not None else 0

    def drafts(self, link: Link, request: int) -> bool:
        """Whether a request is this drafter's."""
        return link.team is not None and link.team.home(request) == link.number

    def of(self, request: int) -> Iterator[Link]:
        """The drafters of a request."""
        for team in self._teams.values():
            home = team.home(request)
            if home is not None:
                yield self._links[home]

    def open(self, request: Request) -> None:
        """A request begins, or begins again: each team drafts for it."""
        for team in self._teams.values():
            team.give(request.number)
        for link in self.of(request.number):
            self._links.attempt(link, link.open, request)

    def close(self, request: Request) -> None:
        """A request has ended."""
        for team in self._teams.values():
            home = team.drop(request.number)
            if home is not None:
                link = self._links[home]
                self._links.attempt(link, link.close, request)

    def join(self, link: Link, requests: Requests) -> None:
        """A drafter has joined."""
        link.team = self._teams.setdefault(_key(link), Team())
        drafted = [number for number, request in requests.items() if request.drafted]
        self._move(link.team.join(link.number, drafted), requests)

    def leave(self, link: Link, requests: Requests) -> None:
        """A drafter is gone."""
        for request in requests.values():
            if request.replica is not None:
                request.replica.restart(link.number)
        if link.team is not None:
            self._move(link.team.leave(link.number), requests)
            if not len(link.team):
                del self._teams[_key(link)]

    def balance(self, requests: Requests) -> None:
        """Let a few requests move where drafters lag, or have more than others."""
        for link in self._links:
            if link.team is not None:
                link.team.judge(link.number, link.liveness.step_s, link.lags())
        for team in self._teams.values():
            self._move(team.balance(), requests)

    def _move(self, moves: Iterable[Move], requests: Requests) -> None:
        """Under the same epoch: the replica keeps its tree, and its new drafter's merges with it."""
        for move in moves:
            request = requests.get(move.request)
            if request is None:
                continue
            self.moves += move.origin is not None
            if move.origin is not None and move.origin in self._links:
                origin = self._links[move.origin]
                self._links.attempt(origin, origin.close, request)
            home = self._links[move.home]
            self._links.attempt(home, home.open, request)


def _key(link: Link) -> tuple[bool, str]:
    return link.synchronous, link.source
