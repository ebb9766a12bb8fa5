"""Expected tokens of trees: Gumiho's theorem on accuracies, and best-first growth against EAGLE-2's selection."""

import heapq
import math
from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from ssd_serve.base.seeds import mix
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.drafter.blocks import branches_of, candidate_rows, grow_tree
from ssd_serve.drafter.frontier import Frontier, GrowthLimits
from ssd_serve.drafter.sources.contract import Block

TOP_K, LEVELS, NODES, VOCABULARY = 10, 7, 59, 50
"""EAGLE-2's: 60 nodes with the root."""
Children = tuple[list[int], list[float]]


def block_reaches(accuracies: Sequence[Sequence[float]], nodes: int) -> list[float]:
    """Reach of the most probable nodes of a block's tree; accuracies of each position's candidates, best first."""
    values = np.log(np.array(accuracies, np.float32))
    tokens = np.tile(np.arange(values.shape[1], dtype=np.int32), (len(values), 1))
    rows = candidate_rows(Block(tokens, values, values, values[:, 0]), len(values), ())
    assert rows is not None
    found, reach = list[float](), dict[tuple[int, ...], float]({(): 1.0})
    for branch in branches_of(rows, grow_tree(rows, nodes + 1, -math.inf)):
        for token, value in zip(branch.tokens, branch.log_probabilities, strict=True):
            reach[(*branch.path, token)] = reach[branch.path] * math.exp(value)
            found.append(reach[(*branch.path, token)])
    return sorted(found, reverse=True)[:nodes]


@pytest.mark.parametrize(("accuracies", "tokens"), [((0.8, 0.8, 0.8), 1.952), ((0.85, 0.8, 0.75), 2.040)])
def test_expected_tokens_of_gumihos_example(accuracies: tuple[float, ...], tokens: float) -> None:
    """Of equal mean accuracy, a chain that is more accurate earlier is longer (arXiv 2503.10135, section 3.2)."""
    assert sum(block_reaches([[each] for each in accuracies], 3)) == pytest.approx(tokens, abs=1e-6)


@given(st.lists(st.floats(0.05, 0.95), min_size=2, max_size=6), st.floats(0.001, 0.05), st.data())
def test_accuracy_moved_to_an_earlier_position_is_worth_more(
    accuracies: list[float], moved: float, data: st.DataObject
) -> None:
    later = data.draw(st.integers(1, len(accuracies) - 1))
    earlier = data.draw(st.integers(0, later - 1))
    ordered = sorted(accuracies, reverse=True)
    changed = [*ordered]
    changed[earlier] += moved * ordered[later]
    changed[later] -= moved * ordered[later]
    before, after = (
        sum(block_reaches([[each] for each in chain], len(chain))) for chain in (ordered, changed)
    )
    assert after > before


def test_best_first_growth_spends_nodes_where_positions_are_accurate() -> None:
    """Of 8 nodes the tree of the first block has more below the first position, and more expected tokens."""
    second = [0.5, 0.3, 0.1]
    early = block_reaches([[0.9, 0.05, 0.02], second, second], 8)
    late = block_reaches([second, second, [0.9, 0.05, 0.02]], 8)
    assert sum(early) > 1.2 * sum(late)
    assert early == sorted(early, reverse=True)


def children_of(name: int, seed: int) -> Children:
    """A node's ten best of random probabilities, often one large."""
    weights = np.random.default_rng([seed, name]).dirichlet(np.full(VOCABULARY, 0.08))
    tokens = np.argsort(-weights, kind="stable")[:TOP_K]
    return tokens.tolist(), np.log(weights[tokens] + 1e-12).tolist()


def eagle2(root: int, seed: int) -> tuple[list[float], int]:
    """EAGLE-2 (arXiv 2406.16858): each level expands the ten best nodes of the one before by summed log-probability;
    of all candidates the best are verified. Returns their reach and the number of expanded nodes."""
    level, pool, expanded = [(0.0, root)], list[float](), 0
    for _ in range(LEVELS):
        found: list[tuple[float, int]] = []
        for cumulative, name in level:
            tokens, values = children_of(name, seed)
            found += [
                (cumulative + value, mix(name, token)) for token, value in zip(tokens, values, strict=True)
            ]
        expanded += len(level)
        pool += [value for value, _ in found]
        level = heapq.nlargest(TOP_K, found)
    return [math.exp(each) for each in heapq.nlargest(NODES, pool)], expanded


def best_first(root: int, seed: int, steps: int, width: int) -> list[float]:
    """Reach of the best candidates of a tree that the frontier has grown in steps of so many nodes."""
    tree = SpeculationTree(root, 100_000)
    limits = GrowthLimits(1, TOP_K, LEVELS, 100_000, min_reach=1e-12)
    frontier = Frontier(tree, limits, LEVELS, frozenset())
    for _ in range(steps):
        if frontier.reach() == -math.inf:
            break
        nodes = frontier.take(width, -math.inf)
        for node in nodes:
            tree.expand(node, *children_of(node.name, seed))
        frontier.offer_all(nodes)
    found = (value for node in tree.expanded() for value in node.cumulatives)
    return [math.exp(each) for each in heapq.nlargest(NODES, found)]


def test_best_first_growth_expects_as_many_tokens_as_eagle2s_rule() -> None:
    """At equal nodes: with as many steps of as many nodes, with as many nodes one by one, and with half of them."""
    ratios: dict[str, list[float]] = {"steps": [], "nodes": [], "half": []}
    for seed in range(12):
        chosen, expanded = eagle2(1, seed)
        assert expanded == 1 + TOP_K * (LEVELS - 1)
        for name, shape in (
            ("steps", (LEVELS, TOP_K)),
            ("nodes", (expanded, 1)),
            ("half", (expanded // 2, 1)),
        ):
            ratios[name].append(sum(best_first(1, seed, *shape)) / sum(chosen))
    assert min(ratios["nodes"]) >= 1 - 1e-9
    assert max(ratios["nodes"]) > 1.005
    assert min(ratios["steps"]) >= 1 - 1e-9
    assert min(ratios["half"]) >= 0.995
