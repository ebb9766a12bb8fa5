"""Tests of token sequences: prompt and output equal one list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.verifier.request import TokenSequence

TOKENS = st.lists(st.integers(0, 9), max_size=6)
PLACE = st.none() | st.integers(-14, 14)


@given(TOKENS, TOKENS, TOKENS, st.builds(slice, PLACE, PLACE, st.sampled_from([None, 1, 2, -1])))
def test_token_sequence_equals_a_list(
    prompt: list[int], output: list[int], more: list[int], some: slice
) -> None:
    text, expected = TokenSequence(tuple(prompt), output), [*prompt, *output]
    text.extend(more)
    expected.extend(more)
    assert list(text) == expected
    assert len(text) == len(expected)
    assert text == TokenSequence((), expected)
    assert text[some] == expected[some]
    assert text != TokenSequence((1,), expected)
    for place in range(-20, 20):
        if -len(expected) <= place < len(expected):
            assert text[place] == expected[place]
        else:
            with pytest.raises(IndexError):
                text[place]


def test_token_sequences_share_their_prompt() -> None:
    prompt = tuple(range(100))
    one, other = TokenSequence(prompt), TokenSequence(prompt)
    assert one.prompt is other.prompt
    one.extend([1, 2])
    chunk = one[99:]
    chunk.append(3)
    assert (chunk, one[-1], len(other)) == ([99, 1, 2, 3], 2, 100)
