"""Assignment of requests to drafters: drafters with the same draft model are a group and share requests by load.

A load is the number of requests times how slow their drafter is. Requests move only where that lowers the
greater of two loads, so that moving ends by itself. Plain Python: knows numbers of drafters and of requests,
but no connections and no messages.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_MOVES = 2
"""Most requests that one `rebalance` moves: the new drafter of a request must prefill it."""
_SLOWER, _AS_FAST = 2.0, 1.5
"""Ratio of step times above which a drafter counts as slower than the fastest, and below which it no longer
does: step times are measured on busy machines."""
_CHANGED = 1.5
"""A slow drafter's weight follows its step time once the two differ by this factor."""


@dataclass(frozen=True, slots=True)
class Reassignment:
    """`request` moves from the drafter `origin` (None: it had none) to the drafter `target`."""

    request: int
    origin: int | None
    target: int


@dataclass(slots=True)
class _Member:
    requests: set[int] = field(default_factory=set[int])
    step_s: float = 0.0
    weight: float = 1.0
    lagging: bool = False

    def load(self, more: int = 0) -> float:
        return (len(self.requests) + more) * self.weight


class DrafterGroup:
    """Drafters of one draft model with their requests. While it has members, each open request has one."""

    def __init__(self) -> None:
        self._members: dict[int, _Member] = {}
        self._assigned: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._members)

    def drafter_of(self, request: int) -> int | None:
        return self._assigned.get(request)

    def num_requests(self, member: int) -> int:
        return len(self._members[member].requests)

    def load(self, member: int, more: int = 0) -> float:
        """Return a drafter's load with `more` additional requests."""
        return self._members[member].load(more)

    def is_lagging(self, member: int) -> bool:
        return self._members[member].lagging

    def join(self, member: int, requests: Iterable[int]) -> list[Reassignment]:
        """Add a drafter, which takes the unassigned of the open `requests`. `rebalance` moves others to it."""
        self._members[member] = _Member()
        return [
            Reassignment(each, None, self._assign(each)) for each in requests if each not in self._assigned
        ]

    def leave(self, member: int) -> list[Reassignment]:
        """Remove a drafter; its requests move to the others at once, if there are any."""
        removed = self._members.pop(member, None)
        lost = sorted(removed.requests) if removed is not None else []
        for request in lost:
            del self._assigned[request]
        return [Reassignment(each, member, self._assign(each)) for each in lost] if self._members else []

    def assign(self, request: int) -> int | None:
        """Return the drafter of a request, assigning one if it has none; None for an empty group."""
        if not self._members:
            return None
        drafter = self._assigned.get(request)
        return self._assign(request) if drafter is None else drafter

    def remove(self, request: int) -> int | None:
        """Forget a request that ended; returns its drafter."""
        drafter = self._assigned.pop(request, None)
        if drafter is not None:
            self._members[drafter].requests.discard(request)
        return drafter

    def update(self, member: int, step_s: float, lagging: bool) -> None:
        """Update a drafter's step time in seconds (0: unknown) and whether it lags."""
        mine = self._members[member]
        mine.step_s, mine.lagging = step_s, lagging
        fastest = min((each.step_s for each in self._members.values() if each.step_s > 0), default=0.0)
        ratio = step_s / fastest if step_s > 0 else 1.0
        if ratio < _AS_FAST:
            mine.weight = 1.0
        elif ratio > _SLOWER if mine.weight == 1.0 else not 1 / _CHANGED < ratio / mine.weight < _CHANGED:
            mine.weight = ratio

    def rebalance(self) -> list[Reassignment]:
        """Move a few requests: away from a lagging drafter, else from the greatest load to the least."""
        moves: list[Reassignment] = []
        while len(moves) < MAX_MOVES and len(self._members) > 1:
            origin = self._overloaded()
            if origin is None:
                break
            request = max(self._members[origin].requests)  # the newest: its text is likely to be short
            self._members[origin].requests.discard(request)
            moves.append(Reassignment(request, origin, self._assign(request)))
        return moves

    def _overloaded(self) -> int | None:
        target = self._members[self._least_loaded()]
        if target.lagging:
            return None  # all drafters lag
        for number, member in self._members.items():
            if member.lagging and member.requests:
                return number
        most = max(self._members, key=lambda number: self._members[number].load())
        return most if self._members[most].load() > target.load(1) else None

    def _assign(self, request: int) -> int:
        drafter = self._least_loaded()
        self._members[drafter].requests.add(request)
        self._assigned[request] = drafter
        return drafter

    def _least_loaded(self) -> int:
        members = self._members
        return min(members, key=lambda number: (members[number].lagging, members[number].load(1), number))
