"""One request in a drafter: its tree, where that may grow, and what was guessed of each node.

Knows nothing of other requests, of messages that go out, nor of what guesses.
"""

import math
from collections.abc import Sequence

from ssd_serve.base.draft_messages import Open
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.cache.expansions import ROOT_STEP, Expansion
from ssd_serve.cache.node import Node
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.drafter.frontier import Frontier, GrowthLimits
from ssd_serve.drafter.sources.contract import Branch, ExpandResult


class DraftRequest:
    """What the core remembers about a request."""

    __slots__ = (
        *("epoch", "frontier", "guesses", "parameters", "paused", "position", "reads_paused", "sequence"),
        "tree",
    )

    def __init__(self, message: Open, limits: GrowthLimits, ends: frozenset[int], paused: bool) -> None:
        self.epoch = message.epoch
        self.paused = paused
        self.reads_paused = limits.reads_paused
        self.parameters: SamplingParameters = message.parameters
        self.position = len(message.prompt) + len(message.output) - 1
        self.tree = SpeculationTree(message.root, limits.nodes)
        left = message.parameters.max_tokens - len(message.output)
        stops = frozenset(message.parameters.stop_token_ids)
        if not message.parameters.ignore_eos:
            stops |= ends
        # A node at the last position is an output token, but nothing can follow it; and what the draft model
        # has no position for it cannot expand.
        deepest = min(left - 1, limits.context - self.position)
        self.frontier = Frontier(self.tree, limits, deepest, stops)
        self.sequence = 0
        self.guesses: dict[int, tuple[Sequence[ExpandResult], int, int]] = {}
        """The step in which each node was expanded, its place there, and how deep it stood below the root."""

    def grew(self, nodes: Sequence[tuple[int, Node]], found: Sequence[ExpandResult]) -> None:
        """The tree has the candidates of some nodes, each with its place in what its step found."""
        guesses, top = self.guesses, self.tree.root.depth
        for index, node in nodes:
            guesses[node.name] = found, index, node.depth - top
        self.frontier.offer_all([node for _, node in nodes])

    def attach(self, top: Node, branches: Sequence[Branch]) -> list[Expansion]:
        """Give the nodes of a subtree their candidates, as far as they may and fit; which were given."""
        tree, given = self.tree, list[Expansion]()
        for path, found, estimates in branches:
            node: Node | None = top
            for token in path:
                node = tree.child(node, token) if node is not None else None
            if node is None or node.tokens or not self.frontier.may_grow(node):
                continue
            tokens, values = numbered(found, estimates)
            if tokens and tree.expand(node, tokens, values):
                self.frontier.offer(node)
                given.append(expanded(node, tokens, values))
        return given

    def reach(self) -> float:
        """Log reach of the next node to expand, or -inf. While it pauses, a root at most is read."""
        if self.paused and (self.tree.root.expanded or not self.reads_paused):
            return -math.inf
        return self.frontier.reach()


def numbered(tokens: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """The candidates whose log-probabilities are numbers: a draft that overflows has others, and a verifier
    hangs up on whoever says such a thing."""
    if all(map(math.isfinite, values)):
        return tokens, values
    kept = [(token, value) for token, value in zip(tokens, values, strict=True) if math.isfinite(value)]
    return [token for token, _ in kept], [value for _, value in kept]


def expanded(node: Node, tokens: list[int], log_probabilities: list[float]) -> Expansion:
    """That this node was given these candidates, as it is told."""
    return Expansion(*place_of(node), tokens, log_probabilities)


def place_of(node: Node) -> tuple[int, int]:
    """Where a node is found: its parent, and the token that leads to it."""
    return (node.name, ROOT_STEP) if node.parent is None else (node.parent.name, node.token)
