"""Sums over answers, on numbers known from elsewhere."""

import pytest

from ssd_serve.bench.completions import Speculation
from ssd_serve.bench.load.client import Answer
from ssd_serve.bench.load.statistics import GoodLimits, duration, is_good, summary, throughput

LIMITS = GoodLimits(ttft_ms=500, tpot_ms=100)


def answer(ttft_s: float, tpot_s: float, tokens: int = 11, sent_s: float = 0.0, error: str = "") -> Answer:
    first = sent_s + ttft_s
    last = first + tpot_s * (tokens - 1)
    arrivals = ((first, 1), (last, tokens - 1))
    return Answer(sent_s, sent_s, last, arrivals, Speculation(5, tokens, 5, 20, 4, 1), error)


def test_good_answers_keep_both_limits_and_are_whole() -> None:
    assert is_good(answer(0.4, 0.09), LIMITS)
    assert not is_good(answer(0.6, 0.09), LIMITS)
    assert not is_good(answer(0.4, 0.11), LIMITS)
    assert not is_good(answer(0.4, 0.09, error="the stream ended"), LIMITS)
    assert is_good(Answer(0.0, 0.0, 0.4, ((0.4, 1),), Speculation()), LIMITS)


def test_throughput_is_from_the_first_request_to_the_last_answer() -> None:
    answers = [answer(0.5, 0.1, sent_s=10.0), answer(0.5, 0.1, sent_s=12.0)]
    assert duration(answers) == pytest.approx(3.5)
    assert throughput(answers) == pytest.approx(22 / 3.5)


def test_a_summary_counts_every_request_and_times_whole_ones() -> None:
    answers = [answer(0.1, 0.02), answer(0.3, 0.04), answer(9.0, 9.0, error="status 429: full")]
    told = summary(answers, LIMITS)
    assert told["requests"] == 3
    assert told["failed"] == 1
    assert told["errors"] == ["status 429: full"]
    assert told["ttft_ms"] == {"p50": 200.0, "p90": 280.0, "p99": 298.0}
    assert told["tpot_ms"] == {"p50": 30.0, "p90": 38.0, "p99": 39.8}
    assert told["goodput_shares"] == {"0.25": 0.3333, "0.5": 0.3333, "1": 0.6667, "2": 0.6667, "4": 0.6667}
    assert told["tokens_per_round"] == 2.0
    assert told["nodes_per_round"] == 4.0
    assert told["acceptance"] == 0.25
    assert told["hit_rate"] == 0.8


def test_a_summary_without_whole_answers() -> None:
    told = summary([answer(0.1, 0.1, error="gone")], LIMITS)
    assert (told["ttft_ms"], told["tokens_per_round"]) == (None, None)
    assert told["goodput_shares"] == dict.fromkeys(("0.25", "0.5", "1", "2", "4"), 0.0)
