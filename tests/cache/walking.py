"""Finding nodes of a speculation tree by their tokens."""

from ssd_serve.cache.node import Node
from ssd_serve.cache.tree import SpeculationTree

Path = tuple[int, ...]


def find(tree: SpeculationTree, path: Path) -> Node:
    """The node below the root that these tokens lead to."""
    node: Node | None = tree.root
    for token in path:
        node = tree.child(node, token) if node is not None else None
    assert node is not None
    return node
