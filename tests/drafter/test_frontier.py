"""The frontier: which node is expanded next."""

import math

import hypothesis.strategies as st
from hypothesis import given, settings

from ssd_serve.cache.node import Node
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.drafter.frontier import Frontier, GrowthLimits
from tests.cache.tree_access import candidates

LIMITS = GrowthLimits(width=4, fan_out=3, depth=6, nodes=300, min_reach=1e-6)
ENDS = frozenset({9})
VALUES = st.lists(st.sampled_from([-3.0, -1.0, -0.7, -0.4, -0.1]), min_size=3, max_size=3)


def make(deepest: int = 100, limits: GrowthLimits = LIMITS) -> tuple[SpeculationTree, Frontier]:
    tree = SpeculationTree(1, limits.nodes)
    return tree, Frontier(tree, limits, deepest, ENDS)


def grow(tree: SpeculationTree, frontier: Frontier, node: Node, values: list[float]) -> None:
    tree.expand(node, [4, 9, 6], sorted(values, reverse=True))
    frontier.offer_all([node])


@given(st.lists(VALUES, min_size=1, max_size=30), st.integers(1, 12), st.integers(1, 5))
@settings(max_examples=80)
def test_frontier_order_equals_the_best_first_reference(
    script: list[list[float]], deepest: int, batch: int
) -> None:
    tree, frontier = make(deepest)
    yielded: list[Node] = []
    while script:
        picked: list[Node] = []
        while len(picked) < batch and frontier.reach() > -math.inf:
            assert not picked or picked[0] is not tree.root
            expected = best_unexpanded(tree, deepest, yielded)
            reach = frontier.reach()
            node = frontier.take(1, -math.inf)[0]
            assert node not in yielded
            assert reach == node.cumulative == expected
            picked.append(node)
            yielded.append(node)
        if not picked:
            break
        for node in picked:
            assert node.token not in ENDS
            assert node.depth < min(deepest, LIMITS.depth)
            grow(tree, frontier, node, script.pop() if script else [-1.0, -1.0, -1.0])
    if deepest > 0:
        assert yielded[0] is tree.root


def best_unexpanded(tree: SpeculationTree, deepest: int, yielded: list[Node]) -> float:
    """The slow way: the largest cumulative of all candidates that may be expanded."""
    if not tree.root.expanded:
        return 0.0
    found = [
        node.cumulative
        for node in candidates(tree)
        if node.depth < min(deepest, LIMITS.depth)
        and not node.expanded
        and node.token not in ENDS
        and node not in yielded
    ]
    return max(found)


def test_an_unexpanded_root_comes_first_and_once() -> None:
    tree, frontier = make()
    assert frontier.reach() == 0.0
    assert frontier.take(1, -math.inf)[0] is tree.root
    assert frontier.reach() == -math.inf


def test_frontier_is_empty_at_the_last_position() -> None:
    _, frontier = make(deepest=0)
    assert frontier.reach() == -math.inf


def test_the_last_position_holds_after_a_miss() -> None:
    tree, frontier = make(deepest=3)
    tree.advance([5, 5])
    frontier.rebuild()
    grow(tree, frontier, frontier.take(1, -math.inf)[0], [-0.1, -0.2, -0.3])
    assert frontier.reach() == -math.inf


def test_nodes_below_min_reach_are_skipped() -> None:
    limits = GrowthLimits(width=4, fan_out=3, depth=6, nodes=300, min_reach=0.1)
    tree, frontier = make(limits=limits)
    grow(tree, frontier, frontier.take(1, -math.inf)[0], [-0.5, math.log(0.09), math.log(0.01)])
    assert frontier.take(1, -math.inf)[0].token == 4
    assert frontier.reach() == -math.inf


def test_a_full_tree_has_no_next_node() -> None:
    limits = GrowthLimits(width=4, fan_out=3, depth=6, nodes=5)
    tree, frontier = make(limits=limits)
    grow(tree, frontier, frontier.take(1, -math.inf)[0], [-0.5, -0.6, -0.7])
    assert frontier.reach() == -math.inf


def test_rebuild_ranks_nodes_below_the_new_root() -> None:
    tree, frontier = make()
    grow(tree, frontier, frontier.take(1, -math.inf)[0], [-0.5, -1.0, -2.0])
    child = frontier.take(1, -math.inf)[0]
    grow(tree, frontier, child, [-0.1, -0.3, -0.4])
    tree.advance([4])
    frontier.rebuild()
    assert frontier.reach() == -0.1 or math.isclose(frontier.reach(), -0.1)
    assert [frontier.take(1, -math.inf)[0].token for _ in range(2) if frontier.reach() > -math.inf] == [4, 6]
