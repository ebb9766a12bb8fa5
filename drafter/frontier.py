"""Which node to expand next: best-first by reach over the unexpanded nodes of one request's tree.

Knows the tree and its limits, not how expansion is done and not the other requests.
"""

import heapq
from dataclasses import dataclass

from ssd_serve.cache.tree import Node, SpeculationTree


@dataclass(frozen=True, slots=True)
class GrowthLimits:
    """Bounds of growth. `width` nodes a step over all requests, `fan_out` children of each."""

    width: int
    fan_out: int
    depth: int
    nodes: int
    least_reach: float = 1e-3


class Frontier:
    """A heap of the unexpanded nodes of one tree, most probable first; the root while it is unexpanded."""

    def __init__(
        self, tree: SpeculationTree, limits: GrowthLimits, deepest: int, ends: frozenset[int]
    ) -> None:
        self._tree = tree
        self._limits = limits
        self._deepest = deepest
        self._ends = ends
        self._heap: list[tuple[float, int, Node]] = []
        self.rebuild()

    def rebuild(self) -> None:
        """Start again from the tree, after its root moved."""
        tree = self._tree
        self._heap = []
        if not tree.root.expanded:
            self.offer(tree.root)
        for node in tree.nodes():
            if not node.expanded:
                self.offer(node)

    def offer(self, node: Node) -> None:
        """Consider a new unexpanded node. Nodes that end the text or lie past the last position never grow."""
        if node.depth < self._deepest and (node is self._tree.root or node.token not in self._ends):
            heapq.heappush(self._heap, (-node.cumulative, node.name, node))

    def reach(self) -> float:
        """Cumulative log-probability of the next node below the root, or -inf when nothing is worth it."""
        return -self._heap[0][0] - self._tree.root.cumulative if self._worth() else float("-inf")

    def pop(self) -> Node:
        """Take the next node; call only while `reach()` is finite."""
        return heapq.heappop(self._heap)[2]

    def _worth(self) -> bool:
        tree, limits = self._tree, self._limits
        while self._heap:
            node = self._heap[0][2]
            if tree.depth(node) >= limits.depth:
                heapq.heappop(self._heap)
                continue
            full = len(tree) + limits.fan_out > limits.nodes
            return (node is tree.root or not full) and tree.reach(node) >= limits.least_reach
        return False
