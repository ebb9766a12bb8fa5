"""Arrivals have the rate that was asked for, and come as evenly as was asked for."""

import math
import statistics

import pytest

from ssd_serve.bench.load.arrivals import arrival_times


def pauses(rate: float, burstiness: float, seed: int = 0) -> list[float]:
    times = arrival_times(4000, rate, burstiness, seed)
    return [later - sooner for sooner, later in zip([0.0, *times], times, strict=False)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rate", [0.5, 30.0])
def test_every_seed_offers_the_same_rate(rate: float, seed: int) -> None:
    assert arrival_times(200, rate, seed=seed)[-1] == pytest.approx(200 / rate)


def test_a_poisson_process_has_exponential_pauses() -> None:
    found = pauses(rate=8.0, burstiness=1.0)
    assert statistics.fmean(found) == pytest.approx(1 / 8)
    assert statistics.stdev(found) == pytest.approx(1 / 8, rel=0.1)
    for part in (0.5, 1.0, 2.0):  # in mean pauses
        longer = sum(pause > part / 8 for pause in found) / len(found)
        assert longer == pytest.approx(math.exp(-part), abs=0.03)


def test_arrivals_of_a_poisson_process_in_a_second_scatter_as_much_as_their_mean() -> None:
    times = arrival_times(20_000, 10.0)
    counts = [0] * 2000
    for at in times[:-1]:
        counts[int(at)] += 1
    assert statistics.variance(counts) == pytest.approx(10.0, rel=0.15)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_is_the_shape_of_the_pauses(burstiness: float) -> None:
    found = pauses(rate=5.0, burstiness=burstiness)
    variation = statistics.stdev(found) / statistics.fmean(found)
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)


def test_times_follow_from_the_seed_and_rise() -> None:
    times = arrival_times(50, 3.0, seed=4)
    assert times == arrival_times(50, 3.0, seed=4)
    assert times != arrival_times(50, 3.0, seed=5)
    assert times == sorted(times)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(3, math.inf) == [0.0, 0.0, 0.0]
