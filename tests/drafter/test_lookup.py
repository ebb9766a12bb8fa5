"""Lookup as a draft source: a subtree in one call, with probabilities that follow past accuracy."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ssd_serve.base.messages import SamplingParameters
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.drafter.sources.contract import Branch, NodeRequest
from ssd_serve.drafter.sources.lookup import (
    LONGEST,
    MAX_MATCHES,
    NOTHING,
    LookupSource,
    SharedHistory,
    TokenHistory,
    Tokens,
)


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


TOKENS = st.lists(st.integers(0, 2), max_size=60)
PATHS = st.lists(st.integers(0, 2), max_size=6)


def by_hand(whole: Sequence[int], most: int) -> tuple[int, list[list[int]]] | None:
    """Every place, from the last one, and every length, from the longest down."""
    for length in range(min(LONGEST, len(whole) - 1), 0, -1):
        wanted = list(whole[len(whole) - length :])
        places = [end for end in range(len(whole) - 1, length - 1, -1) if whole[end - length : end] == wanted]
        if places:
            following = [_repeated(whole[end:], most) for end in places]
            return length, following
    return None


def _repeated(tokens: Sequence[int], most: int) -> list[int]:
    return [tokens[index % len(tokens)] for index in range(most)]


@given(TOKENS, PATHS, st.integers(1, 9))
@example([0, 1] * 30, [0], 5)
@example([], [], 3)
@example([1], [], 3)
def test_the_longest_matches_are_found(tokens: list[int], path: list[int], most: int) -> None:
    found = TokenHistory(tokens).match(path, most)
    expected = by_hand([*tokens, *path], most)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert found.length == expected[0]
        assert found.following == expected[1][:MAX_MATCHES]


@given(st.lists(TOKENS, max_size=8), PATHS)
def test_an_extended_history_matches_like_a_new_one(parts: list[list[int]], path: list[int]) -> None:
    grown = TokenHistory(parts[0] if parts else ())
    for part in parts[1:]:
        grown.match([7, 7, 7], 2)
        grown.extend(part)
    whole = [token for part in parts for token in part]
    assert len(grown) == len(whole)
    assert grown.match(path, 4) == TokenHistory(whole).match(path, 4)


def ids(*tokens: int) -> Tokens:
    return np.array(tokens, dtype=np.int32)


def test_history_is_found_by_its_own_salt_only() -> None:
    texts = SharedHistory(100)
    assert texts.match(b"a", ids(1, 2), 3) is None
    texts.add(b"a", ids(1, 2, 3))
    texts.add(b"b", ids(1, 2, 9))
    found = texts.match(b"a", ids(7, 1, 2), 3)
    assert found is not None
    assert found.length == 2
    assert found.following == [[3, NOTHING, NOTHING]]
    assert texts.match(b"c", ids(7, 1, 2), 3) is None
    assert texts.match(b"a", ids(2), 3) is None


def test_matches_do_not_cross_the_end_of_a_request() -> None:
    texts = SharedHistory(100)
    texts.add(b"", ids(1, 2))
    texts.add(b"", ids(3, 4))
    assert texts.match(b"", ids(2, 3), 2) is None
    found = texts.match(b"", ids(1, 2), 2)
    assert found is not None
    assert found.following == [[NOTHING, 3]]


@given(
    st.integers(1, 30),
    st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.lists(st.integers(0, 5), max_size=50))),
)
def test_history_is_bounded_and_keeps_the_newest(limit: int, added: list[tuple[bytes, list[int]]]) -> None:
    texts = SharedHistory(limit)
    for salt, tokens in added:
        texts.add(salt, ids(*tokens))
        assert len(texts) <= 2 * limit
        if limit >= len(tokens) >= 3:
            found = texts.match(salt, ids(*tokens[:-1]), 1)
            assert found is not None
            assert [tokens[-1]] in found.following


def first(of: LookupSource, request: int) -> list[int]:
    (found,) = of.expand([NodeRequest(request, SpeculationTree(1, 100).root)], [[1.0]])
    return found.branches[0].tokens if found is not None else []


def opened(of: LookupSource, request: int, text: list[int], salt: bytes) -> None:
    of.open(request, text, SamplingParameters(), 0)
    of.salt(request, salt)


def test_a_request_drafts_from_the_history_of_its_salt() -> None:
    of = LookupSource(2, SharedHistory(100))
    opened(of, 1, [1, 2, 3, 4], b"key")
    of.commit(1, (5, 6), (), ())
    opened(of, 2, [9, 3, 4], b"key")
    opened(of, 3, [9, 3, 4], b"other key")
    assert first(of, 2) == []  # not yet finished
    of.share(1)
    of.close(1)
    assert first(of, 2) == [5]
    assert first(of, 3) == []


def test_own_tokens_win_ties_against_history() -> None:
    of = LookupSource(2, SharedHistory(100))
    opened(of, 1, [1, 3, 4, 5], b"")
    of.share(1)
    opened(of, 2, [3, 4, 8, 3, 4], b"")
    assert first(of, 2) == [8]
    opened(of, 3, [3, 4, 8, 1, 3, 4], b"")
    assert first(of, 3) == [5]


def test_without_history_nothing_is_shared() -> None:
    of = LookupSource(2)
    opened(of, 1, [1, 2, 3], b"")
    of.share(1)
    opened(of, 2, [1, 2], b"")
    assert first(of, 2) == []
