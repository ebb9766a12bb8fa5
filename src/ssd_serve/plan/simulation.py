"""Speculation in simulated time: what a pair should give, from step times and an assumed acceptance.

The trees, the order of growth, the budget and the decision to wait are the engine's own code; only the models
and the clock are not: a guess is right with a given probability, and a step takes what a cost table says.
Knows no weights, no text and no processes, and leaves out what only a real run shows: messages, guesses whose
quality varies along a text, devices that disturb each other.
"""

import heapq
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from math import exp, inf, log

import numpy as np

from ssd_serve.cache.tree import Node, SpeculationTree
from ssd_serve.drafter.frontier import Frontier, GrowthLimits
from ssd_serve.verifier.planning.budget import NodeChoice, Rate, choose
from ssd_serve.verifier.planning.cost import CostTable, HostCost, Reading
from ssd_serve.verifier.planning.growth import GrowPolicy, Never, Outlook, WhenItPays

_MAX_NODES, _MAX_EACH = 64, 8
"""Most nodes of a round, and of each request of a crowd, as in the engine."""
_PRICED = 8
"""The price of a node is the mean of the first so many."""
_WARM_UP = 0.2
"""Share of the rounds that is not counted: the rate and the growth's gain settle."""
_DEEPEST = 1 << 30
_LATER = 0.45


class Way(str, Enum):
    """Who drafts: nobody, a drafter in turns with the target, or one beside it."""

    OFF = "off"
    SYNC = "sync"
    ASYNC = "async"


@dataclass(frozen=True, slots=True)
class Guesses:
    """How good a draft is: its first guess is right with probability `first`; where all before were wrong,
    each further one with 0.45 times that.

    That is what the embedded pair shows: its first guess is right in 0.525 to 0.572 of positions, and one of
    its best four in 0.80 to 0.82.
    """

    first: float

    def probabilities(self, fan_out: int) -> list[float]:
        """Of the ranked candidates of one node to be the target's choice: [fan_out], falling."""
        later = _LATER * self.first
        rest = [(1 - self.first) * later * (1 - later) ** k for k in range(fan_out - 1)]
        return [self.first, *rest]


@dataclass(frozen=True, slots=True)
class Costs:
    """What steps take. `draft_s`: seconds until a draft step of `limits.width` nodes has arrived; `context`:
    tokens of each request."""

    target: CostTable
    host: HostCost
    draft_s: float
    limits: GrowthLimits
    context: int = 512


@dataclass(frozen=True, slots=True)
class Simulated:
    """What came out, over all requests. `rounds` are (tokens, seconds) of each."""

    tokens_per_s: float
    tokens_per_round: float
    """Of one request."""
    nodes_per_round: float
    hit_rate: float
    waited_steps: float
    """Draft steps awaited before a round."""
    node_price: float
    """Tokens that the time of one more node is worth: the reach from which on it is verified."""
    step_price: float
    """Tokens that the time of a draft step is worth."""
    rounds: tuple[tuple[int, float], ...]


def simulate(
    way: Way, guesses: Guesses, costs: Costs, requests: int, rounds: int = 400, seed: int = 0
) -> Simulated:
    """Run `rounds` rounds of `requests` requests that decode together."""
    engine = _Simulation(way, guesses, costs, requests, seed)
    played = [engine.round() for _ in range(rounds)][int(_WARM_UP * rounds) :]
    tokens, seconds = sum(each.tokens for each in played), sum(each.seconds for each in played)
    count = len(played)
    return Simulated(
        tokens_per_s=tokens / seconds,
        tokens_per_round=tokens / count / requests,
        nodes_per_round=sum(each.nodes for each in played) / count,
        hit_rate=sum(each.hits for each in played) / count / requests,
        waited_steps=sum(each.waits for each in played) / count,
        node_price=engine.node_s * tokens / seconds,
        step_price=costs.draft_s * tokens / seconds,
        rounds=tuple((each.tokens, each.seconds) for each in played),
    )


@dataclass(frozen=True, slots=True)
class _Played:
    tokens: int
    seconds: float
    nodes: int
    hits: int
    waits: int


_Candidate = tuple[float, int, Node]
"""Reach, index of the tree, node."""


class _Growth:
    """The trees of all requests, grown best-first as the drafter does."""

    def __init__(self, guesses: Guesses, limits: GrowthLimits, requests: int) -> None:
        self.probabilities = guesses.probabilities(limits.fan_out)
        self._logs = [log(max(each, 1e-12)) for each in self.probabilities]
        self._limits = limits
        self.trees = [SpeculationTree(number + 1, limits.nodes) for number in range(requests)]
        self._frontiers = [Frontier(tree, limits, _DEEPEST, frozenset()) for tree in self.trees]

    def pick(self, width: int) -> list[tuple[int, Node]]:
        """The best nodes over all trees to expand in one step, at most `width`."""
        picked: list[tuple[int, Node]] = []
        reaches = [frontier.reach() for frontier in self._frontiers]
        while len(picked) < width:
            best = max(range(len(reaches)), key=reaches.__getitem__)
            if reaches[best] == -inf:
                break
            picked.append((best, self._frontiers[best].pop()))
            reaches[best] = self._frontiers[best].reach()
        return picked

    def complete(self, picked: Sequence[tuple[int, Node]]) -> None:
        """The step is over: nodes that the trees have lost meanwhile are lost."""
        for index, node in picked:
            tree = self.trees[index]
            if tree.get(node.name) is node and tree.expand(node, range(len(self._logs)), self._logs):
                self._frontiers[index].offer(node)

    def advance(self, index: int, tokens: Sequence[int]) -> bool:
        """Move a root; whether the new one was a candidate."""
        hit = self.trees[index].advance(tokens).hit
        self._frontiers[index].rebuild()
        return hit

    def candidates(self, most: int, least: float = 0.0) -> list[_Candidate]:
        """The best candidates over all trees, best first, of a reach of at least `least`."""
        heap: list[tuple[float, int, int, Node, int]] = []
        found: list[_Candidate] = []
        order = 0

        def push(index: int, node: Node, rank: int) -> None:
            nonlocal order
            tree = self.trees[index]
            if rank < len(node.tokens):
                order += 1
                heapq.heappush(
                    heap, (tree.root.cumulative - node.cumulatives[rank], order, index, node, rank)
                )

        for index, tree in enumerate(self.trees):
            push(index, tree.root, 0)
        while heap and len(found) < most:
            cost, _, index, parent, rank = heapq.heappop(heap)
            reach = exp(-cost)
            if reach < least:
                break
            node = self.trees[index].child_at(parent, rank)
            found.append((reach, index, node))
            push(index, parent, rank + 1)
            push(index, node, 0)
        return found

    def leaves(self, candidates: Sequence[_Candidate], width: int) -> list[float]:
        """Reaches of what one more step could expand, best first."""
        roots = [1.0] * self.missed
        deepest = self._limits.depth
        growing = (
            reach
            for reach, index, node in candidates
            if not node.expanded and self.trees[index].depth(node) < deepest
        )
        return [*roots, *growing][:width]

    @property
    def missed(self) -> int:
        """Trees in which nothing has grown."""
        return sum(not tree.root.expanded for tree in self.trees)


