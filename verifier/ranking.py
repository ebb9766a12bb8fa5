"""The candidate nodes of a round over all requests, best first, and the leaves that could still grow.

Knows replicas and how far each request may go; it does not decide how many nodes are worth verifying.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ssd_serve.cache.tree import Node, SpeculationTree
from ssd_serve.verifier.request import Request
from ssd_serve.verifier.scheduler import Part

RankedNode = tuple[float, int, Node]
"""Reach, index of the part, node."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Candidate nodes by falling reach, parents first; the reach of the best leaves; roots without growth."""

    nodes: list[RankedNode]
    leaves: npt.NDArray[np.float64]
    missed: int


class _Heap:
    """The next candidates of all requests: one entry for each node that was looked at, its best child not
    taken."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, int, Node, int]] = []
        self._trees: dict[int, tuple[SpeculationTree, int, float]] = {}
        self._order = 0

    def add(self, index: int, tree: SpeculationTree, deepest: int) -> None:
        """A request's tree, as far as `deepest` levels below its root."""
        self._trees[index] = (tree, tree.root.depth + deepest, tree.root.cumulative)
        self._push(index, tree.root, 0)

    def pop(self) -> tuple[float, int, Node, bool] | None:
        """Log reach, request, node of the best candidate, and whether something could grow below it."""
        if not self._entries:
            return None
        cost, _, index, parent, rank = heapq.heappop(self._entries)
        tree, deepest, _ = self._trees[index]
        node = tree.child_at(parent, rank)
        self._push(index, parent, rank + 1)
        self._push(index, node, 0)
        return -cost, index, node, not node.tokens and node.depth < deepest

    def _push(self, index: int, node: Node, rank: int) -> None:
        _, deepest, base = self._trees[index]
        if rank < len(node.tokens) and node.depth < deepest:
            self._order += 1
            heapq.heappush(self._entries, (base - node.cumulatives[rank], self._order, index, node, rank))


def rank(parts: Sequence[Part], most: int, context: int, width: int, least: float = 0.0) -> Ranking:
    """Rank at most `most` nodes over all decoding requests, of a reach of at least `least`, and the `width`
    best leaves.

    No node lies where its row could not matter any more: beyond `max_tokens` or the context.
    """
    heap = _Heap()
    ranked: list[RankedNode] = []
    leaves: list[float] = []
    for index, part in enumerate(parts if most else ()):
        request = part.request
        deepest = _deepest(request, context)
        if part.request.decoding and request.replica is not None and deepest > 0:
            tree = request.replica.tree
            heap.add(index, tree, deepest)
            if not tree.root.expanded:
                leaves.append(1.0)
    missed = len(leaves)
    while len(ranked) < most:
        found = heap.pop()
        if found is None:
            break
        log_reach, index, node, grows = found
        reach = math.exp(log_reach)
        if reach < least:
            break
        ranked.append((reach, index, node))
        if grows and node.token not in parts[index].request.ends:
            leaves.append(reach)
    return Ranking(ranked, np.array(leaves[:width]), missed)


def _deepest(request: Request, context: int) -> int:
    return min(request.left - 1, context - len(request.tokens))
