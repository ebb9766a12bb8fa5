"""Lookup: an index finds the longest matches, and a subtree has probabilities that follow past accuracy."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ssd_serve.drafter.sources.contract import Branch
from ssd_serve.drafter.sources.lookup import (
    LONGEST,
    MAX_MATCHES,
    Match,
    MatchAccuracy,
    SharedHistory,
    TokenIndex,
    branches,
)


def subtree(text: Sequence[int], fan_out: int = 3, depth: int = 24) -> list[Branch]:
    match = TokenIndex(text).match(depth)
    accuracy = MatchAccuracy()
    return branches(match, lambda length: accuracy.share(0.0, length), fan_out, depth) if match else []


def chain(found: Sequence[Branch]) -> list[int]:
    """The best candidates from the top down."""
    tokens: list[int] = []
    for branch in found:
        if branch.path == tuple(tokens):
            tokens.append(branch.tokens[0])
    return tokens


def test_one_match_gives_a_whole_chain() -> None:
    found = subtree([1, 2, 3, 4, 5, 6, 1, 2, 3])
    assert chain(found)[:4] == [4, 5, 6, 1]
    assert [branch.path for branch in found][:3] == [(), (4,), (4, 5)]


@pytest.mark.parametrize("text", [[], [1], [1, 2, 3, 4, 5], [1, 2, 3, 4, 2]])
def test_no_match_of_two_tokens_gives_no_subtree(text: list[int]) -> None:
    assert not TokenIndex(text).repeats
    assert subtree(text) == []


def test_frequent_continuations_rank_first() -> None:
    top, *deeper = subtree([7, 8, 1, 5, 7, 8, 2, 6, 7, 8, 2, 9, 7, 8])
    assert top.tokens == [2, 1]
    assert math.exp(top.log_probabilities[0] - top.log_probabilities[1]) == pytest.approx(2.0)
    assert sum(map(math.exp, top.log_probabilities)) < 1
    by_path = {branch.path: branch.tokens for branch in deeper}
    assert (sorted(by_path[(2,)]), by_path[(1,)]) == ([6, 9], [5])


def test_longer_matches_have_higher_probability() -> None:
    short, long = (
        subtree([*range(90, 90 + size), 5, *range(90, 90 + size)])[0].log_probabilities[0] for size in (2, 12)
    )
    assert short < long < 0


def test_a_long_match_is_drafted_to_its_full_depth() -> None:
    text = list(range(100, 140))
    found = subtree([*text, 1, *text[:32]], depth=24)
    assert chain(found) == [*text[32:], 1, *text[:15]]


def test_subtree_is_bounded_and_drops_unlikely_nodes() -> None:
    match = Match(30, [[index % 4, index // 4 % 4, index // 16, *[index] * 20] for index in range(32)])
    found = branches(match, lambda _length: 0.999, 4, 24)
    assert 8 < len(found) <= 32
    paths = [branch.path for branch in found]
    assert all(path[:-1] in paths[:place] for place, path in enumerate(paths) if path)
    assert [branch.path for branch in branches(match, lambda _length: 0.1, 4, 24)] == [()]


TOKENS = st.lists(st.integers(0, 2), max_size=60)


def by_hand(text: Sequence[int], suffix: Sequence[int]) -> tuple[int, list[int]] | None:
    """Every place of the last two tokens, from the last one, and every length, from the longest down."""
    if len(suffix) < 2:
        return None
    ends = [end for end in range(len(text), 1, -1) if list(text[end - 2 : end]) == list(suffix[-2:])]
    ends = ends[:MAX_MATCHES]
    for length in range(min(LONGEST, len(suffix)), 1, -1):
        wanted = list(suffix[-length:])
        places = [end for end in ends if end >= length and list(text[end - length : end]) == wanted]
        if places:
            return length, places
    return None


@given(st.lists(TOKENS, min_size=1, max_size=5), st.integers(1, 9))
@example([[0, 1] * 30, [0]], 5)
@example([[]], 3)
@example([[1], [1]], 3)
def test_the_longest_matches_are_found(parts: list[list[int]], most: int) -> None:
    index = TokenIndex(parts[0])
    for part in parts[1:]:
        index.extend(part)
    text = [token for part in parts for token in part]
    found, expected = index.match(most), by_hand(text[:-1], text)
    assert index.tokens == text
    assert index.repeats is (expected is not None)
    if expected is None:
        assert found is None
    else:
        length, ends = expected
        assert found == Match(length, [[(text[end:] * most)[at] for at in range(most)] for end in ends])


@given(TOKENS, TOKENS, st.integers(1, 9))
def test_matches_in_another_text_end_with_it(text: list[int], suffix: list[int], most: int) -> None:
    found, expected = TokenIndex(text).match_elsewhere(suffix, most), by_hand(text, suffix)
    if expected is None or expected[1] == [len(text)]:
        assert found is None
    else:
        assert found == Match(expected[0], [text[end : end + most] for end in expected[1]])


def test_history_is_found_by_its_own_salt_only() -> None:
    texts = SharedHistory(100)
    assert texts.match(b"a", [1, 2], 3) is None
    texts.add(b"a", [1, 2, 3])
    texts.add(b"b", [1, 2, 9])
    found = texts.match(b"a", [7, 1, 2], 3)
    assert found is not None
    assert found.length == 2
    assert found.following == [[3]]
    assert texts.match(b"c", [7, 1, 2], 3) is None
    assert texts.match(b"a", [2], 3) is None


def test_matches_do_not_cross_the_end_of_a_request() -> None:
    texts = SharedHistory(100)
    texts.add(b"", [1, 2])
    texts.add(b"", [3, 4])
    assert texts.match(b"", [2, 3], 2) is None
    assert texts.match(b"", [1, 2], 2) is None


@given(
    st.integers(1, 30),
    st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.lists(st.integers(0, 5), max_size=50))),
)
def test_history_is_bounded_and_keeps_the_newest(limit: int, added: list[tuple[bytes, list[int]]]) -> None:
    texts = SharedHistory(limit)
    for salt, tokens in added:
        texts.add(salt, tokens)
        assert len(texts) <= 2 * limit
        if limit >= len(tokens) >= 3:
            found = texts.match(salt, tokens[:-1], 1)
            assert found is not None
            assert [tokens[-1]] in found.following
