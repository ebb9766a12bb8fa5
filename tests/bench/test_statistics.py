"""Percentiles, intervals of ratios, verdicts, interleaving and tuning."""

import itertools
import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from ssd_serve.bench.statistics import (
    Interval,
    adjacent,
    interleave,
    percentile,
    quartiles,
    random_order,
    ratio_interval,
    tune,
)

LADDER = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)


def test_percentiles_are_interpolated() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, part) for part in (0, 90, 100)] == pytest.approx([1.0, 4.6, 5.0])
    assert percentile([7.0], 99) == 7.0
    assert quartiles(values) == [2.0, 3.0, 4.0]


def interval_of(ratios: Sequence[float]) -> Interval:
    interval = ratio_interval(ratios)
    assert interval is not None
    return interval


def test_ratio_interval_is_students_t_of_the_logarithms() -> None:
    interval = interval_of([1.0, math.e**2, math.e**4])
    assert interval.median == pytest.approx(math.e**2)
    assert interval.mean == pytest.approx(math.e**2)
    half = 4.3027 * 2 / math.sqrt(3)
    assert math.log(interval.high) == pytest.approx(2 + half, rel=1e-4)
    assert math.log(interval.low) == pytest.approx(2 - half, rel=1e-4)
    assert ratio_interval([1.0]) is None


def test_ratio_interval_of_many_pairs_covers_a_skewed_mean() -> None:
    source = np.random.default_rng(7)
    held = 0
    for _ in range(100):
        interval = interval_of(np.exp(source.exponential(0.2, 64)).tolist())
        held += interval.low <= math.exp(0.2) <= interval.high
    assert 0.88 <= held / 100 <= 0.99
    ratios = [1.0 + 0.01 * place for place in range(40)]
    assert ratio_interval(ratios) == ratio_interval(ratios)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.01, 1.5, "better"),
        (0.97, 1.5, "as good"),
        (0.969, 1.2, "not shown"),
        (0.5, 1.0, "not shown"),
        (0.96, 0.999, "worse"),
    ],
)
def test_verdicts(low: float, high: float, expected: str) -> None:
    assert Interval(low, low, low, high).verdict == expected


def test_few_noisy_pairs_have_the_verdict_not_shown() -> None:
    noisy = np.exp(np.random.default_rng(3).normal(0.0, 0.2, 400)).tolist()
    assert (interval_of(noisy[:8]).verdict, interval_of(noisy).verdict) == ("not shown", "as good")


def test_random_order_depends_on_the_index_and_has_every_predecessor() -> None:
    orders = [random_order(["a", "b", "c"], index) for index in range(200)]
    assert orders == [random_order(["a", "b", "c"], index) for index in range(200)]
    assert {"".join(sorted(order)) for order in orders} == {"abc"}
    assert len({pair for order in orders for pair in itertools.pairwise(order)}) == 6


def test_interleave_runs_every_item_once_on_every_entry() -> None:
    log: list[tuple[str, int, int]] = []

    def run(entry: str, item: int, place: int) -> int:
        log.append((entry, item, place))
        return 10 * item + place

    found = interleave(["a", "b", "c", "a"], [7, 8], run)
    assert [item for _, item, _ in log] == [7] * 3 + [8] * 3
    assert [place for _, _, place in log] == [0, 1, 2, 0, 1, 2]
    assert {entry: [value // 10 for value in values] for entry, values in found.items()} == {
        name: [7, 8] for name in "abc"
    }


def around(value: int) -> list[int]:
    return adjacent(LADDER, value)


def near(best: float) -> Callable[[int], float]:
    return lambda value: 100 - abs(value - best)


@pytest.mark.parametrize("best", [1, 5, 24])
def test_tune_finds_the_best_and_tries_its_neighbours(best: int) -> None:
    def speeds(values: Sequence[int], items: Sequence[int]) -> dict[int, float]:
        return {value: 9 - abs(math.log(value / best)) for value in values}

    found, tried = tune((2, 4), around, speeds, range(8))
    assert found == best
    assert {best, *around(best)} <= set(tried)


def test_tune_compares_a_challenger_again_on_all_items_twice() -> None:
    asked: list[tuple[list[int], int]] = []

    def speeds(values: Sequence[int], items: Sequence[int]) -> dict[int, float]:
        asked.append((sorted(values), len(items)))
        return {value: near(6)(value) for value in values}

    assert tune((1, 2, 4, 8), around, speeds, range(8))[0] == 6
    assert asked == [([1, 2, 4, 8], 8), ([3, 4, 5], 8), ([4, 5], 16), ([5, 6], 8), ([5, 6], 16), ([6, 8], 8)]


@pytest.mark.parametrize(("best", "luck"), [(4, 2.0), (5, 3.0)])
def test_tune_rejects_a_neighbour_that_was_fast_by_chance(best: int, luck: float) -> None:
    def speeds(values: Sequence[int], items: Sequence[int]) -> dict[int, float]:
        return {value: near(best)(value) + luck * (value == 3 and len(values) > 2) for value in values}

    found, tried = tune((4,), around, speeds, range(8))
    assert found == best
    assert tried[3] == near(best)(3), "the second comparison counts"


def test_tune_scales_the_speeds_of_a_slow_comparison() -> None:
    pace = iter([1.0, 0.5, 0.25])

    def speeds(values: Sequence[int], items: Sequence[int]) -> dict[int, float]:
        now = next(pace)
        return {value: now * near(4)(value) for value in values}

    best, tried = tune((2, 4), around, speeds, range(8))
    assert best == 4
    assert tried == pytest.approx({2: 98, 3: 99, 4: 100, 5: 99})


def test_tune_ignores_the_scale_of_a_failed_entry() -> None:
    def speeds(values: Sequence[int], items: Sequence[int]) -> dict[int, float]:
        return {value: 0.0 if value == 2 else float(value) for value in values}

    assert tune((2,), around, speeds, range(8)) == (24, {value: value for value in LADDER} | {2: 0})


def test_tune_ends_with_noise_and_loses_little_speed() -> None:
    chance = random.Random(5)

    def truth(value: int) -> float:
        return 100 - 2 * abs(LADDER.index(value) - 6)

    def speeds(values: Sequence[int], items: Sequence[int]) -> dict[int, float]:
        return {
            value: sum(truth(value) * math.exp(chance.gauss(0, 0.05)) for _ in items) / len(items)
            for value in values
        }

    found = [truth(tune((2, 4, 8), around, speeds, range(8))[0]) for _ in range(50)]
    assert min(found) >= 94
    assert sum(found) / len(found) >= 99.5
