"""Percentiles, intervals of ratios and their verdicts, on numbers known from elsewhere."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.bench.statistics import Interval, Verdict, percentile, quartiles, ratio_interval


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


def test_an_interval_of_many_pairs_is_drawn_and_needs_no_normal_ratios() -> None:
    """It holds the true mean of a skewed distribution in about 95 of 100 cases, and the same every time."""
    random = np.random.default_rng(7)
    held = 0
    for _ in range(200):
        interval = ratio_interval(np.exp(random.exponential(0.2, 64)).tolist())
        assert interval is not None
        held += interval.low <= math.exp(0.2) <= interval.high
    assert 0.88 <= held / 200 <= 0.99
    ratios = [1.0 + 0.01 * place for place in range(40)]
    assert ratio_interval(ratios) == ratio_interval(ratios)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.01, 1.5, Verdict.BETTER),
        (1.0, 1.5, Verdict.AS_GOOD),
        (0.97, 0.99, Verdict.AS_GOOD),
        (0.969, 1.2, Verdict.NOT_SHOWN),
        (0.5, 1.0, Verdict.NOT_SHOWN),
        (0.96, 0.999, Verdict.WORSE),
        (0.5, 0.6, Verdict.WORSE),
    ],
)
def test_verdicts(low: float, high: float, expected: Verdict) -> None:
    assert Interval(low, low, low, high).verdict is expected


def test_noise_shows_nothing_and_more_pairs_show_what_is_true() -> None:
    random = np.random.default_rng(3)
    noisy = np.exp(random.normal(0.0, 0.2, 400)).tolist()
    few, many = ratio_interval(noisy[:8]), ratio_interval(noisy)
    assert few is not None
    assert many is not None
    assert (few.verdict, many.verdict) == (Verdict.NOT_SHOWN, Verdict.AS_GOOD)
    assert many.scaled(0.8).verdict is Verdict.WORSE
    assert str(many.scaled(2)).startswith("2.0")


def test_quartiles() -> None:
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == [2.0, 3.0, 4.0]
