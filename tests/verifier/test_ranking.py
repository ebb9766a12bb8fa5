"""Tests of tree ranking: node order, limits of a request, and leaves worth waiting for."""

import math
from collections.abc import Sequence

import pytest

from ssd_serve.base.messages import FixedShape, RequestOptions, SamplingParameters, Submit
from ssd_serve.verifier.control.budget import Ranking, rank
from ssd_serve.verifier.scheduler import ScheduledChunk
from tests.verifier.scheduler_factory import request_of

MODEL, LOOKUP = 2, 4
Expansion = tuple[Sequence[int], Sequence[int], Sequence[float], int]
"""Path, tokens, probabilities and source."""


def ranked(
    *expansions: Expansion, instant: int = 0, most: int | None = None, shape: FixedShape | None = None
) -> Ranking:
    submit = Submit(1, (5, 6), SamplingParameters(max_tokens=40), 1, options=RequestOptions(max_nodes=most))
    request = request_of(submit)
    request.slots.extend([0])
    tree = request.open().tree
    for path, tokens, shares, source in expansions:
        node = tree.root
        for token in path:
            child = tree.child(node, token)
            assert child is not None
            node = child
        tree.expand(node, tokens, [math.log(each) for each in shares], source)
    shapes = {} if shape is None else {0: shape}
    budget, least = (0, 0.99) if shape else (64, 0.0)
    return rank([ScheduledChunk(request, (1,), True)], budget, 64, 8, least, instant, shapes)


def test_nodes_are_ranked_by_reach_with_parents_first() -> None:
    found = ranked(((), [1, 2], [0.6, 0.3], MODEL), ((1,), [3], [0.9], MODEL))
    assert [(token, above) for _, _, token, above in found.nodes] == [(1, -1), (3, 0), (2, -1)]
    assert [reach for reach, *_ in found.nodes] == pytest.approx([0.6, 0.54, 0.3])
    assert list(found.leaves) == pytest.approx([0.54, 0.3])
    assert (found.missed, found.trees) == (0, 1)


@pytest.mark.parametrize("most", [1, 5])
def test_max_nodes_of_a_request_limits_its_ranking(most: int) -> None:
    grown: list[Expansion] = [((), [1, 2], [0.6, 0.3], MODEL), ((1,), [3], [0.9], MODEL)]
    assert ranked(*grown, most=most).nodes == ranked(*grown).nodes[:most]


def test_request_without_drafts_has_no_nodes_or_leaves() -> None:
    found = ranked(((), [1, 2], [0.6, 0.3], MODEL), most=0)
    assert (found.nodes, len(found.leaves), found.missed, found.trees) == ([], 0, 0, 0)


def test_root_without_growth_is_the_best_leaf() -> None:
    found = ranked()
    assert (list(found.leaves), found.missed) == ([1.0], 1)


def test_node_grown_by_lookup_only_is_a_leaf_for_models() -> None:
    lookup: list[Expansion] = [((), [1], [0.6], LOOKUP), ((1,), [3], [0.5], LOOKUP)]
    found = ranked(*lookup, ((), [1, 2], [0.6, 0.2], MODEL), instant=LOOKUP)
    assert found.missed == 0
    assert list(found.leaves) == pytest.approx([0.3, 0.1])
    assert list(ranked(*lookup).leaves) == pytest.approx([0.3])


def test_node_proposed_by_lookup_only_is_no_leaf_for_models() -> None:
    lookup: list[Expansion] = [((), [1], [0.6], LOOKUP), ((1,), [3], [0.5], LOOKUP)]
    found = ranked(*lookup, instant=LOOKUP)
    assert list(found.leaves) == pytest.approx([0.4])
    assert found.missed == 1
    found = ranked(*lookup, ((), [2], [0.8], MODEL), instant=LOOKUP)
    assert list(found.leaves) == pytest.approx([0.4])
    assert found.missed == 0


GROWN: list[Expansion] = [
    ((), [1, 2], [0.5, 0.4], MODEL),
    ((1,), [3], [0.5], MODEL),
    ((2,), [4], [0.1], MODEL),
]


@pytest.mark.parametrize(
    ("shape", "tokens", "incomplete"),
    [
        (FixedShape(1), [1], False),
        (FixedShape(2), [1, 3], False),
        (FixedShape(3), [1, 3], True),
        (FixedShape(3, chain=False), [1, 2, 3], False),
        (FixedShape(9, chain=False), [1, 2, 3, 4], True),
    ],
)
def test_fixed_shape_ignores_budget_and_reach(shape: FixedShape, tokens: list[int], incomplete: bool) -> None:
    found = ranked(*GROWN, shape=shape)
    assert [token for _, _, token, _ in found.nodes] == tokens
    assert (found.forced, found.incomplete) == (len(tokens), incomplete)


def test_fixed_shape_obeys_max_nodes_and_awaits_the_first_growth() -> None:
    assert ranked(*GROWN, shape=FixedShape(3), most=1).forced == 1
    assert ranked(shape=FixedShape(3)).incomplete
