"""One request in a drafter: its tree, its frontier, and what blocks add to them.

Knows trees and candidates; no sources, messages or other requests.
"""

import math
from collections.abc import Sequence

import numpy as np

from ssd_serve.base.draft_messages import Open
from ssd_serve.base.seeds import mix
from ssd_serve.cache.expansions import ROOT_STEP, Expansion, PackedExpansion
from ssd_serve.cache.node import Node
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.drafter.blocks import BlockTree, CandidateRows, TreeGrower, candidate_rows
from ssd_serve.drafter.frontier import Frontier, GrowthLimits
from ssd_serve.drafter.sources.contract import Block, Branch, Candidates, ExpandResult

_ROOT_NODES, _ANCHOR_NODES = 32, 8
"""Nodes of a block below the root, and below a later anchor: many anchors share a tree."""
_LENT, _LENT_LEAVES, _LENT_NODES, _LENT_CANDIDATES = -2.0, 8, 4, 4
"""Factor on the probability of a lent block, as a logarithm; leaves of a step that get one; nodes of each, and their
candidates."""


class DraftRequest:
    """A request in the core: tree, frontier and the candidates that calibrate."""

    def __init__(self, message: Open, limits: GrowthLimits, ends: frozenset[int], paused: bool) -> None:
        self.epoch = message.epoch
        self.paused = paused
        self.prefills_paused = limits.prefills_paused
        self.parameters = message.parameters
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
        self.anchors: set[int] = set()
        """Names of nodes that blocks were drafted below."""
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
                self.frontier.offer_all((node,))
                made.append(expansion_of(node, tokens, values))
        return made

    def rows_of(self, node: Node, block: Block) -> CandidateRows | None:
        """Return a block's rows of candidates as far as this text goes."""
        return candidate_rows(block, self.frontier.levels_below(node), self.frontier.ends)

    def room_of(self, node: Node, rows: CandidateRows) -> int:
        """Return the number of nodes with such candidates that a block may add; at least 1."""
        candidates: int = rows.tokens.shape[1]
        most = _ROOT_NODES if node.parent is None else _ANCHOR_NODES
        return max(1, min(most, (self.tree.limit - len(self.tree)) // candidates))

    def _leaves_beside(self, top: Node) -> list[tuple[Node, int]]:
        """Return parents and ranks of unexpanded candidates of its parent and that one's siblings, best first."""
        above = top.parent
        parents = [above] if above is None or above.parent is None else above.parent.children.values()
        found = [
            (node, rank)
            for node in parents
            if node is not None
            for rank, token in enumerate(node.tokens[:_LENT_LEAVES])
            if (child := node.children.get(token)) is None or not child.tokens
        ]
        return sorted(found, key=lambda each: -each[0].cumulatives[each[1]])

    def lent(
        self, top: Node, block: Block, trees: TreeGrower
    ) -> tuple[CandidateRows, list[tuple[int, int]], list[int]] | None:
        """Return the candidates of a block for the leaves beside `top`, and the places and rows of the nodes below
        them; None if there are no such nodes."""
        rows = self.rows_of(top, block)
        if rows is None:
            return None
        width = min(_LENT_CANDIDATES, rows.tokens.shape[1])
        tokens, values, following = rows
        rows = CandidateRows(
            np.ascontiguousarray(tokens[:, :width]),
            np.ascontiguousarray(values[:, :width]),
            np.ascontiguousarray(following[:, :width]),
        )
        rows.log_probabilities[0] += _LENT
        places, chosen = list[tuple[int, int]](), list[int]()
        tree: BlockTree | None = None
        for parent, rank in self._leaves_beside(top)[:_LENT_LEAVES]:
            least = self.frontier.least - (parent.cumulatives[rank] - self.tree.root.cumulative)
            if rows.log_probabilities[0, 0] >= least and parent.tokens[rank] not in self.frontier.ends:
                tree = tree or trees(rows, _LENT_NODES, least)  # that of the likeliest leaf
                place = parent.name, parent.tokens[rank]
                places += chain(mix(*place), place, rows, tree)[1]
                chosen += tree.rows
        return (rows, places, chosen) if places else None

    def least_below(self, node: Node) -> float:
        """Return the least log reach of nodes below this one, relative to it."""
        return self.frontier.least - (node.cumulative - self.tree.root.cumulative)

    def attach_block(
        self, top: Node, block: Block, names: Sequence[int], tree: BlockTree, made: Sequence[PackedExpansion]
    ) -> bool:
        """Add the nodes of a block; returns False if the tree is full."""
        before = len(self.tree)
        for expansion in made:
            self.tree.take(expansion)
        if len(self.tree) == before and not top.tokens:
            return False
        self.anchors.add(top.name)
        levels = [Candidates(*each) for each in zip(*block[:3], block.expected_scores.tolist(), strict=True)]
        depth = top.depth - self.tree.root.depth
        for name, row in zip(names, tree.rows, strict=True):
            if block.pairs is None or row == 0:
                self.results[name] = levels, row, depth + row
        if not self.frontier.roots_only:
            nodes = [node for name in names if (node := self.tree.get(name)) is not None and node.tokens]
            self.frontier.offer_all(nodes)
        return True

    def reach(self) -> float:
        """Log reach of the next node to expand, or -inf. A paused request expands its root at most."""
        if self.paused and (self.tree.root.expanded or not self.prefills_paused):
            return -math.inf
        return self.frontier.reach()


def chain(
    top: int, place: tuple[int, int], rows: CandidateRows, tree: BlockTree
) -> tuple[list[int], list[tuple[int, int]]]:
    """Names of a tree's nodes below the node `top`, and their places: each one's parent and step."""
    names, places = [top], [place]
    tokens: list[list[int]] = rows.tokens.tolist()
    for parent, rank in zip(tree.parents[1:], tree.ranks[1:], strict=True):
        step = tokens[tree.rows[parent]][rank]
        places.append((names[parent], step))
        names.append(mix(names[parent], step))
    return names, places


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
