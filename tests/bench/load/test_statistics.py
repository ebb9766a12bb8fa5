"""Percentiles, Student's t, intervals of ratios and sums over answers, on numbers known from elsewhere."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.bench.completions import Speculation
from ssd_serve.bench.load.client import Answer
from ssd_serve.bench.load.statistics import (
    Limits,
    duration,
    is_good,
    percentile,
    ratio_interval,
    summary,
    throughput,
)

LIMITS = Limits(ttft_ms=500, tpot_ms=100)


def answer(ttft_s: float, tpot_s: float, tokens: int = 11, sent_s: float = 0.0, error: str = "") -> Answer:
    first = sent_s + ttft_s
    last = first + tpot_s * (tokens - 1)
    arrivals = ((first, 1), (last, tokens - 1))
    return Answer(sent_s, sent_s, last, arrivals, Speculation(5, tokens, 5, 20, 4, 1), error)


@pytest.mark.parametrize(
    ("percent", "value"), [(0, 1.0), (25, 2.0), (50, 3.0), (90, 4.6), (99, 4.96), (100, 5.0)]
)
def test_percentiles_are_interpolated(percent: float, value: float) -> None:
    assert percentile([5.0, 1.0, 4.0, 2.0, 3.0], percent) == pytest.approx(value)


def test_the_percentile_of_one_value() -> None:
    assert percentile([7.0], 99) == 7.0


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=40), st.floats(0.0, 100.0))
def test_percentiles_are_those_of_the_sorted_values(values: list[float], percent: float) -> None:
    ordered, place = sorted(values), (len(values) - 1) * percent / 100
    below = ordered[math.floor(place)]
    above = ordered[math.ceil(place)]
    slow = below + (above - below) * (place - math.floor(place))
    assert percentile(values, percent) == pytest.approx(slow, rel=1e-9, abs=1e-9)


def density(t: float, freedom: int) -> float:
    """Student's distribution, as in books."""
    scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    return float(scale * (1 + t * t / freedom) ** (-(freedom + 1) / 2))


@pytest.mark.parametrize("count", [2, 3, 6, 12, 24])
def test_the_interval_holds_95_of_100_parts_of_students_distribution(count: int) -> None:
    ratios = [1.0 + 0.01 * place for place in range(count)]
    found = ratio_interval(ratios)
    assert found is not None
    logs = [math.log(ratio) for ratio in ratios]
    error = statistics.stdev(logs) / math.sqrt(count)
    reach = (math.log(found.high) - statistics.fmean(logs)) / error
    steps = 20_000
    inside = (
        sum(density(reach * (step + 0.5) / steps, count - 1) for step in range(steps)) * 2 * reach / steps
    )
    assert inside == pytest.approx(0.95, abs=1e-4)


def test_the_interval_of_ratios_is_students_on_the_logarithms() -> None:
    interval = ratio_interval([1.0, math.e**2, math.e**4])
    assert interval is not None
    assert interval.median == pytest.approx(math.e**2)
    assert interval.mean == pytest.approx(math.e**2)
    half = 4.3027 * 2 / math.sqrt(3)
    assert math.log(interval.high) == pytest.approx(2 + half, rel=1e-4)
    assert math.log(interval.low) == pytest.approx(2 - half, rel=1e-4)


def test_the_interval_of_inverse_ratios_is_the_inverse_interval() -> None:
    ratios = [0.8, 1.1, 1.3, 0.95]
    there, back = ratio_interval(ratios), ratio_interval([1 / ratio for ratio in ratios])
    assert there is not None
    assert back is not None
    assert (1 / back.high, 1 / back.mean, 1 / back.low) == pytest.approx((there.low, there.mean, there.high))


def test_one_pair_has_no_interval() -> None:
    assert ratio_interval([1.0]) is None


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
    assert told["goodput_share"] == 0.6667
    assert told["tokens_per_round"] == 2.0
    assert told["nodes_per_round"] == 4.0
    assert told["acceptance"] == 0.25
    assert told["hit_rate"] == 0.8


def test_a_summary_without_whole_answers() -> None:
    told = summary([answer(0.1, 0.1, error="gone")], LIMITS)
    assert (told["ttft_ms"], told["tokens_per_round"], told["goodput_share"]) == (None, None, 0.0)
