"""Token histories: matches within a request and in the history of a salt."""

from collections.abc import Sequence

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from ssd_serve.base.messages import SamplingParameters
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.drafter.sources.contract import NodeRequest, Subtree
from ssd_serve.drafter.sources.lookup import (
    LONGEST,
    MAX_MATCHES,
    NOTHING,
    LookupSource,
    SharedHistory,
    TokenHistory,
    Tokens,
)

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
        grown.match([7, 7, 7], 2)  # what is only asked for leaves nothing behind
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
    assert found.following == [[NOTHING, 3]]  # who reads it stops where the text is over


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
    return found.branches[0].tokens if isinstance(found, Subtree) else []


def opened(of: LookupSource, request: int, text: list[int], salt: bytes) -> None:
    of.open(request, text, SamplingParameters(), 0)
    of.salt(request, salt)


def test_a_request_drafts_from_the_history_of_its_salt() -> None:
    of = LookupSource(2, SharedHistory(100))
    opened(of, 1, [1, 2, 3, 4], b"key")
    of.commit(1, (5, 6), (), ())
    opened(of, 2, [9, 3, 4], b"key")
    opened(of, 3, [9, 3, 4], b"other key")
    assert first(of, 2) == []  # while it is written, nobody else's business
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
