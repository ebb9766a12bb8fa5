"""Looking a text up: what it finds is what a search by hand finds."""

from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from ssd_serve.drafter.sources.lookup_text import LONGEST, MAX_MATCHES, TokenHistory

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
def test_the_places_that_are_most_alike_are_found(tokens: list[int], path: list[int], most: int) -> None:
    found = TokenHistory(tokens).match(path, most)
    expected = by_hand([*tokens, *path], most)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert found.length == expected[0]
        assert found.following == expected[1][:MAX_MATCHES]


@given(st.lists(TOKENS, max_size=8), PATHS)
def test_a_text_that_grew_is_looked_up_as_one_that_was_there(parts: list[list[int]], path: list[int]) -> None:
    grown = TokenHistory(parts[0] if parts else ())
    for part in parts[1:]:
        grown.match([7, 7, 7], 2)  # what is only asked for leaves nothing behind
        grown.extend(part)
    whole = [token for part in parts for token in part]
    assert len(grown) == len(whole)
    assert grown.match(path, 4) == TokenHistory(whole).match(path, 4)
