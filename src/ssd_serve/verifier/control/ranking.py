"""The candidate nodes of a round over all requests, best first, and the leaves that could still grow.

Knows replicas and how far each request may go; it does not decide how many nodes are worth verifying.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ssd_serve.cache.node import Node
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.verifier.scheduler import ScheduledChunk

RankedNode = tuple[float, int, int, int]
"""Reach, index of the part, token, and its parent's place among the ranked nodes of that part; -1: the
root."""
_Entry = tuple[float, int, int, Node, int, int]
"""Negative log reach, order of arrival, index of the part, parent, its place, which of its children."""

_Tree = tuple[SpeculationTree, int, float, frozenset[int], float]
"""A tree, its deepest level, the log reach of its root, what ends its text, and most nodes of it."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Result of `rank`: candidate `nodes` by falling reach, parents first, and the remaining reach of the
    best `leaves`. `trees`: decoding requests that nodes could help; `missed`: those of them without growth
    below the root."""

    nodes: list[RankedNode]
    leaves: npt.NDArray[np.float64]
    missed: int
    trees: int


def rank(
    chunks: Sequence[ScheduledChunk],
    most: int,
    context: int,
    width: int,
    least: float = 0.0,
    instant: int = 0,
) -> Ranking:
    """Rank at most `most` nodes over all decoding requests, with a reach of at least `least`, and the `width`
    best leaves.

    `instant` sources (bits) are never awaited. A node that another source proposed remains a leaf while only
    instant sources have expanded it: the other source may predict better. A node that only instant sources
    proposed is not a leaf, because other sources expand only nodes of their own.

    No node lies beyond `max_tokens` or the context, where its row could not matter.
    """
    trees, leaves = _trees(chunks if most else (), context, instant)
    missed = len(leaves)
    # One entry for each node that was looked at: its best child that is not taken yet.
    heap: list[_Entry] = []
    for index, (tree, deepest, base, _, _) in trees.items():
        if tree.root.tokens and tree.root.depth < deepest:
            heap.append((base - tree.root.cumulatives[0], len(heap), index, tree.root, -1, 0))
    heapq.heapify(heap)
    order = len(heap)
    ranked: list[RankedNode] = []
    counts = [0] * len(chunks)
    while heap and len(ranked) < most:
        cost, _, index, parent, above, rank = heap[0]
        reach = math.exp(-cost)
        if reach < least:
            break
        tree, deepest, base, ends, most_here = trees[index]
        if counts[index] >= most_here:
            heapq.heappop(heap)
            continue
        tokens, place, deeper = parent.tokens, counts[index], parent.depth + 1 < deepest
        token = tokens[rank]
        ranked.append((reach, index, token, above))
        counts[index] = place + 1
        order += 2
        node = tree.expanded_child(parent, rank) if deeper else None
        rank += 1
        if rank < len(tokens):
            heapq.heapreplace(heap, (base - parent.cumulatives[rank], order, index, parent, above, rank))
        else:
            heapq.heappop(heap)
        if node is not None:
            heapq.heappush(heap, (base - node.cumulatives[0], order + 1, index, node, place, 0))
            if instant and not node.sources & ~instant and parent.sources_of(token) & ~instant:
                leaves.append(reach * _left(node))
        elif deeper and token not in ends and (not instant or parent.sources_of(token) & ~instant):
            leaves.append(reach)
    if instant:
        leaves.sort(reverse=True)
    return Ranking(ranked, np.array(leaves[:width]), missed, len(trees))


def _left(node: Node) -> float:
    """Return the probability that the token after the node is none of its candidates."""
    return max(0.0, 1.0 - sum([math.exp(each - node.cumulative) for each in node.cumulatives]))


def _trees(
    chunks: Sequence[ScheduledChunk], context: int, instant: int
) -> tuple[dict[int, _Tree], list[float]]:
    """Return the trees by chunk, and the uncovered probability of roots that only `instant` sources expanded."""
    trees: dict[int, _Tree] = {}
    missed: list[float] = []
    for index, chunk in enumerate(chunks):
        request, replica = chunk.request, chunk.request.replica
        if replica is None or not request.decoding or not request.drafted:
            continue
        deepest = min(request.remaining_tokens - 1, context - len(request.tokens))
        if deepest > 0:
            tree = replica.tree
            limit = request.options.max_nodes
            most = math.inf if limit is None else limit
            trees[index] = tree, tree.root.depth + deepest, tree.root.cumulative, request.stop_token_ids, most
            if not tree.root.tokens or (instant and not tree.root.sources & ~instant):
                missed.append(_left(tree.root))
    return trees, missed