class _Simulation:
    """One engine. Time passes in `_pass`: what a drafter beside the target does meanwhile happens there."""

    def __init__(self, way: Way, guesses: Guesses, costs: Costs, requests: int, seed: int) -> None:
        self._way = way
        self._costs = costs
        self._requests = requests
        self._growth = _Growth(guesses, costs.limits, requests)
        self._bounds = list(accumulate(self._growth.probabilities))
        self._policy: GrowPolicy = Never() if way is Way.OFF else WhenItPays(way is Way.ASYNC)
        self._rate = Rate()
        self._random = random.Random(seed)
        self._picked: list[tuple[int, Node]] = []
        self._left_s = 0.0
        """Seconds until the drafter's running step is over."""
        self._most = 0 if way is Way.OFF else max(_MAX_NODES, _MAX_EACH * requests)
        reading = Reading(requests * costs.context, requests * costs.context)
        priced = max(self._most, _PRICED)
        forward_s = costs.target.span(requests, requests + priced, reading, costs.context)
        self._forward_s = [float(each) for each in forward_s]
        self._round_s = forward_s + costs.host.node_s * np.arange(priced + 1)
        self.node_s = float(self._round_s[_PRICED] - self._round_s[0]) / _PRICED

    def round(self) -> _Played:
        """Wait if it pays, choose, forward, walk."""
        waits, waited_s = 0, 0.0
        outlook, candidates = self._outlook(0)
        while self._policy.wants(outlook):
            spent_s = self._await_step()
            if not spent_s:
                break
            waits, waited_s, before = waits + 1, waited_s + spent_s, outlook
            outlook, candidates = self._outlook(waits)
            self._policy.learn(before, outlook, spent_s)
        nodes = outlook.choice.nodes
        seconds = self._forward_s[nodes] + self._costs.host.seconds(self._requests, nodes)
        self._pass(seconds)
        tokens, hits = self._walk({node.name for _, _, node in candidates[:nodes]})
        self._rate.observe(self._requests, tokens, seconds + waited_s)
        return _Played(tokens, seconds + waited_s, nodes, hits, waits)

    def _outlook(self, steps: int) -> tuple[Outlook, list[_Candidate]]:
        """As the engine's decider sees it."""
        rate = self._rate.value(self._requests)
        candidates = self._growth.candidates(self._most, rate * self._costs.host.node_s / 2)
        reaches = np.array([reach for reach, _, _ in candidates])
        choice: NodeChoice = choose(reaches, self._requests, self._round_s[: len(reaches) + 1], rate)
        leaves = np.array(self._growth.leaves(candidates, self._costs.limits.width))
        worth = np.maximum(leaves - rate * self.node_s, 0.0)
        return Outlook(choice, worth, rate, self._costs.draft_s, steps, self._growth.missed), candidates

    def _await_step(self) -> float:
        """Wait until one draft step is over; the seconds that it took, 0 if there is nothing to expand."""
        if self._way is Way.SYNC:
            picked = self._growth.pick(self._costs.limits.width)
            self._growth.complete(picked)
            return self._costs.draft_s if picked else 0.0
        if not self._begin_step():
            return 0.0
        seconds = self._left_s
        self._pass(seconds)
        return seconds

    def _begin_step(self) -> bool:
        if not self._picked:
            self._picked, self._left_s = self._growth.pick(self._costs.limits.width), self._costs.draft_s
        return bool(self._picked)

    def _pass(self, seconds: float) -> None:
        """A drafter beside the target works on; one in turns stands still."""
        while self._way is Way.ASYNC and self._begin_step():
            if self._left_s > seconds:
                self._left_s -= seconds
                return
            seconds -= self._left_s
            self._growth.complete(self._picked)
            self._picked = []

    def _walk(self, rows: set[int]) -> tuple[int, int]:
        """Tokens that all requests commit, and how many of their new roots were candidates."""
        tokens = hits = 0
        for index, tree in enumerate(self._growth.trees):
            path: list[int] = []
            node = tree.root
            while True:
                path.append(bisect_right(self._bounds, self._random.random()))
                child = tree.child(node, path[-1])
                if child is None or child.name not in rows:
                    break
                node = child
            tokens += len(path)
            hits += self._growth.advance(index, path)
        return tokens, hits
