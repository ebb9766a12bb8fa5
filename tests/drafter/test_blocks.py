"""Best-first trees from blocks, against an enumeration of all paths."""

import itertools
import math

import numpy as np
import pytest

from ssd_serve.drafter.blocks import block_branches
from ssd_serve.drafter.sources.contract import Block

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


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("nodes", [1, 2, 7, 40])
@pytest.mark.parametrize("seed", range(5))
def test_the_tree_has_the_nodes_of_highest_reach(seed: int, nodes: int, paired: bool) -> None:
    block = random_block(seed, paired)
    expected = reach_of_all_paths(block)
    branches = block_branches(block, nodes, -math.inf)
    right = sorted(expected.values(), reverse=True)[:nodes]
    assert [expected[branch.path] for branch in branches] == pytest.approx(right, abs=1e-5)
    seen: set[tuple[int, ...]] = set()
    for branch in branches:
        assert not branch.path or branch.path[:-1] in seen, "a parent comes before its children"
        assert branch.log_probabilities == sorted(branch.log_probabilities, reverse=True)
        seen.add(branch.path)


def test_nodes_below_the_least_reach_are_left_out() -> None:
    block = random_block(0, paired=False)
    expected = reach_of_all_paths(block)
    found = {branch.path for branch in block_branches(block, 1000, math.log(0.1))}
    assert found == {path for path, reach in expected.items() if reach >= math.log(0.1)}


def test_candidates_without_a_finite_probability_are_dropped() -> None:
    block = random_block(0, paired=False)
    block.log_probabilities[1, 0] = -math.inf
    assert all(
        int(block.tokens[1, 0]) not in branch.tokens or len(branch.path) != 1
        for branch in block_branches(block, 1000, -math.inf)
    )
