"""Pending expansions: the tree is the same as with eager unpacking, and unused expansions are never read."""

from collections.abc import Sequence
from typing import ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from ssd_serve.base.seeds import mix
from ssd_serve.cache.expansions import ROOT_STEP, PackedExpansion
from ssd_serve.cache.tree import SpeculationTree
from tests.cache.tree_access import Path, find, reach
from tests.cache.tree_access import candidates as ranked_nodes
from tests.examples import examples

ROOT = 77
LIMIT = 60
GUESSES = st.lists(
    st.tuples(st.integers(0, 7), st.sampled_from([-4.0, -2.0, -1.0, -0.5, -0.125, 0.0])),
    min_size=1,
    max_size=5,
    unique_by=lambda pair: pair[0],
)


class CountedExpansion(PackedExpansion):
    """A packed expansion that records its reads."""

    reads: ClassVar[list[int]] = []

    def read(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        self.reads.append(self.name)
        return super().read()


def packed(root: int, path: Path, guesses: Sequence[tuple[int, float]]) -> PackedExpansion:
    """An expansion of the node at `path` below the root of this name."""
    name = parent = root
    for token in path:
        name, parent = mix(name, token), name
    tokens = np.array([token for token, _ in guesses], dtype="<i4").tobytes()
    values = np.array([value for _, value in guesses], dtype="<f4").tobytes()
    return CountedExpansion(name, parent, path[-1] if path else ROOT_STEP, len(guesses), 0, tokens, values)


def ranked(guesses: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return sorted(guesses, key=lambda pair: -pair[1])


def candidates(tree: SpeculationTree) -> dict[Path, float]:
    """Log reach of every candidate, by path."""
    found: dict[Path, float] = {}
    for node in tree.expanded():
        path = tuple(each.token for each in tree.path(node))
        for token, value in zip(node.tokens, node.cumulatives, strict=True):
            found[(*path, token)] = value - tree.root.cumulative
    return found


@given(st.data())
@settings(max_examples=examples(100), deadline=None)
def test_lazy_and_eager_unpacking_give_the_same_tree(data: st.DataObject) -> None:
    late, at_once = SpeculationTree(ROOT, LIMIT), SpeculationTree(ROOT, LIMIT)
    for _ in range(data.draw(st.integers(1, 25))):
        paths = sorted(candidates(at_once))
        action = data.draw(st.sampled_from(["grow", "grow", "grow", "grow", "look", "hit", "miss"]))
        if action == "grow":
            path = data.draw(st.sampled_from([(), *paths]))
            guesses = ranked(data.draw(GUESSES))
            at_once.expand(find(at_once, path), [token for token, _ in guesses], [v for _, v in guesses])
            assert late.take(packed(late.root.name, path, guesses))
        elif action == "look":
            count = data.draw(st.integers(1, 6))
            for rank in range(min(count, len(late.root.tokens))):
                lazy, eager = late.child_at(late.root, rank), at_once.child_at(at_once.root, rank)
                assert reach(late, lazy) == pytest.approx(reach(at_once, eager))
        elif action == "miss" or paths:
            path = (9,) if action == "miss" else data.draw(st.sampled_from(paths))
            assert late.advance(path).hit == at_once.advance(path).hit == (action == "hit")
            assert late.root.name == at_once.root.name
        assert len(late) == len(at_once) <= LIMIT
        assert late.ready_depth() == at_once.ready_depth()
    assert candidates(late) == pytest.approx(candidates(at_once), abs=1e-9)


def test_only_accessed_expansions_are_read() -> None:
    tree, reads = SpeculationTree(ROOT, 1000), CountedExpansion.reads
    reads.clear()
    assert tree.take(packed(ROOT, (), [(1, -0.1), (2, -2.0), (3, -3.0)]))
    for path in ((1,), (2,), (3,), (1, 1), (2, 1), (3, 1)):
        assert tree.take(packed(ROOT, path, [(1, -0.1), (2, -2.0)]))
    assert reads == [ROOT]
    assert len(tree) == 15
    assert tree.ready_depth() == 3
    assert tree.expanded_child(tree.root, 0) is find(tree, (1,))
    assert tree.advance((1,)).hit
    assert reads == [ROOT, mix(ROOT, 1)]
    assert len(tree) == 4
    assert [node.token for node in ranked_nodes(tree)] == [1, 1, 2, 2]


def test_an_expansion_of_an_unknown_node_is_not_taken() -> None:
    tree = SpeculationTree(ROOT, 100)
    assert not tree.take(packed(ROOT, (1,), [(1, -0.1)]))
    assert tree.take(packed(ROOT, (), [(1, -0.1)]))
    assert not tree.take(packed(ROOT, (2,), [(1, -0.1)]))
    assert not tree.take(packed(ROOT, (1, 1), [(1, -0.1)]))
    assert len(tree) == 1


def test_an_expansion_below_no_candidate_never_becomes_a_node() -> None:
    tree = SpeculationTree(ROOT, 100)
    for path in ((), (1,), (1, 5), (1, 5, 6), (1, 5)):
        tree.take(packed(ROOT, path, [(1, -0.1), (6, -0.5)]))
    assert tree.get(packed(ROOT, (1, 5), []).name) is None
    assert [node.token for node in ranked_nodes(tree)] == [1, 1, 6, 6]
    assert tree.advance((1,)).hit
    assert len(tree) == 2


def test_a_child_named_by_a_second_drafter_survives_the_merge() -> None:
    tree = SpeculationTree(ROOT, 100)
    for path in ((), (1,), (1, 5)):
        tree.take(packed(ROOT, path, [(1, -0.1)]))
    tree.take(packed(ROOT, (1,), [(5, -0.2)]))
    assert {path for path in candidates(tree) if path[:2] == (1, 5)} == {(1, 5), (1, 5, 1)}


def test_a_miss_onto_an_expanded_name_keeps_its_expansion() -> None:
    tree = SpeculationTree(ROOT, 100)
    for path in ((), (1,), (1, 5), (1, 5, 1)):
        tree.take(packed(ROOT, path, [(1, -0.1)]))
    assert not tree.advance((1, 5)).hit
    assert set(candidates(tree)) == {(1,), (1, 1)}
    assert len(tree) == 2


def test_a_duplicate_candidate_counts_once_when_read() -> None:
    tree = SpeculationTree(ROOT, 100)
    tree.take(packed(ROOT, (), [(1, -0.1)]))
    tree.take(packed(ROOT, (1,), [(2, -0.1), (2, -0.3)]))
    assert find(tree, (1, 2)).cumulative == pytest.approx(-0.2)
    assert len(tree) == 2
