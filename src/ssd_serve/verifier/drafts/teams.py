"""Who drafts for which request: drafters with the same draft model are a team, and share requests by load.

A load is the number of requests times how slow their drafter is. Requests move only where that lowers the
greater of two loads, so that moving ends by itself. Plain Python: knows numbers of drafters and of requests,
no links and no messages.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_MOVES = 2
"""Of one balancing: a request that moves costs its new drafter a read of its text."""
_SLOWER, _AS_FAST = 2.0, 1.5
"""A drafter counts as slower than the fastest from the first ratio of their step times on, until the second:
step times are measured on busy machines."""
_CHANGED = 1.5


@dataclass(frozen=True, slots=True)
class Move:
    """`request` goes from the drafter `origin` (None: it had none) to the drafter `home`."""

    request: int
    origin: int | None
    home: int


@dataclass(slots=True)
class _Member:
    requests: set[int] = field(default_factory=set[int])
    step_s: float = 0.0
    weight: float = 1.0
    lagging: bool = False

    def load(self, more: int = 0) -> float:
        return (len(self.requests) + more) * self.weight


class Team:
    """Drafters, and which of them has which request. While it has members, every open request has one."""

    def __init__(self) -> None:
        self._members: dict[int, _Member] = {}
        self._homes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._members)

    def home(self, request: int) -> int | None:
        """The drafter of a request."""
        return self._homes.get(request)

    def requests(self, member: int) -> int:
        """How many requests a drafter has."""
        return len(self._members[member].requests)

    def load(self, member: int, more: int = 0) -> float:
        """A drafter's load, with so many requests more."""
        return self._members[member].load(more)

    def lags(self, member: int) -> bool:
        """Whether a drafter is said to lag."""
        return self._members[member].lagging

    def join(self, member: int, requests: Iterable[int]) -> list[Move]:
        """A drafter has come; it takes those of the open `requests` that nobody has. Others come to it as
        `balance` finds them."""
        self._members[member] = _Member()
        return [Move(each, None, self._settle(each)) for each in requests if each not in self._homes]

    def leave(self, member: int) -> list[Move]:
        """A drafter has gone: its requests go to the others at once, if there are any."""
        left = self._members.pop(member, None)
        lost = sorted(left.requests) if left is not None else []
        for request in lost:
            del self._homes[request]
        return [Move(each, member, self._settle(each)) for each in lost] if self._members else []

    def give(self, request: int) -> int | None:
        """The drafter of a new request, or of one that begins again; None: there is nobody."""
        if not self._members:
            return None
        home = self._homes.get(request)
        return self._settle(request) if home is None else home

    def drop(self, request: int) -> int | None:
        """A request has ended; the drafter that had it."""
        home = self._homes.pop(request, None)
        if home is not None:
            self._members[home].requests.discard(request)
        return home

    def judge(self, member: int, step_s: float, lagging: bool) -> None:
        """What is known of a drafter now: seconds of its step (0: unknown), and whether it does not keep
        up."""
        mine = self._members[member]
        mine.step_s, mine.lagging = step_s, lagging
        fastest = min((each.step_s for each in self._members.values() if each.step_s > 0), default=0.0)
        ratio = step_s / fastest if step_s > 0 else 1.0
        if ratio < _AS_FAST:
            mine.weight = 1.0
        elif ratio > _SLOWER if mine.weight == 1.0 else not 1 / _CHANGED < ratio / mine.weight < _CHANGED:
            mine.weight = ratio

    def balance(self) -> list[Move]:
        """A few requests that move now: away from who lags, else from the greatest load to the least."""
        moves: list[Move] = []
        while len(moves) < MAX_MOVES and len(self._members) > 1:
            origin = self._overloaded()
            if origin is None:
                break
            request = max(self._members[origin].requests)  # the newest: its text is likely to be short
            self._members[origin].requests.discard(request)
            moves.append(Move(request, origin, self._settle(request)))
        return moves

    def _overloaded(self) -> int | None:
        """Who should give a request away."""
        target = self._members[self._least()]
        if target.lagging:
            return None  # everybody lags: there is nowhere to go
        for number, member in self._members.items():
            if member.lagging and member.requests:
                return number
        most = max(self._members, key=lambda number: self._members[number].load())
        return most if self._members[most].load() > target.load(1) else None

    def _settle(self, request: int) -> int:
        home = self._least()
        self._members[home].requests.add(request)
        self._homes[request] = home
        return home

    def _least(self) -> int:
        members = self._members
        return min(members, key=lambda number: (members[number].lagging, members[number].load(1), number))
