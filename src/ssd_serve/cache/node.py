"""A node of the speculation tree, and the blending of estimates from several draft sources.

Knows neighbouring nodes and log-probabilities; not the tree, messages or models.
"""

import math
from collections.abc import Collection, Mapping

Estimates = Mapping[int, Mapping[int, float]]
"""Log-probabilities by candidate token, by source (one bit each)."""
_PRIOR = 2.0
"""Pseudo-count of confirmed choices of each source before any is observed."""
_MEMORY = 64.0
"""Observed choices after which an older one has lost most of its weight."""
_LEAST = 1e-300


class Node:
    """A draft token at one position, child of another node. The root is the last committed token.

    Invariants: `tokens` are ranked by `cumulatives`, which never exceed `cumulative`; `children` holds a node
    only for tokens in `tokens`. Sums and depths count from the opening of the request, so that moving the
    root changes no node.
    """

    __slots__ = (
        "children",
        "cumulative",
        "cumulatives",
        "depth",
        "estimates",
        "name",
        "parent",
        "token",
        "tokens",
    )

    def __init__(self, name: int, token: int, parent: "Node | None", cumulative: float) -> None:
        self.name = name
        self.token = token
        self.parent = parent
        self.cumulative = cumulative
        """Sum of the conditional log-probabilities on the path to this node."""
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.tokens: list[int] = []
        """Candidates for the next token, best first; empty: the node is not expanded."""
        self.cumulatives: list[float] = []
        """`cumulative` of each candidate."""
        self.children: dict[int, Node] = {}
        """Candidates that have a `Node` object."""
        self.estimates: int | dict[int, dict[int, float]] = 0
        """The bit of the only source of the candidates, or estimates by source and token."""

    @property
    def expanded(self) -> bool:
        return bool(self.tokens)

    def sources_of(self, token: int) -> int:
        """Bits of the sources that proposed this candidate."""
        if isinstance(self.estimates, int):
            return self.estimates
        return sum(source for source, values in self.estimates.items() if token in values)

    @property
    def sources(self) -> int:
        """Bits of all sources that proposed candidates."""
        return self.estimates if isinstance(self.estimates, int) else sum(self.estimates)

    def source_estimates(self) -> dict[int, dict[int, float]]:
        """Conditional log-probabilities of the candidates, by source and token."""
        if not isinstance(self.estimates, int):
            return self.estimates
        values = (cumulative - self.cumulative for cumulative in self.cumulatives)
        return {self.estimates: dict(zip(self.tokens, values, strict=True))}


def shift_below(node: Node, by: float) -> int:
    """Add `by` to all cumulative values below a node, capped by the parent's; returns the candidates
    touched."""
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


class SourceWeights:
    """Mixture weights of the draft sources of one request, fitted by online expectation maximisation.

    A source that is confident and wrong next to another one loses weight.
    """

    def __init__(self) -> None:
        self._confirmed: dict[int, float] = {}

    def share(self, source: int, sources: Collection[int]) -> float:
        """The weight of `source` among `sources`; the weights of all of them sum to 1."""
        counts = {each: self._confirmed.get(each, _PRIOR) for each in sources}
        return counts[source] / sum(counts.values())

    def observe(self, estimates: Estimates, token: int) -> None:
        """Update the weights after the target chose `token`; no change if no source proposed it."""
        named = {
            source: self.share(source, estimates) * math.exp(values[token])
            for source, values in estimates.items()
            if token in values
        }
        total = sum(named.values())
        if not total:
            return
        for source in estimates:
            count = self._confirmed.get(source, _PRIOR) * (1 - 1 / _MEMORY)
            self._confirmed[source] = count + named.get(source, 0.0) / total


def best_of(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    """Union of two estimates of the same source, with the higher value of each token."""
    return {**one, **{token: max(value, one.get(token, value)) for token, value in other.items()}}


def blend(estimates: Estimates, weights: SourceWeights) -> dict[int, float]:
    """Log-probabilities of the mixture, by token."""
    sums: dict[int, float] = {}
    for source, values in estimates.items():
        share = weights.share(source, estimates)
        for token, value in values.items():
            sums[token] = sums.get(token, 0.0) + share * math.exp(value)
    return {token: math.log(max(value, _LEAST)) for token, value in sums.items()}
