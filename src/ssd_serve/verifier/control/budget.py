"""The budget: which draft tokens a round verifies.

`rank` lists candidate nodes over all requests by reach. `choose` takes the best of them. A node is verified if
its reach exceeds the long-run rate multiplied by the time that its row adds. With `r` tokens per second, a second
is worth `r` tokens (renewal reward). Plain numpy.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ssd_serve.base.messages import FixedShape
from ssd_serve.cache.node import Node
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.verifier.scheduler import ScheduledChunk

FloatArray = npt.NDArray[np.float64]
RankedNode = tuple[float, int, int, int]
"""Reach, index of the chunk, token, and its parent's place among the ranked nodes of that chunk; -1: the
root."""
_Entry = tuple[bool, float, int, int, Node, int, int]
"""False if forced, negative log reach, order of arrival, index of the chunk, parent, its place, which of its
children."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Result of `rank`."""

    nodes: list[RankedNode]
    """Candidates by falling reach, parents first; those of fixed shapes before all others."""
    leaves: FloatArray
    """Remaining reach of the best leaves, which a draft step could expand."""
    missed: int
    """Decoding requests without growth below their root."""
    trees: int
    """Decoding requests that nodes could help."""
    forced: int = 0
    """Nodes of fixed shapes."""
    incomplete: bool = False
    """True if a fixed shape lacks nodes that drafters could still grow."""


class _Tree(NamedTuple):
    tree: SpeculationTree
    deepest: int
    base: float
    """Log reach of the root."""
    ends: frozenset[int]
    """Tokens that end the text."""
    most: float
    """Most nodes."""
    shape: FixedShape | None


def rank(
    chunks: Sequence[ScheduledChunk],
    most: int,
    context: int,
    width: int,
    least: float = 0.0,
    instant: int = 0,
    shapes: Mapping[int, FixedShape] | None = None,
) -> Ranking:
    """Rank at most `most` nodes over all decoding requests, with a reach of at least `least`, and the `width`
    best leaves.

    `shapes` are fixed shapes by index of the chunk: their nodes come first and count neither for `most` nor for
    `least`. `instant` sources (bits) are never awaited. A node that another source proposed remains a leaf while
    only instant sources have expanded it. A node that only instant sources proposed is not a leaf, because other
    sources expand only nodes of their own. No node lies beyond `max_tokens` or the context.
    """
    shapes = shapes or {}
    trees, leaves = _trees(chunks if most or shapes else (), context, instant, shapes)
    missed = len(leaves)
    growable = {index for index, each in trees.items() if _unexpanded(each.tree.root, instant)}
    # One entry for each node that was looked at: its best child that is not taken yet.
    heap: list[_Entry] = []
    for index, each in trees.items():
        root = each.tree.root
        if root.tokens and root.depth < each.deepest and (most or each.shape):
            heap.append((each.shape is None, each.base - root.cumulatives[0], len(heap), index, root, -1, 0))
    heapq.heapify(heap)
    order, free = len(heap), 0
    ranked: list[RankedNode] = []
    counts = [0] * len(chunks)
    while heap:
        by_cost, cost, _, index, parent, above, child = heap[0]
        reach = math.exp(-cost)
        if by_cost and (reach < least or free >= most):
            break
        tree, deepest, base, ends, most_here, shape = trees[index]
        if counts[index] >= most_here:
            heapq.heappop(heap)
            continue
        tokens, place, deeper = parent.tokens, counts[index], parent.depth + 1 < deepest
        token = tokens[child]
        ranked.append((reach, index, token, above))
        counts[index] = place + 1
        free += by_cost
        order += 2
        node = tree.expanded_child(parent, child) if deeper else None
        child += 1
        if child < len(tokens) and not (shape and shape.chain):
            cost = base - parent.cumulatives[child]
            heapq.heapreplace(heap, (by_cost, cost, order, index, parent, above, child))
        else:
            heapq.heappop(heap)
        if node is not None:
            heapq.heappush(heap, (by_cost, base - node.cumulatives[0], order + 1, index, node, place, 0))
            if instant and not node.sources & ~instant and parent.sources_of(token) & ~instant:
                leaves.append(reach * _left(node))
        elif deeper and token not in ends and (not instant or parent.sources_of(token) & ~instant):
            leaves.append(reach)
            growable.add(index)
    if instant or shapes:
        leaves.sort(reverse=True)
    forced = sum([counts[index] for index, each in trees.items() if each.shape])
    incomplete = any(
        each.shape and counts[index] < each.most for index, each in trees.items() if index in growable
    )
    return Ranking(ranked, np.array(leaves[:width]), missed, len(trees), forced, incomplete)


