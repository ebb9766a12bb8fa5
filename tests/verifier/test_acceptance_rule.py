"""The acceptance rule: draft tokens are accepted where they equal the target's choices."""

import pytest

from ssd_serve.base.messages import SamplingParameters, Submit, TokenLogprobs
from ssd_serve.sampling.choice import Sampled
from ssd_serve.verifier.round import RequestStep, TreeTokens, Walk, walk
from ssd_serve.verifier.scheduler import ScheduledChunk
from tests.verifier.scheduler_factory import request_of

EOS = 0
PROMPT = (1, 2)
TREE = TreeTokens([5, 6, 7, 8], parents=[-1, -1, 0, 2], depths=[1, 1, 2, 3])
"""Below the root the tokens 5 and 6; below 5 the chain 7, 8."""
UNUSED = -1
"""Choice at a node off the accepted path, which the sampler may skip."""


def walked(choices: list[int], tree: TreeTokens = TREE, parameters: SamplingParameters | None = None) -> Walk:
    """Walk a tree with the target's choices at the root and at each node."""
    submit = Submit(0, PROMPT, parameters or SamplingParameters(max_tokens=9), 0)
    chunk = ScheduledChunk(request_of(submit, (EOS,)), (0,), final=True)
    slots = tuple(range(1, 1 + len(tree)))
    logprobs = [TokenLogprobs(-float(row), ()) for row in range(len(choices))]
    return walk(RequestStep(chunk, tree, slots), Sampled(choices, list(logprobs)), 0)


def test_accepted_draft_tokens_equal_the_targets_choices() -> None:
    found = walked([5, 7, UNUSED, 9, UNUSED])
    assert (found.accepted, found.tokens) == ((0, 2), (5, 7, 9))


def test_bonus_token_follows_the_last_accepted_draft_token() -> None:
    assert walked([5, 7, UNUSED, 8, 20]).tokens == (5, 7, 8, 20)


def test_bonus_token_alone_if_no_draft_token_is_accepted() -> None:
    found = walked([9, 7, UNUSED, 8, 20])
    assert (found.accepted, found.tokens) == ((), (9,))


def test_choice_without_tree_is_the_bonus_token() -> None:
    assert walked([9], TreeTokens()).tokens == (9,)


def test_second_child_is_accepted_if_it_equals_the_choice() -> None:
    found = walked([6, UNUSED, 7, UNUSED, UNUSED])
    assert (found.accepted, found.tokens) == ((1,), (6, 7))


def test_child_that_was_not_verified_in_this_forward_is_not_accepted() -> None:
    """The replica may hold token 8 below 7; only rows of this forward count."""
    found = walked([5, 7, UNUSED, 8], TREE.first(3))
    assert (found.accepted, found.tokens) == ((0, 2), (5, 7, 8))


def test_equal_token_below_another_parent_is_not_accepted() -> None:
    found = walked([6, 7, 7, 8, 9])
    assert (found.accepted, found.tokens) == ((1,), (6, 7))


def test_eos_inside_an_accepted_path_ends_the_text() -> None:
    tree = TreeTokens([5, EOS, 7], parents=[-1, 0, 1], depths=[1, 2, 3])
    found = walked([5, EOS, 7, 9], tree)
    assert (found.tokens, found.ended) == ((5, EOS), "stop")
    assert found.accepted == (0,)


def test_ignored_eos_is_an_ordinary_token() -> None:
    tree = TreeTokens([5, EOS], parents=[-1, 0], depths=[1, 2])
    found = walked([5, EOS, 9], tree, SamplingParameters(max_tokens=9, ignore_eos=True))
    assert (found.accepted, found.tokens, found.ended) == ((0, 1), (5, EOS, 9), "")


@pytest.mark.parametrize(("stop", "tokens"), [(5, (5,)), (7, (5, 7)), (9, (5, 7, 8, 9))])
def test_nothing_below_a_stop_token_is_accepted(stop: int, tokens: tuple[int, ...]) -> None:
    found = walked([5, 7, UNUSED, 8, 9], parameters=SamplingParameters(max_tokens=9, stop_token_ids=(stop,)))
    assert (found.tokens, found.ended) == (tokens, "stop")
    assert len(found.accepted) == len(tokens) - 1


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
def test_max_tokens_inside_an_accepted_path_ends_the_text(max_tokens: int) -> None:
    found = walked([5, 7, UNUSED, 8, 9], parameters=SamplingParameters(max_tokens=max_tokens))
    assert (found.tokens, found.ended) == ((5, 7, 8, 9)[:max_tokens], "length")
    assert len(found.accepted) == max_tokens - 1


def test_each_token_has_the_logprobs_of_its_own_row() -> None:
    found = walked([5, 7, UNUSED, 8, 9])
    assert [each.chosen for each in found.logprobs] == [0.0, -1.0, -3.0, -4.0]


def test_rejected_slots_are_those_off_the_path() -> None:
    found = walked([5, 7, UNUSED, 9, UNUSED])
    assert (found.kept, found.rejected) == ([1, 3], [2, 4])


def test_prompt_chunk_that_is_not_the_last_gives_no_token() -> None:
    submit = Submit(0, PROMPT, SamplingParameters(max_tokens=9), 0)
    chunk = ScheduledChunk(request_of(submit, (EOS,)), (0,), final=False)
    assert walk(RequestStep(chunk), Sampled([], []), 0).tokens == ()
