"""The speculation tree, compared with a reference that lists every candidate."""

import gc
import math
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ssd_serve.base.seeds import mix
from ssd_serve.cache.node import Node
from ssd_serve.cache.tree import SpeculationTree
from tests.cache.tree_access import Path, find, reach

ROOT = 77
LIMIT = 60
TOKENS = st.lists(st.integers(0, 7), min_size=1, max_size=5)
LOG_PROBABILITIES = st.lists(
    st.sampled_from([-4.0, -2.0, -1.5, -1.0, -0.5, -0.1, 0.0, 2.0]), min_size=5, max_size=5
)


class Reference:
    """Every candidate's cumulative log-probability by its path below the root."""

    def __init__(self) -> None:
        self.candidates: dict[Path, float] = {}
        self.base = 0.0
        self.name = ROOT

    def cumulative(self, path: Path) -> float:
        return self.candidates[path] if path else self.base

    def expand(self, path: Path, tokens: Sequence[int], values: Sequence[float]) -> bool:
        if len({*self.candidates, *((*path, token) for token in tokens)}) > LIMIT:
            return False
        above = self.cumulative(path)
        first = len(set(tokens)) == len(tokens) and not any(known[:-1] == path for known in self.candidates)
        least = above
        best: dict[int, float] = {}
        for token, value in zip(tokens, values, strict=False):
            least = min(least, above + value)
            cumulative = least if first else above + min(value, 0.0)
            best[token] = max(cumulative, best.get(token, cumulative))
        for token, cumulative in best.items():
            self.improve((*path, token), cumulative)
        return True

    def improve(self, path: Path, cumulative: float) -> None:
        """The better estimate is kept, and everything below shifts by the difference."""
        more = cumulative - self.candidates.setdefault(path, cumulative)
        if more > 0:
            self.candidates[path] = cumulative
            for known in sorted(self.candidates, key=len):
                if len(known) > len(path) and known[: len(path)] == path:
                    self.candidates[known] = min(self.candidates[known] + more, self.candidates[known[:-1]])

    def advance(self, tokens: Path) -> bool:
        hit = tokens in self.candidates
        self.base = self.candidates[tokens] if hit else 0.0
        for token in tokens:
            self.name = mix(self.name, token)
        kept = {
            path: value for path, value in self.candidates.items() if hit and path[: len(tokens)] == tokens
        }
        self.candidates = {path[len(tokens) :]: value for path, value in kept.items() if path != tokens}
        return hit


class Trees(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = SpeculationTree(ROOT, LIMIT)
        self.reference = Reference()

    @rule(data=st.data(), tokens=TOKENS, values=LOG_PROBABILITIES)
    def expand(self, data: st.DataObject, tokens: list[int], values: list[float]) -> None:
        path = data.draw(st.sampled_from([(), *sorted(self.reference.candidates)]))
        taken = self.tree.expand(find(self.tree, path), tokens, values[: len(tokens)])
        assert taken == self.reference.expand(path, tokens, values)

    @precondition(lambda self: self.reference.candidates)
    @rule(data=st.data())
    def advance_along_candidates(self, data: st.DataObject) -> None:
        self.move(data.draw(st.sampled_from(sorted(self.reference.candidates))))

    @rule(tokens=st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple))
    def advance_anywhere(self, tokens: Path) -> None:
        self.move(tokens)

    def move(self, tokens: Path) -> None:
        known = [
            tokens[:end] for end in range(1, len(tokens) + 1) if tokens[:end] in self.reference.candidates
        ]
        depth = self.tree.root.depth
        advance = self.tree.advance(tokens)
        assert advance.hit == self.reference.advance(tokens)
        assert [node.token for node in advance.path] == [path[-1] for path in known]
        assert self.tree.root.depth == depth + len(tokens)

    @invariant()
    def size_counts_candidates_within_the_limit(self) -> None:
        assert len(self.tree) == len(self.reference.candidates) <= LIMIT

    @invariant()
    def names_are_chains_from_the_root(self) -> None:
        assert self.tree.root.name == self.reference.name
        for path in self.reference.candidates:
            name = self.reference.name
            for token in path:
                name = mix(name, token)
            node = find(self.tree, path)
            assert node.name == name
            assert self.tree.get(name) is node
            assert tuple(each.token for each in self.tree.path(node)) == path
            assert node.depth - self.tree.root.depth == len(path)

    @invariant()
    def candidates_are_ranked_and_keep_their_reach(self) -> None:
        for node in self.tree.expanded():
            assert node.cumulatives == sorted(node.cumulatives, reverse=True)
            assert len(set(node.tokens)) == len(node.tokens)
        for path, value in self.reference.candidates.items():
            assert reach(self.tree, find(self.tree, path)) == math.exp(value - self.reference.base)

    @invariant()
    def expanded_nodes_come_after_their_parents(self) -> None:
        seen = {self.tree.root.name}
        expanded = list(self.tree.expanded())
        assert {node.name for node in expanded} == {
            find(self.tree, path[:-1]).name for path in self.reference.candidates
        }
        for node in expanded:
            assert node is self.tree.root or (node.parent is not None and node.parent.name in seen)
            seen.add(node.name)
        assert self.tree.ready_depth() == max((len(path) for path in self.reference.candidates), default=0)


TestTrees = Trees.TestCase
TestTrees.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("committed", [[1, 3], [1, 9], [7]])
def test_advance_frees_dropped_nodes_without_a_collection(committed: list[int]) -> None:
    tree = SpeculationTree(ROOT, 100)
    tree.expand(tree.root, [1, 2], [-0.1, -3.0])
    for path in ((1,), (2,), (1, 3)):
        tree.expand(find(tree, path), [3, 4], [-0.5, -1.0])

    def nodes() -> int:
        return sum(type(each) is Node for each in gc.get_objects())

    gc.disable()  # nothing is freed by a collection
    try:
        before = nodes()
        tree.advance(committed)
        assert before - nodes() == 3, "the new root alone is left of four, or is a new one"
    finally:
        gc.enable()


def test_full_tree_rejects_expansions_and_keeps_its_nodes() -> None:
    tree = SpeculationTree(ROOT, 3)
    assert tree.expand(tree.root, [1, 2], [-0.1, -0.2])
    assert not tree.expand(find(tree, (1,)), [3, 4], [-0.1, -0.2])
    assert len(tree) == 2
    assert tree.expand(find(tree, (1,)), [3], [-0.1])
