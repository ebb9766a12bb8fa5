"""Prompts have their lengths, some begin alike, and all are the same for every mode."""

import math
import statistics

import pytest

from ssd_serve.bench.load.requests import Mix, RequestMaker, held_out_texts
from ssd_serve.bench.load.trace import Arrival
from ssd_serve.bench.prompts import Prompt

POOL = [Prompt(f"file {index}", tuple(range(100 * index, 100 * index + 90)), index) for index in range(8)]


def test_a_burst_is_the_same_each_time_and_another_one_differs() -> None:
    maker, mix = RequestMaker(POOL), Mix(20, 20, 12)
    burst = maker.burst("4:0", 6, mix)
    assert maker.burst("4:0", 6, mix) == burst
    other = maker.burst("4:1", 6, mix)
    assert len({one.seed for one in [*burst, *other]}) == 12
    assert len({one.prompt for one in burst}) == 6
    assert {len(one.prompt) for one in burst} == {20}
    assert {one.tokens for one in burst} == {12}


def test_other_candidates_are_other_texts_of_the_same_length() -> None:
    maker, mix = RequestMaker(POOL), Mix(20, 80, 12, shared=0.5)
    for candidates in maker.candidates("4:0", 9, mix):
        some = [candidates(attempt) for attempt in range(5)]
        assert some == [candidates(attempt) for attempt in range(5)]
        assert len({len(one.prompt) for one in some}) == 1
        assert len({one.prompt for one in some}) > 2
        assert len({one.seed for one in some}) == 5
        ends = {POOL[number].tokens[-1]: POOL[number].path for number in range(len(POOL))}
        assert all(one.path == ends[int(one.prompt[-1])] for one in some)


def test_lengths_are_even_on_a_logarithmic_scale() -> None:
    burst = RequestMaker(POOL).burst("many", 400, Mix(64, 1500, 1))
    lengths = [len(one.prompt) for one in burst]
    assert min(lengths) >= 64
    assert max(lengths) <= 1500
    middle = math.exp((math.log(64) + math.log(1500)) / 2)
    assert statistics.median(lengths) == pytest.approx(middle, rel=0.15)


def test_a_share_of_the_prompts_begins_with_one_of_a_few_texts() -> None:
    burst = RequestMaker(POOL).burst("shared", 200, Mix(100, 400, 1, shared=0.5, prefix=50))
    begins = [one.prompt[:50] for one in burst]
    alike = [begin for begin in begins if begins.count(begin) > 8]
    assert 0.4 < len(alike) / len(begins) < 0.6
    assert 2 <= len(set(alike)) <= 4
    assert len({one.prompt[50:] for one in burst}) > 50


def test_a_shared_beginning_is_at_most_half_of_a_prompt() -> None:
    (one,) = RequestMaker(POOL).burst("short", 1, Mix(30, 30, 1, shared=1.0, prefix=1000))
    assert len(one.prompt) == 30


def test_prompts_of_a_replay_have_the_length_of_the_trace() -> None:
    arrivals = [Arrival(0.0, 5, 1), Arrival(0.5, 90, 2), Arrival(1.0, 1000, 3)]
    wanted = [candidates(0) for candidates in RequestMaker(POOL).replay(arrivals)]
    assert [len(one.prompt) for one in wanted] == [5, 90, 1000]
    assert [one.tokens for one in wanted] == [1, 2, 3]
    assert [one.at_s for one in wanted] == [0.0, 0.5, 1.0]
    assert len({one.seed for one in wanted}) == 3


def test_prompts_for_other_tokenizers_are_texts() -> None:
    texts = held_out_texts("a name", 3, Mix(40, 60, 1))
    assert len(set(texts)) == 3
    assert all(40 < len(text) < 600 for text in texts)
