"""The live speculation tree of one request: named nodes below a root that moves forward and is never thrown away.

Both sides hold one: the drafter grows it, the verifier's replica mirrors it. A node's name is a 64-bit chain,
`name(child) = mix(name(parent), token)`, so that both sides name a new root alike, hit or miss. The tree knows
no KV slots, no models and no messages.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ssd_serve.seeds import mix


class Node:
    """One guessed token at one position, child of another node (the root: the last committed token).

    `cumulative` sums the conditional log-probabilities since the request was opened: the reach of a node below
    any later root is a difference of two of them. `depth` counts likewise.
    """

    __slots__ = ("children", "cumulative", "depth", "expanded", "log_probability", "name", "parent", "token")

    def __init__(self, name: int, token: int, parent: "Node | None", log_probability: float) -> None:
        self.name = name
        self.token = token
        self.parent = parent
        self.log_probability = log_probability
        self.cumulative: float = log_probability if parent is None else parent.cumulative + log_probability
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[int, Node] = {}
        self.expanded = False


@dataclass(frozen=True, slots=True)
class Advance:
    """What moving the root along committed tokens met."""

    path: tuple[Node, ...]
    """The nodes that the committed tokens were, as far as they were nodes."""
    hit: bool
    """Whether all of them were, so that the tree below the new root lives on."""


class SpeculationTree:
    """Named nodes below a root. At most `limit` nodes, the root not counted."""

    def __init__(self, root_name: int, limit: int) -> None:
        self.root = Node(root_name, -1, None, 0.0)
        self.limit = limit
        self._nodes: dict[int, Node] = {root_name: self.root}

    def __len__(self) -> int:
        """Number of nodes below the root."""
        return len(self._nodes) - 1

    def __contains__(self, name: int) -> bool:
        return name in self._nodes

    def get(self, name: int) -> Node | None:
        """The node of this name; the root included."""
        return self._nodes.get(name)

    def nodes(self) -> Iterator[Node]:
        """All nodes below the root, each after its parent."""
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            yield from node.children.values()
            waiting.extend(node.children.values())

    def add(self, parent_name: int, token: int, log_probability: float) -> Node | None:
        """Add an edge; returns its node, new or already there, or None if the parent is unknown or the tree is full."""
        parent = self._nodes.get(parent_name)
        if parent is None:
            return None
        node = parent.children.get(token)
        if node is not None:
            return node
        if len(self._nodes) > self.limit:
            return None
        node = Node(mix(parent_name, token), token, parent, min(log_probability, 0.0))
        parent.children[token] = node
        self._nodes[node.name] = node
        return node

    def reach(self, node: Node) -> float:
        """Estimated probability that the target's trajectory passes through `node`, given the root."""
        return math.exp(node.cumulative - self.root.cumulative)

    def depth(self, node: Node) -> int:
        """Distance of `node` from the root."""
        return node.depth - self.root.depth

    def path(self, node: Node) -> list[Node]:
        """Nodes from the root's child down to `node`; empty for the root."""
        chain: list[Node] = []
        while node is not self.root and node.parent is not None:
            chain.append(node)
            node = node.parent
        chain.reverse()
        return chain

    def best(self, count: int, depth: int, least_reach: float = 0.0) -> list[Node]:
        """The `count` nodes of highest reach, at most `depth` below the root, each after its parent."""
        floor = self.root.cumulative + (math.log(least_reach) if least_reach > 0 else -math.inf)
        deepest = self.root.depth + depth
        chosen: list[Node] = []
        heap = [(-child.cumulative, child.name, child) for child in self.root.children.values()]
        heapq.heapify(heap)
        while heap and len(chosen) < count:
            negative, _, node = heapq.heappop(heap)
            if -negative < floor:
                break
            if node.depth > deepest:
                continue
            chosen.append(node)
            for child in node.children.values():
                heapq.heappush(heap, (-child.cumulative, child.name, child))
        return chosen

    def ready_depth(self) -> int:
        """Depth of the deepest node below the root."""
        return max((node.depth for node in self.nodes()), default=self.root.depth) - self.root.depth

    def advance(self, tokens: Sequence[int]) -> Advance:
        """Move the root along committed tokens. Below a hit everything stays; else the new root stands alone."""
        node, path = self.root, list[Node]()
        for token in tokens:
            child = node.children.get(token)
            if child is None:
                break
            node = child
            path.append(node)
        hit = len(path) == len(tokens)
        if hit:
            self.root = node
            node.parent = None
        else:
            name = node.name
            for token in tokens[len(path) :]:
                name = mix(name, token)
            self.root = Node(name, tokens[-1], None, 0.0)
        self._nodes = {self.root.name: self.root}
        self._nodes.update((kept.name, kept) for kept in self.nodes())
        return Advance(tuple(path), hit)

    def prune(self, node: Node) -> list[Node]:
        """Remove `node` and all below it; returns what was removed. The root cannot be removed."""
        if node is self.root or node.parent is None:
            return []
        del node.parent.children[node.token]
        removed, waiting = list[Node](), [node]
        while waiting:
            gone = waiting.pop()
            removed.append(gone)
            waiting.extend(gone.children.values())
            del self._nodes[gone.name]
        return removed
