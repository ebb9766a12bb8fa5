"""The candidate nodes of a round over all requests, best first, and the leaves that could still grow.

Knows replicas and how far each request may go; it does not decide how many nodes are worth verifying.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ssd_serve.cache.tree import Node
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


def rank(parts: Sequence[Part], most: int, context: int, width: int) -> Ranking:
    """Rank at most `most` nodes over all decoding requests, and the `width` best leaves.

    No node lies where its row could not matter any more: beyond `max_tokens` or the context.
    """
    ranked: list[RankedNode] = []
    leaves: list[float] = []
    missed = 0
    for index, part in enumerate(parts):
        if most and part.request.decoding:
            missed += _rank_one(index, part.request, most, context, ranked, leaves)
    ranked.sort(key=lambda item: -item[0])
    leaves.sort(reverse=True)
    return Ranking(ranked[:most], np.array(leaves[:width]), missed)


def _rank_one(
    index: int, request: Request, most: int, context: int, ranked: list[RankedNode], leaves: list[float]
) -> bool:
    """Add one request's nodes and leaves; True when its root could grow and has not."""
    deepest = min(request.left - 1, context - len(request.tokens))
    if request.replica is None or deepest <= 0:
        return False
    tree = request.replica.tree
    if not tree.root.expanded:
        leaves.append(1.0)
    for node in tree.best(most, deepest):
        reach = tree.reach(node)
        ranked.append((reach, index, node))
        if not node.expanded and tree.depth(node) < deepest and node.token not in request.ends:
            leaves.append(reach)
    return not tree.root.expanded
