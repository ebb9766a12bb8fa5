"""Best-first trees from blocks, against an enumeration of all paths."""

import itertools
import math

import numpy as np
import pytest

from ssd_serve.drafter.blocks import NativeTrees, TreeGrower, branches_of, candidate_rows, grow_tree
from ssd_serve.drafter.sources.contract import Block, Branch
from ssd_serve.kernels.native.library import NativeLibrary

POSITIONS, CANDIDATES = 4, 3


def random_block(seed: int, paired: bool) -> Block:
    random = np.random.default_rng(seed)
    tokens = np.stack([random.permutation(50)[:CANDIDATES] for _ in range(POSITIONS)]).astype(np.int32)
    values = np.sort(np.log(random.dirichlet(np.ones(CANDIDATES + 1), POSITIONS))[:, 1:], axis=1)[:, ::-1]
    pairs = np.log(random.dirichlet(np.ones(CANDIDATES + 1), (POSITIONS - 1, CANDIDATES)))[:, :, 1:]
    zeros = np.zeros_like(values, dtype=np.float32)
    means = np.zeros(POSITIONS, dtype=np.float32)
    return Block(
        tokens, values.astype(np.float32), zeros, means, pairs.astype(np.float32) if paired else None
    )


def reach_of_all_paths(block: Block) -> dict[tuple[int, ...], float]:
    """Log reach of every node that can be expanded, by its tokens."""
    found: dict[tuple[int, ...], float] = {}
    for length in range(POSITIONS):
        for ranks in itertools.product(range(CANDIDATES), repeat=length):
            reach = 0.0
            for level, rank in enumerate(ranks):
                pairs = block.pairs if level else None
                values = (
                    block.log_probabilities[level] if pairs is None else pairs[level - 1][ranks[level - 1]]
                )
                reach += float(values[rank])
            found[tuple(int(block.tokens[level][rank]) for level, rank in enumerate(ranks))] = reach
    return found


def branches(block: Block, nodes: int, least: float, grow: TreeGrower = grow_tree) -> list[Branch]:
    rows = candidate_rows(block, POSITIONS, ())
    return [] if rows is None else branches_of(rows, grow(rows, nodes, least))


@pytest.fixture(params=["plain", "compiled"])
def grow(request: pytest.FixtureRequest, native: NativeLibrary) -> TreeGrower:
    return grow_tree if request.param == "plain" else NativeTrees(native)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("nodes", [1, 2, 7, 40])
@pytest.mark.parametrize("seed", range(5))
def test_the_tree_has_the_nodes_of_highest_reach(
    seed: int, nodes: int, paired: bool, grow: TreeGrower
) -> None:
    block = random_block(seed, paired)
    expected = reach_of_all_paths(block)
    found = branches(block, nodes, -math.inf, grow)
    right = sorted(expected.values(), reverse=True)[:nodes]
    assert [expected[branch.path] for branch in found] == pytest.approx(right, abs=1e-5)
    seen: set[tuple[int, ...]] = set()
    for branch in found:
        assert not branch.path or branch.path[:-1] in seen, "a parent comes before its children"
        assert branch.log_probabilities == sorted(branch.log_probabilities, reverse=True)
        seen.add(branch.path)


@pytest.mark.parametrize("paired", [False, True])
def test_the_compiled_tree_is_the_same(paired: bool, native: NativeLibrary) -> None:
    for seed in range(20):
        rows = candidate_rows(random_block(seed, paired), POSITIONS, ())
        assert rows is not None
        assert NativeTrees(native)(rows, 30, math.log(0.01)) == grow_tree(rows, 30, math.log(0.01))


def test_nodes_below_the_least_reach_are_left_out(grow: TreeGrower) -> None:
    block = random_block(0, paired=False)
    expected = reach_of_all_paths(block)
    found = {branch.path for branch in branches(block, 1000, math.log(0.1), grow)}
    assert found == {path for path, reach in expected.items() if reach >= math.log(0.1)}


def test_candidates_without_a_finite_probability_are_dropped() -> None:
    block = random_block(0, paired=False)
    block.log_probabilities[1, 1:] = -math.inf
    assert all(len(branch.tokens) == 1 for branch in branches(block, 1000, -math.inf))
    block.log_probabilities[2] = math.nan
    assert max(len(branch.path) for branch in branches(block, 1000, -math.inf)) == 1
    block.log_probabilities[0] = math.nan
    assert branches(block, 1000, -math.inf) == []


@pytest.mark.parametrize("paired", [False, True])
def test_nothing_grows_below_an_end_of_the_text(paired: bool) -> None:
    block = random_block(1, paired)
    end = int(block.tokens[1, 0])
    rows = candidate_rows(block, POSITIONS, (end,))
    assert rows is not None
    found = branches_of(rows, grow_tree(rows, 1000, -math.inf))
    assert any(end in branch.tokens for branch in found)
    assert all(end not in branch.path for branch in found)
