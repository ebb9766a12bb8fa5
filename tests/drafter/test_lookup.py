"""Lookup as a draft source: a subtree in one call, and how sure it is follows from what was right before."""

import math
from collections.abc import Sequence

import pytest

from ssd_serve.base.messages import SamplingParameters
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.drafter.sources.contract import Branch, NodeRequest
from ssd_serve.drafter.sources.lookup import LookupSource


def source(text: Sequence[int], fan_out: int = 3, temperature: float = 0.0) -> LookupSource:
    found = LookupSource(fan_out)
    found.open(1, text, SamplingParameters(temperature=temperature), 0)
    return found


def expand(of: LookupSource, *path: int) -> list[Branch]:
    """The subtree below a path from the root."""
    tree = SpeculationTree(1, 100)
    node = tree.root
    for token in path:
        tree.expand(node, [token], [0.0])
        node = tree.child_at(node, 0)
    (found,) = of.expand([NodeRequest(1, node)], [[1.0]])
    return list(found.branches) if found is not None else []


def chain(branches: Sequence[Branch]) -> list[int]:
    """The best candidates from the top down."""
    tokens: list[int] = []
    for branch in branches:
        if branch.path == tuple(tokens):
            tokens.append(branch.tokens[0])
    return tokens


def test_one_match_gives_a_whole_chain() -> None:
    branches = expand(source([1, 2, 3, 4, 5, 6, 1, 2, 3]))
    assert chain(branches)[:4] == [4, 5, 6, 1]
    assert [branch.path for branch in branches][:3] == [(), (4,), (4, 5)]


def test_no_match_gives_no_subtree() -> None:
    assert expand(source([1, 2, 3, 4, 5])) == []
    assert expand(source([])) == []


def test_a_single_token_match_has_low_probability() -> None:
    one = expand(source([1, 2, 3, 4, 2]))
    assert chain(one)[:2] == [3, 4]
    two = expand(source([5, 2, 3, 1, 2, 4, 5, 2]))
    assert two[0].tokens == [3]
    assert math.exp(one[0].log_probabilities[0]) < math.exp(two[0].log_probabilities[0]) < 0.5


def test_frequent_continuations_rank_first() -> None:
    top, *deeper = expand(source([7, 8, 1, 5, 7, 8, 2, 6, 7, 8, 2, 9, 7, 8]))
    assert top.tokens == [2, 1]
    assert math.exp(top.log_probabilities[0] - top.log_probabilities[1]) == pytest.approx(2.0)
    assert sum(map(math.exp, top.log_probabilities)) < 1
    by_path = {branch.path: branch.tokens for branch in deeper}
    assert (sorted(by_path[(2,)]), by_path[(1,)]) == ([6, 9], [5])


def test_longer_matches_have_higher_probability() -> None:
    short, long = (
        expand(source([*range(90, 90 + size), 5, *range(90, 90 + size)]))[0].log_probabilities[0]
        for size in (2, 12)
    )
    assert short < long < 0


def test_accuracy_is_learnt_from_outcomes() -> None:
    text = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3]
    first = expand(source(text))[0].log_probabilities[0]
    for commit, surer in (([4, 5, 1, 2, 3], True), ([9, 1, 2, 3], False)):
        learning = source(text)
        for _ in range(20):
            assert expand(learning)
            learning.commit(1, commit[:1], (), ())
            learning.commit(1, commit[1:], (), ())
        learning.open(1, text, SamplingParameters(temperature=0.0), 0)
        assert (expand(learning)[0].log_probabilities[0] > first) is surer


def test_draft_tokens_below_an_accepted_path_are_observed_later() -> None:
    learning = source([1, 2, 3, 4, 5, 6, 1, 2])
    before = expand(learning)
    for tokens in ([3, 4], [5, 6]):  # without another search: the subtree still stands
        learning.commit(1, tokens, (), ())
    learning.open(1, [1, 2, 3, 4, 5, 6, 1, 2], SamplingParameters(temperature=0.0), 0)
    after = expand(learning)
    for old, new in list(zip(before, after, strict=False))[:4]:
        assert new.log_probabilities[0] > old.log_probabilities[0]


def test_draft_tokens_are_part_of_the_search() -> None:
    of = source([1, 2, 3, 4, 9, 1])
    assert chain(expand(of, 2))[:2] == [3, 4]
    assert expand(of, 8) == []


def test_accuracy_is_separate_for_greedy_and_sampled_requests() -> None:
    text = [1, 2, 3, 1, 2]
    of = source(text)
    for _ in range(20):
        of.open(1, text, SamplingParameters(temperature=0.0), 0)
        expand(of)
        of.commit(1, (9,), (), ())
    of.open(2, text, SamplingParameters(temperature=1.0), 0)
    of.open(1, text, SamplingParameters(temperature=0.0), 0)
    tree = SpeculationTree(1, 100)
    greedy, sampled = of.expand([NodeRequest(1, tree.root), NodeRequest(2, tree.root)], [[1.0], [1.0]])
    assert greedy is not None
    assert sampled is not None
    assert greedy.branches[0].log_probabilities[0] < sampled.branches[0].log_probabilities[0]
