"""Slow, obvious access to a speculation tree."""

import math

from ssd_serve.cache.node import Node
from ssd_serve.cache.tree import SpeculationTree

Path = tuple[int, ...]


def find(tree: SpeculationTree, path: Path) -> Node:
    """The node at these tokens below the root."""
    node: Node | None = tree.root
    for token in path:
        node = tree.child(node, token) if node is not None else None
    assert node is not None
    return node


def reach(tree: SpeculationTree, node: Node) -> float:
    return math.exp(node.cumulative - tree.root.cumulative)


def candidates(tree: SpeculationTree) -> list[Node]:
    """Nodes below the root by falling reach, each after its parent."""
    found = [tree.child_at(node, rank) for node in tree.expanded() for rank in range(len(node.tokens))]
    return sorted(found, key=lambda node: (-node.cumulative, node.depth))
