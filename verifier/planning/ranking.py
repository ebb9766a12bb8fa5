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
from ssd_serve.verifier.scheduler import ScheduledChunk

RankedNode = tuple[float, int, int, int]
"""Reach, index of the part, token, and its parent's place among the ranked nodes of that part; -1: the
root."""
_Entry = tuple[float, int, int, Node, int, int]
"""Negative log reach, order of arrival, index of the part, parent, its place, which of its children."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Candidate nodes by falling reach, parents first; the reach of the best leaves; decoding requests that a
    node could help (`trees`), and those of them below whose root nothing has grown."""

    nodes: list[RankedNode]
    leaves: npt.NDArray[np.float64]
    missed: int
    trees: int


def rank(parts: Sequence[ScheduledChunk], most: int, context: int, width: int, least: float = 0.0) -> Ranking:
    """Rank at most `most` nodes over all decoding requests, of a reach of at least `least`, and the `width`
    best leaves.

    No node lies where its row could not matter any more: beyond `max_tokens` or the context.
    """
    trees, leaves = _trees(parts if most else (), context)
    missed = len(leaves)
    # One entry for each node that was looked at: its best child that is not taken yet.
    heap: list[_Entry] = []
    for index, (tree, deepest, base) in trees.items():
        if tree.root.tokens and tree.root.depth < deepest:
            heap.append((base - tree.root.cumulatives[0], len(heap), index, tree.root, -1, 0))
    heapq.heapify(heap)
    order = len(heap)
    ranked: list[RankedNode] = []
    counts = [0] * len(parts)
    while heap and len(ranked) < most:
        cost, _, index, parent, above, rank = heap[0]
        reach = math.exp(-cost)
        if reach < least:
            break
        tree, deepest, base = trees[index]
        token, place = parent.tokens[rank], counts[index]
        ranked.append((reach, index, token, above))
        counts[index] = place + 1
        order += 2
        node = tree.expanded_child(parent, rank) if parent.depth + 1 < deepest else None
        rank += 1
        if rank < len(parent.tokens):
            heapq.heapreplace(heap, (base - parent.cumulatives[rank], order, index, parent, above, rank))
        else:
            heapq.heappop(heap)
        if parent.depth + 1 >= deepest:
            continue
        if node is not None:
            heapq.heappush(heap, (base - node.cumulatives[0], order + 1, index, node, place, 0))
        elif token not in parts[index].request.ends:
            leaves.append(reach)
    return Ranking(ranked, np.array(leaves[:width]), missed, len(trees))


def _trees(
    parts: Sequence[ScheduledChunk], context: int
) -> tuple[dict[int, tuple[SpeculationTree, int, float]], list[float]]:
    """By part: its tree, its deepest level and the log reach of its root; and the reach of roots without
    growth."""
    trees: dict[int, tuple[SpeculationTree, int, float]] = {}
    missed: list[float] = []
    for index, part in enumerate(parts):
        request = part.request
        deepest = _deepest(request, context)
        if part.request.decoding and request.replica is not None and deepest > 0:
            tree = request.replica.tree
            trees[index] = (tree, tree.root.depth + deepest, tree.root.cumulative)
            if not tree.root.expanded:
                missed.append(1.0)
    return trees, missed


def _deepest(request: Request, context: int) -> int:
    return min(request.left - 1, context - len(request.tokens))
