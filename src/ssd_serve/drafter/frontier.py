"""The order of expansion within one request: best-first by reach over the unexpanded candidates of its tree.

Knows the tree and its limits; not how nodes are expanded, nor other requests.
"""

import heapq
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from ssd_serve.cache.node import Node
from ssd_serve.cache.tree import SpeculationTree


@dataclass(frozen=True, slots=True)
class GrowthLimits:
    """Limits of growth: `width` nodes in a step over all requests, `fan_out` candidates of each node."""

    width: int
    fan_out: int
    depth: int
    nodes: int
    min_reach: float = 1e-3
    context: int = sys.maxsize
    """Positions of the draft model."""
    prefills_paused: bool = True
    """True: committed tokens are prefilled while a request is paused."""
    roots_only: bool = False
    """True: the source drafts a block at once, and only roots are expanded."""


class Frontier:
    """A heap with one entry for each expanded node: its best candidate that was not taken yet.

    Every change of the tree must be followed by `offer_all` or `rebuild`. Nothing grows at depth `deepest`
    (`Node.depth`), nor below a token in `ends`.
    """

    def __init__(
        self, tree: SpeculationTree, limits: GrowthLimits, deepest: int, ends: frozenset[int]
    ) -> None:
        self._tree = tree
        self._limits = limits
        self.least = math.log(limits.min_reach)
        """The least log reach of a node to expand."""
        self._deepest = deepest
        self.ends = ends
        """Tokens that end the text."""
        self._heap: list[tuple[float, int, Node, int]] = []
        self._order = 0
        self._root_taken = False
        self._reach: float | None = None
        self.rebuild()

    def rebuild(self) -> None:
        """Rebuild the heap from the tree, after its root moved."""
        self._heap = []
        self._root_taken = False
        self._reach = None
        self.offer_all(self._tree.expanded())

    @property
    def roots_only(self) -> bool:
        return self._limits.roots_only

    def levels_below(self, node: Node) -> int:
        """Return the levels of candidates that a node and the nodes below it may get."""
        return max(0, self._bottom - node.depth)

    def may_grow(self, node: Node) -> bool:
        """True if depth and token allow children of this node."""
        return node.depth < self._bottom and node.token not in self.ends

    def offer_all(self, nodes: Iterable[Node]) -> None:
        """Add the candidates of newly expanded nodes; earlier ones win ties."""
        self._reach = None
        heap, order, bottom = self._heap, self._order, self._bottom
        for node in nodes:
            if node.tokens and node.depth + 1 < bottom:
                order += 1
                heapq.heappush(heap, (-node.cumulatives[0], order, node, 0))
        self._order = order

    def reach(self) -> float:
        """Log reach of the next node to expand: 0 for an unexpanded root, -inf if none is worth it."""
        if self._reach is None:
            self._reach = self._find_reach()
        return self._reach

    def _find_reach(self) -> float:
        tree, limits = self._tree, self._limits
        if not tree.root.tokens:
            waiting = tree.root.depth < self._deepest and not self._root_taken
            return 0.0 if waiting else -math.inf
        if limits.roots_only or len(tree) + limits.fan_out > limits.nodes:
            return -math.inf
        self._skip()
        if not self._heap:
            return -math.inf
        value = -self._heap[0][0] - tree.root.cumulative
        return value if value >= self.least else -math.inf

    def take(self, most: int, beyond: float, ties: bool = True) -> list[Node]:
        """Take up to `most` next nodes with a log reach above `beyond`, or equal to it with `ties`.

        Requires that `reach()` satisfies the same.
        """
        self._reach = None
        tree, heap, ends = self._tree, self._heap, self.ends
        if not tree.root.tokens:
            self._root_taken = True
            return [tree.root]
        least, above = self.least, tree.root.cumulative
        taken: list[Node] = []
        while heap and len(taken) < most:
            negative, _, parent, rank = heap[0]
            value = -negative - above
            if value < least or value < beyond or (value == beyond and not ties):
                break
            token, child = self._pass()
            if token not in ends and (child is None or not child.tokens):
                taken.append(child or tree.child_at(parent, rank))
        return taken

    def _skip(self) -> None:
        """Drop entries with a best candidate that is expanded already or ends the text."""
        while self._heap:
            _, _, parent, rank = self._heap[0]
            token = parent.tokens[rank]
            child = parent.children.get(token)
            if token not in self.ends and (child is None or not child.tokens):
                return
            self._pass()

    def _pass(self) -> tuple[int, Node | None]:
        """Advance the best entry to its next candidate; returns the passed token and its node, if it has
        one."""
        heap = self._heap
        _, _, parent, rank = heap[0]
        tokens = parent.tokens
        token, following = tokens[rank], rank + 1
        if following < len(tokens):
            self._order += 1
            heapq.heapreplace(heap, (-parent.cumulatives[following], self._order, parent, following))
        else:
            heapq.heappop(heap)
        return token, parent.children.get(token)

    @property
    def _bottom(self) -> int:
        """The least `Node.depth` at which a node has no candidates."""
        return min(self._tree.root.depth + self._limits.depth, self._deepest)