def _unexpanded(root: Node, instant: int) -> bool:
    return not root.tokens or bool(instant and not root.sources & ~instant)


def _left(node: Node) -> float:
    """Return the probability that the token after the node is none of its candidates."""
    return max(0.0, 1.0 - sum([math.exp(each - node.cumulative) for each in node.cumulatives]))


def _trees(
    chunks: Sequence[ScheduledChunk], context: int, instant: int, shapes: Mapping[int, FixedShape]
) -> tuple[dict[int, _Tree], list[float]]:
    """Return the trees by chunk, and the uncovered probability of roots that only `instant` sources expanded."""
    trees: dict[int, _Tree] = {}
    missed: list[float] = []
    for index, chunk in enumerate(chunks):
        request, replica = chunk.request, chunk.request.replica
        if replica is None or not request.decoding or not request.drafted:
            continue
        deepest = min(request.remaining_tokens - 1, context - len(request.tokens))
        if deepest <= 0:
            continue
        root, shape = replica.tree.root, shapes.get(index)
        limit = request.options.max_nodes
        most = math.inf if limit is None else limit
        if shape is not None:
            most = min(most, shape.nodes, deepest if shape.chain else math.inf)
        trees[index] = _Tree(
            replica.tree, root.depth + deepest, root.cumulative, request.stop_token_ids, most, shape
        )
        if _unexpanded(root, instant):
            missed.append(_left(root))
    return trees, missed


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """Number of best nodes to verify, with the expected tokens and seconds of the round."""

    nodes: int
    tokens: float
    seconds: float
    held_back: bool = False
    """True if more nodes would pay but exceed the time per token."""


def choose(
    reaches: FloatArray,
    roots: int,
    seconds: FloatArray,
    rate: float,
    max_tpot_s: float = math.inf,
    forced: int = 0,
) -> NodeChoice:
    """Return the best number of nodes to verify in a round with `roots` roots, at least the `forced` ones.

    `reaches` [nodes] falls after the forced ones; `seconds` [most + 1], most <= nodes, is what the round takes
    with 0, 1, ... most nodes. `rate` is in tokens a second; 0 means unknown, then the round's own rate is
    maximised. Rounds in which a request's token takes longer than `max_tpot_s` are left out, unless all do: then
    the shortest is taken.
    """
    tokens = roots + np.concatenate(([0.0], np.cumsum(reaches[: len(seconds) - 1])))  # [most + 1]
    value = tokens - rate * seconds if rate > 0 else tokens / np.maximum(seconds, 1e-9)
    paying = 0
    if max_tpot_s < math.inf and not forced:
        paying = int(np.argmax(value))
        tpot_s = seconds * roots / np.maximum(tokens, 1e-9)
        kept = tpot_s <= max_tpot_s
        value = np.where(kept, value, -np.inf) if kept.any() else -tpot_s
    forced = min(forced, len(seconds) - 1)
    best = forced + int(np.argmax(value[forced:]))
    return NodeChoice(best, float(tokens[best]), float(seconds[best]), best < paying)


_RATE_MEMORY = 0.05
"""Weight of a round in the long-run rate: the rate follows a change within some twenty rounds."""
_LONGEST_ROUND = 3.0
"""A round counts for at most this multiple of the average: a descheduled process is not a slow device."""


class Rate:
    """Long-run committed tokens a second, as an average that follows the number of decoding requests."""

    def __init__(self) -> None:
        self._tokens_per_request = 0.0
        self._seconds = 0.0

    def observe(self, requests: int, tokens: float, seconds: float) -> None:
        """A round of `requests` decoding requests committed `tokens` tokens in `seconds`, waits included."""
        if requests == 0 or seconds <= 0:
            return
        each = tokens / requests
        if self._seconds == 0.0:
            self._tokens_per_request, self._seconds = each, seconds
            return
        self._tokens_per_request += _RATE_MEMORY * (each - self._tokens_per_request)
        self._seconds += _RATE_MEMORY * (min(seconds, _LONGEST_ROUND * self._seconds) - self._seconds)

    @property
    def tokens_a_round(self) -> float:
        """Committed tokens of a request in a round; 1 while unknown."""
        return max(1.0, self._tokens_per_request)

    @property
    def seconds_a_round(self) -> float:
        """Seconds of a round; 0 while unknown."""
        return self._seconds

    def value(self, requests: int) -> float:
        """Tokens a second with `requests` decoding requests; 0 while unknown."""
        return self._tokens_per_request * requests / self._seconds if self._seconds else 0.0
