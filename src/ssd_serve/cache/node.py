"""A node of the speculation tree, and an expansion that nobody has read. Knows its neighbours, no tree."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol


class Unread(Protocol):
    """An expansion whose candidates can be read later. `name` is its node's; `parent` and `step` lead to it,
    but for a root. `size` candidates, which may be none."""

    @property
    def name(self) -> int: ...
    @property
    def parent(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def size(self) -> int: ...
    def read(self) -> tuple[Sequence[int], Sequence[float]]:
        """The candidates, best first, and their conditional log-probabilities."""
        ...


class Node:
    """One guessed token at one position, child of another node (the root: the last committed token).

    `cumulative` sums the conditional log-probabilities since the request was opened: the reach of a node
    below any later root is a difference of two of them. `depth` counts likewise. `tokens` are the candidates
    that may follow, best first, with their own `cumulatives`; `children` are those that were looked at.
    `proposed` is who named the candidates: a source as a bit, or what each of several has said of them.
    """

    __slots__ = (
        "children",
        "cumulative",
        "cumulatives",
        "depth",
        "name",
        "parent",
        "proposed",
        "token",
        "tokens",
    )

    def __init__(self, name: int, token: int, parent: "Node | None", cumulative: float) -> None:
        self.name = name
        self.token = token
        self.parent = parent
        self.cumulative = cumulative
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.tokens: list[int] = []
        self.cumulatives: list[float] = []
        self.children: dict[int, Node] = {}
        self.proposed: int | dict[int, dict[int, float]] = 0

    @property
    def expanded(self) -> bool:
        """Whether its candidates are known."""
        return bool(self.tokens)

    def proposers(self, token: int) -> int:
        """Who has named this candidate, as bits."""
        proposed = self.proposed
        if isinstance(proposed, int):
            return proposed
        return sum(source for source, values in proposed.items() if token in values)

    @property
    def sources(self) -> int:
        """All who have named candidates, as bits."""
        return self.proposed if isinstance(self.proposed, int) else sum(self.proposed)

    def said(self) -> dict[int, dict[int, float]]:
        """What each source has said, by token."""
        if not isinstance(self.proposed, int):
            return self.proposed
        values = (cumulative - self.cumulative for cumulative in self.cumulatives)
        return {self.proposed: dict(zip(self.tokens, values, strict=True))}


def move_below(node: Node, by: float) -> int:
    """Make everything below a node more or less probable, but nothing more than its parent, by rounding.
    Returns how many candidates that were."""
    waiting, touched = [node], 0
    while waiting:
        each = waiting.pop()
        touched += 1 + len(each.cumulatives)
        most = each.cumulative
        each.cumulatives = [min(value + by, most) for value in each.cumulatives]
        for child in each.children.values():
            child.cumulative = min(child.cumulative + by, most)
            waiting.append(child)
    return touched


Estimates = Mapping[int, Mapping[int, float]]
"""By source, as a bit: log-probabilities of the candidates that it has named."""
_PRIOR = 2.0
"""Choices that each source has borne out before anything is known, as it were."""
_MEMORY = 64.0
"""Choices that are remembered, about."""
_LEAST = 1e-300


class SourceWeights:
    """How much each source counts where several have named candidates: of one request, since it began."""

    def __init__(self) -> None:
        self._borne_out: dict[int, float] = {}

    def share(self, source: int, sources: Collection[int]) -> float:
        """The weight of one of these sources; theirs sum to 1."""
        counts = {each: self._borne_out.get(each, _PRIOR) for each in sources}
        return counts[source] / sum(counts.values())

    def observe(self, estimates: Estimates, token: int) -> None:
        """The target chose `token` where several had named candidates; tells nothing where none named it."""
        named = {
            source: self.share(source, estimates) * math.exp(values[token])
            for source, values in estimates.items()
            if token in values
        }
        whole = sum(named.values())
        if not whole:
            return
        for source in estimates:
            count = self._borne_out.get(source, _PRIOR) * (1 - 1 / _MEMORY)
            self._borne_out[source] = count + named.get(source, 0.0) / whole


def better(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    """What one source has said twice: of a token that it has named again the better estimate."""
    return {**one, **{token: max(value, one.get(token, value)) for token, value in other.items()}}


def blend(estimates: Estimates, weights: SourceWeights) -> dict[int, float]:
    """The mixture's log-probabilities, by token."""
    sums: dict[int, float] = {}
    for source, values in estimates.items():
        share = weights.share(source, estimates)
        for token, value in values.items():
            sums[token] = sums.get(token, 0.0) + share * math.exp(value)
    return {token: math.log(max(value, _LEAST)) for token, value in sums.items()}
