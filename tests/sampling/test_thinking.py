"""Thinking budget, compared with an evaluation of each path from its beginning."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.base.errors import GrammarError
from ssd_serve.base.messages import SamplingParameters, ThinkingBudget
from ssd_serve.sampling.grammar import Masks
from ssd_serve.sampling.thinking import ThinkingState, output_state
from tests.counting_grammar import Counting, CountingGrammars, may_come
from tests.fakes import VOCABULARY

BEGIN, END = (5, 6), (7, 5)
ANY = set(range(VOCABULARY))
TOKENS = st.lists(st.sampled_from([5, 6, 7, 8]), max_size=14)


def allowed(mask: Masks) -> set[int]:
    return {token for token in range(VOCABULARY) if int(mask[token >> 5]) >> (token & 31) & 1}


def may_follow(output: Sequence[int], budget: int, begin: tuple[int, ...]) -> set[int]:
    text = tuple(output)
    if text[: len(begin)] != begin:
        return ANY
    thoughts = text[len(begin) :]
    for place in range(len(thoughts)):
        if thoughts[place : place + 2] == END:
            return ANY
    if len(thoughts) < budget:
        return ANY
    return {END[1]} if thoughts[-1:] == END[:1] else {END[0]}


@given(TOKENS, TOKENS, st.integers(0, 6), st.booleans())
def test_thinking_budget_masks_along_a_chain(
    output: list[int], chain: list[int], budget: int, in_thoughts: bool
) -> None:
    begin = () if in_thoughts else BEGIN
    state = ThinkingState(ThinkingBudget(budget, begin, END), 2)
    taken = state.consume(output)
    assert all(output[place] in may_follow(output[:place], budget, begin) for place in range(taken))
    if taken < len(output):
        assert output[taken] not in may_follow(output[:taken], budget, begin)
        return
    masks = state.masks(chain, range(-1, len(chain) - 1))
    for place, mask in enumerate(masks):
        path = [*output, *chain[:place]]
        if all(path[each] in may_follow(path[:each], budget, begin) for each in range(len(path))):
            assert allowed(mask) == may_follow(path, budget, begin)
    assert allowed(state.copy().masks()[0]) == may_follow(output, budget, begin)


def test_thinking_budget_masks_of_branches() -> None:
    state = ThinkingState(ThinkingBudget(1, (), END), 2)
    masks = state.masks([8, 7, 5, 9], [-1, -1, 1, 2])
    assert [allowed(mask) == ANY for mask in masks] == [True, False, False, True, True]
    assert [allowed(mask) for mask in masks[1:3]] == [{7}, {5}]


def test_grammar_applies_after_the_thinking_budget() -> None:
    inner = Counting((), 1000)
    state = ThinkingState(ThinkingBudget(50, (), END), 2, inner)
    assert allowed(state.masks()[0]) == may_come(())
    assert state.consume([3, 3]) == 2
    assert allowed(state.masks()[0]) == may_come((3, 3))


def test_output_beyond_the_thinking_budget_is_refused() -> None:
    parameters = SamplingParameters(thinking_budget=ThinkingBudget(2, (), END))
    assert output_state(SamplingParameters(), (8,), VOCABULARY, None) is None
    assert output_state(parameters, (8, 8, *END, 9), VOCABULARY, None) is not None
    with pytest.raises(GrammarError, match="does not match"):
        output_state(parameters, (8, 8, 8), VOCABULARY, None)
    with pytest.raises(GrammarError, match="no grammars"):
        output_state(SamplingParameters(grammar="any"), (), VOCABULARY, None)
    assert output_state(SamplingParameters(grammar="any"), (3,), VOCABULARY, CountingGrammars()) is not None
