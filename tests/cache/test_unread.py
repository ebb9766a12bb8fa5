"""Expansions that stay packed until somebody looks: the tree is the same, and most are never read."""

from collections.abc import Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from ssd_serve.base.seeds import mix
from ssd_serve.cache.tree import SpeculationTree
from tests.cache.walking import Path, find

ROOT = 77
LIMIT = 60
GUESSES = st.lists(
    st.tuples(st.integers(0, 7), st.sampled_from([-4.0, -2.0, -1.0, -0.5, -0.1, 0.0])),
    min_size=1,
    max_size=5,
    unique_by=lambda pair: pair[0],
)


@dataclass(frozen=True)
class Coming:
    """An expansion that notes when it is read."""

    name: int
    parent: int
    step: int
    guesses: Sequence[tuple[int, float]]
    reads: list[int]

    @property
    def size(self) -> int:
        return len(self.guesses)

    def read(self) -> tuple[list[int], list[float]]:
        self.reads.append(self.name)
        return [token for token, _ in self.guesses], [value for _, value in self.guesses]


def coming(
    root: int, path: Path, guesses: Sequence[tuple[int, float]], reads: list[int] | None = None
) -> Coming:
    """An expansion of the node at `path` below the root of this name."""
    name = parent = root
    for token in path:
        name, parent = mix(name, token), name
    return Coming(name, parent, path[-1] if path else -1, guesses, reads if reads is not None else [])


def ranked(guesses: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return sorted(guesses, key=lambda pair: -pair[1])


def candidates(tree: SpeculationTree) -> dict[Path, float]:
    """Of every candidate by its path, the log reach."""
    found: dict[Path, float] = {}
    for node in tree.expanded():
        path = tuple(each.token for each in tree.path(node))
        for token, value in zip(node.tokens, node.cumulatives, strict=True):
            found[(*path, token)] = value - tree.root.cumulative
    return found


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_tree_that_reads_late_is_the_tree_that_reads_at_once(data: st.DataObject) -> None:
    """Under any growth, of several drafters, and any moves of the root."""
    late, at_once = SpeculationTree(ROOT, LIMIT), SpeculationTree(ROOT, LIMIT)
    for _ in range(data.draw(st.integers(1, 25))):
        paths = sorted(candidates(at_once))
        action = data.draw(st.sampled_from(["grow", "grow", "grow", "grow", "look", "hit", "miss"]))
        if action == "grow":
            path = data.draw(st.sampled_from([(), *paths]))
            guesses = ranked(data.draw(GUESSES))
            at_once.expand(find(at_once, path), [token for token, _ in guesses], [v for _, v in guesses])
            assert late.take(coming(late.root.name, path, guesses))
        elif action == "look":
            count = data.draw(st.integers(1, 6))
            reaches = [late.reach(node) for node in late.best(count, 9)]
            assert reaches == pytest.approx([at_once.reach(node) for node in at_once.best(count, 9)])
        elif action == "miss" or paths:
            path = (9,) if action == "miss" else data.draw(st.sampled_from(paths))
            assert late.advance(path).hit == at_once.advance(path).hit == (action == "hit")
            assert late.root.name == at_once.root.name
        assert len(late) == len(at_once) <= LIMIT
        assert late.ready_depth() == at_once.ready_depth()
    assert candidates(late) == pytest.approx(candidates(at_once), abs=1e-9)


def test_only_what_somebody_looks_at_is_read() -> None:
    tree, reads = SpeculationTree(ROOT, 1000), list[int]()
    assert tree.take(coming(ROOT, (), [(1, -0.1), (2, -2.0), (3, -3.0)], reads))
    for path in ((1,), (2,), (3,), (1, 1), (2, 1), (3, 1)):
        assert tree.take(coming(ROOT, path, [(1, -0.1), (2, -2.0)], reads))
    assert reads == [ROOT]
    assert len(tree) == 15
    assert tree.ready_depth() == 3
    assert tree.expanded_child(tree.root, 0) is find(tree, (1,))
    assert tree.advance((1,)).hit
    assert reads == [ROOT, mix(ROOT, 1)]
    assert len(tree) == 4
    assert [node.token for node in tree.best(9, 9)] == [1, 1, 2, 2]


def test_an_expansion_of_a_node_that_the_tree_does_not_have_is_not_taken() -> None:
    tree = SpeculationTree(ROOT, 100)
    assert not tree.take(coming(ROOT, (1,), [(1, -0.1)]))
    assert tree.take(coming(ROOT, (), [(1, -0.1)]))
    assert not tree.take(coming(ROOT, (2,), [(1, -0.1)]))
    assert not tree.take(coming(ROOT, (1, 1), [(1, -0.1)]))
    assert len(tree) == 1


def test_what_hangs_below_no_candidate_is_never_a_node() -> None:
    tree = SpeculationTree(ROOT, 100)
    for path in ((), (1,), (1, 5), (1, 5, 6), (1, 5)):
        tree.take(coming(ROOT, path, [(1, -0.1), (6, -0.5)]))
    assert tree.get(coming(ROOT, (1, 5), []).name) is None
    assert [node.token for node in tree.best(99, 9)] == [1, 1, 6, 6]
    assert tree.advance((1,)).hit
    assert len(tree) == 2


def test_a_child_that_only_a_second_drafter_names_lives_when_its_parent_is_merged() -> None:
    tree = SpeculationTree(ROOT, 100)
    for path in ((), (1,), (1, 5)):
        tree.take(coming(ROOT, path, [(1, -0.1)]))
    tree.take(coming(ROOT, (1,), [(5, -0.2)]))
    assert {path for path in candidates(tree) if path[:2] == (1, 5)} == {(1, 5), (1, 5, 1)}


def test_a_miss_onto_a_node_that_was_expanded_keeps_what_was_found_there() -> None:
    tree = SpeculationTree(ROOT, 100)
    for path in ((), (1,), (1, 5), (1, 5, 1)):
        tree.take(coming(ROOT, path, [(1, -0.1)]))
    assert not tree.advance((1, 5)).hit
    assert set(candidates(tree)) == {(1,), (1, 1)}
    assert len(tree) == 2


def test_a_name_twice_in_an_expansion_counts_once_when_it_is_read() -> None:
    tree = SpeculationTree(ROOT, 100)
    tree.take(coming(ROOT, (), [(1, -0.1)]))
    tree.take(coming(ROOT, (1,), [(2, -0.1), (2, -0.3)]))
    assert find(tree, (1, 2)).cumulative == pytest.approx(-0.2)
    assert len(tree) == 2
