"""N-gram lookup: what it finds is what a search by hand finds, and it says how sure it is."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.drafter.sources.contract import NodeRequest
from ssd_serve.drafter.sources.ngram import LONGEST, NgramSource, longest_match
from ssd_serve.drafter.sources.registry import is_source
from ssd_serve.messages import SamplingParameters

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def by_hand(text: Sequence[int], suffix: Sequence[int]) -> tuple[int, Counter[int]]:
    """Every length from the longest down, place by place."""
    for length in range(min(LONGEST, len(suffix)), 0, -1):
        wanted = list(suffix[-length:])
        places = range(length, len(text))
        found = Counter(text[place] for place in places if list(text[place - length : place]) == wanted)
        if found:
            return length, found
    return 0, Counter()


@given(TOKENS, st.lists(st.integers(0, 3), max_size=12))
def test_the_longest_match_is_the_one_that_is_found_by_hand(text: list[int], path: list[int]) -> None:
    suffix = [*text, *path]
    matched, followers = longest_match(np.array(text, dtype=np.int32), suffix)
    assert (matched, Counter(followers.tolist())) == by_hand(text, suffix)


def source(text: Sequence[int], fan_out: int = 3) -> NgramSource:
    found = NgramSource(fan_out)
    found.open(1, text, SamplingParameters(), 0)
    return found


def expand(of: NgramSource, *path: int) -> list[tuple[int, float]] | None:
    """Tokens with their probabilities; None: nothing to say."""
    tree = SpeculationTree(1, 100)
    node = tree.root
    for token in path:
        tree.expand(node, [token], [0.0])
        node = tree.child_at(node, 0)
    (found,) = of.expand([NodeRequest(1, node)], [1.0])
    if found is None:
        return None
    shares = np.exp(found.log_probabilities).tolist()
    mean = sum(share * math.log(share) for share in shares)
    assert found.expected_score == pytest.approx(mean, rel=1e-3)
    return list(zip(found.tokens.tolist(), shares, strict=True))


def test_what_followed_most_often_comes_first_and_never_surely() -> None:
    found = expand(source([7, 1, 7, 2, 7, 2, 7, 3, 9, 7]))
    assert found is not None
    assert [token for token, _ in found] == [2, 1, 3]
    assert [share for _, share in found] == pytest.approx([2 / 6, 1 / 6, 1 / 6])


def test_a_longer_match_is_surer_and_hides_shorter_ones() -> None:
    found = [expand(source(text)) or [] for text in ([1, 5, 2, 1], [4, 3, 2, 1, 5, 2, 1, 8, 4, 3, 2, 1])]
    assert [[token for token, _ in each] for each in found] == [[5], [5]]
    assert [share for each in found for _, share in each] == pytest.approx([1 / 3, 4 / 6])


def test_a_path_of_guesses_is_part_of_the_suffix() -> None:
    of = source([1, 2, 3, 4, 9, 1])
    assert [token for token, _ in expand(of) or ()] == [2]
    assert [token for token, _ in expand(of, 2) or ()] == [3]
    assert [token for token, _ in expand(of, 2, 3) or ()] == [4]
    assert expand(of, 8) is None


def test_committed_tokens_are_looked_up_too_and_a_closed_request_is_forgotten() -> None:
    of = source([1, 2])
    assert expand(of) is None
    for _ in range(50):
        of.commit(1, (3, 1, 2), (), ())
    assert [token for token, _ in expand(of) or ()] == [3]
    of.close(1)
    of.close(1)
    with pytest.raises(KeyError):
        expand(of)


def test_it_is_chosen_by_its_name() -> None:
    assert is_source("ngram")
