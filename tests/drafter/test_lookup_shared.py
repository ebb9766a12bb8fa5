"""Texts that are over: found by those of the same salt, bounded, the one used longest ago forgotten first."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.base.messages import SamplingParameters
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.drafter.sources.contract import NodeRequest, Subtree
from ssd_serve.drafter.sources.lookup import LookupSource
from ssd_serve.drafter.sources.lookup_text import NOTHING, SharedHistory, Tokens


def ids(*tokens: int) -> Tokens:
    return np.array(tokens, dtype=np.int32)


def test_a_text_is_found_by_its_salt_only_and_ends_where_it_ended() -> None:
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


def test_nothing_is_found_across_the_end_of_a_text() -> None:
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
def test_they_are_bounded_and_the_newest_is_there(limit: int, added: list[tuple[bytes, list[int]]]) -> None:
    texts = SharedHistory(limit)
    for salt, tokens in added:
        texts.add(salt, ids(*tokens))
        assert len(texts) <= 2 * limit
        if limit >= len(tokens) >= 3:
            found = texts.match(salt, ids(*tokens[:-1]), 1)
            assert found is not None
            assert [tokens[-1]] in found.following


def first(of: LookupSource, request: int) -> list[int]:
    """What should follow the text of a request."""
    (found,) = of.expand([NodeRequest(request, SpeculationTree(1, 100).root)], [[1.0]])
    return found.branches[0].tokens if isinstance(found, Subtree) else []


def opened(of: LookupSource, request: int, text: list[int], salt: bytes) -> None:
    of.open(request, text, SamplingParameters(), 0)
    of.salt(request, salt)


def test_a_request_finds_what_others_of_its_salt_have_left() -> None:
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


def test_its_own_text_comes_first_where_it_is_as_much_alike() -> None:
    of = LookupSource(2, SharedHistory(100))
    opened(of, 1, [1, 3, 4, 5], b"")
    of.share(1)
    opened(of, 2, [3, 4, 8, 3, 4], b"")
    assert first(of, 2) == [8]
    opened(of, 3, [3, 4, 8, 1, 3, 4], b"")
    assert first(of, 3) == [5]


def test_without_shared_texts_nothing_is_left() -> None:
    of = LookupSource(2)
    opened(of, 1, [1, 2, 3], b"")
    of.share(1)
    opened(of, 2, [1, 2], b"")
    assert first(of, 2) == []
