"""Blending of several sources' estimates for one node, and its effect on the nodes below."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.cache.node import SourceWeights, blend
from ssd_serve.cache.tree import SpeculationTree
from tests.cache.tree_access import reach

MODEL, LOOKUP = 2, 4
SHARES = st.floats(1e-6, 1.0)
ESTIMATES = st.dictionaries(
    st.sampled_from([1, 2, 4, 8]),
    st.dictionaries(st.integers(0, 5), SHARES.map(math.log), max_size=4),
    min_size=1,
    max_size=4,
)


def probability(tree: SpeculationTree, *path: int) -> float:
    node = tree.root
    for token in path:
        child = tree.child(node, token)
        assert child is not None
        node = child
    return reach(tree, node)


@given(ESTIMATES, st.lists(st.integers(0, 5), max_size=30))
def test_a_mixture_lies_between_its_estimates(
    estimates: dict[int, dict[int, float]], chosen: list[int]
) -> None:
    weights = SourceWeights()
    for token in chosen:
        weights.observe(estimates, token)
    mixed = blend(estimates, weights)
    assert sum(weights.share(source, estimates) for source in estimates) == pytest.approx(1.0)
    for token in {token for values in estimates.values() for token in values}:
        each = [math.exp(values.get(token, -math.inf)) for values in estimates.values()]
        assert min(each) - 1e-9 <= math.exp(mixed[token]) <= max(each) + 1e-9


def test_a_confident_wrong_source_loses_its_weight() -> None:
    weights = SourceWeights()
    named = {MODEL: {1: math.log(0.6), 2: math.log(0.3)}, LOOKUP: {3: math.log(0.9)}}
    assert weights.share(LOOKUP, named) == 0.5
    for _ in range(20):
        weights.observe(named, 1)
    assert weights.share(LOOKUP, named) < 0.1
    assert math.exp(blend(named, weights)[1]) > 0.5
    weights.observe(named, 9)  # named by no source: no evidence
    assert weights.share(LOOKUP, named) < 0.1


def test_blending_lowers_the_reach_of_disputed_candidates() -> None:
    tree = SpeculationTree(7, 100)
    tree.expand(tree.root, [3], [math.log(0.9)], LOOKUP)
    child = tree.child_at(tree.root, 0)
    tree.expand(child, [4], [math.log(0.5)], LOOKUP)
    tree.expand(tree.root, [1, 2], [math.log(0.6), math.log(0.3)], MODEL)
    assert probability(tree, 3) == pytest.approx(0.45)
    assert probability(tree, 3, 4) == pytest.approx(0.225)  # descendants shift too
    assert [probability(tree, token) for token in (1, 2)] == pytest.approx([0.3, 0.15])
    assert tree.root.tokens == [3, 1, 2]
    assert tree.root.sources == MODEL | LOOKUP


@given(st.permutations([MODEL, LOOKUP, MODEL, LOOKUP]))
def test_blending_ignores_order_and_repetition(order: list[int]) -> None:
    named = {MODEL: ([1, 2], [-0.5, -1.5]), LOOKUP: ([2, 3], [-0.2, -3.0])}
    expected = {
        1: 0.5 * math.exp(-0.5),
        2: 0.5 * (math.exp(-1.5) + math.exp(-0.2)),
        3: 0.5 * math.exp(-3.0),
    }
    tree = SpeculationTree(7, 100)
    for source in order:
        tree.expand(tree.root, *named[source], source)
    for token, value in expected.items():
        assert probability(tree, token) == pytest.approx(value)
        assert tree.root.sources_of(token) == sum(source for source in named if token in named[source][0])


def test_advance_updates_the_source_weights() -> None:
    tree = SpeculationTree(7, 100)
    for _ in range(20):
        tree.expand(tree.root, [3], [math.log(0.9)], LOOKUP)
        tree.expand(tree.root, [1], [math.log(0.6)], MODEL)
        tree.advance([1])
    tree.expand(tree.root, [3], [math.log(0.9)], LOOKUP)
    tree.expand(tree.root, [1], [math.log(0.6)], MODEL)
    assert probability(tree, 1) > 0.5
    assert probability(tree, 3) < 0.1
