"""A request in a drafter: tree, frontier and the candidates that calibrate.

Knows nothing of other requests, outgoing messages or the source.
"""

import math
from collections.abc import Sequence

import numpy as np

from ssd_serve.base.draft_messages import Open
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.cache.expansions import ROOT_STEP, Expansion
from ssd_serve.cache.node import Node
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.drafter.frontier import Frontier, GrowthLimits
from ssd_serve.drafter.sources.contract import Branch, Candidates, ExpandResult


class DraftRequest:
    """A request's state in the core."""

    __slots__ = (
        *("epoch", "frontier", "parameters", "paused", "position", "prefills_paused", "results", "sequence"),
        "tree",
    )

    def __init__(self, message: Open, limits: GrowthLimits, ends: frozenset[int], paused: bool) -> None:
        self.epoch = message.epoch
        self.paused = paused
        self.prefills_paused = limits.prefills_paused
        self.parameters: SamplingParameters = message.parameters
        self.position = len(message.prompt) + len(message.output) - 1
        self.tree = SpeculationTree(message.root, limits.nodes)
        left = message.parameters.max_tokens - len(message.output)
        stops = frozenset(message.parameters.stop_token_ids)
        if not message.parameters.ignore_eos:
            stops |= ends
        # Nothing follows a node at the last position, and the draft model has no position beyond its context.
        deepest = min(left - 1, limits.context - self.position)
        self.frontier = Frontier(self.tree, limits, deepest, stops)
        self.sequence = 0
        self.results: dict[int, tuple[Sequence[ExpandResult], int, int]] = {}
        """The results of the step that expanded a node, its index there and its depth, by name."""

    def record(self, nodes: Sequence[tuple[int, Node]], results: Sequence[ExpandResult]) -> None:
        """Offer newly expanded nodes to the frontier; each has its index in the step's results."""
        known, top = self.results, self.tree.root.depth
        for index, node in nodes:
            known[node.name] = results, index, node.depth - top
        self.frontier.offer_all([node for _, node in nodes])

    def attach(self, top: Node, branches: Sequence[Branch]) -> list[Expansion]:
        """Expand the nodes of a subtree within the limits; returns the expansions made."""
        tree, made = self.tree, list[Expansion]()
        for branch in branches:
            node: Node | None = top
            for token in branch.path:
                node = tree.child(node, token) if node is not None else None
            if node is None or node.tokens or not self.frontier.may_grow(node):
                continue
            tokens, values = finite(branch.tokens, branch.log_probabilities)
            if tokens and tree.expand(node, tokens, values):
                if branch.scores:
                    self.results[node.name] = (_candidates(branch),), 0, node.depth - tree.root.depth
                self.frontier.offer(node)
                made.append(expansion_of(node, tokens, values))
        return made

    def reach(self) -> float:
        """Log reach of the next node to expand, or -inf. A paused request expands its root at most."""
        if self.paused and (self.tree.root.expanded or not self.prefills_paused):
            return -math.inf
        return self.frontier.reach()


def _candidates(branch: Branch) -> Candidates:
    return Candidates(
        np.array(branch.tokens, dtype=np.int32),
        np.array(branch.log_probabilities, dtype=np.float32),
        np.array(branch.scores, dtype=np.float32),
        branch.expected_score,
    )


def finite(tokens: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """Candidates with finite log-probabilities: the verifier disconnects a drafter that sends others."""
    if all(map(math.isfinite, values)):
        return tokens, values
    kept = [(token, value) for token, value in zip(tokens, values, strict=True) if math.isfinite(value)]
    return [token for token, _ in kept], [value for _, value in kept]


def expansion_of(node: Node, tokens: list[int], log_probabilities: list[float]) -> Expansion:
    return Expansion(*address_of(node), tokens, log_probabilities)


def address_of(node: Node) -> tuple[int, int]:
    """The parent's name and the token that leads to the node; for a root its own name and `ROOT_STEP`."""
    return (node.name, ROOT_STEP) if node.parent is None else (node.parent.name, node.token)
