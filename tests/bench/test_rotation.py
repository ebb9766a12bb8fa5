"""Rotation and tuning on a machine whose truth is known: speeds of a shape, drift, and noise."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.bench.rotation import next_to, rotate, tune, turn

LADDER = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)


@given(st.integers(1, 9))
def test_everybody_is_once_in_every_turn_and_as_often_at_every_place(count: int) -> None:
    names = list(range(count))
    places = Counter(
        (name, place) for index in range(2 * count) for place, name in enumerate(turn(names, index))
    )
    assert set(places.values()) == {2}
    assert len(places) == count * count


@given(st.integers(1, 9), st.integers(0, 30))
def test_over_two_turns_nobody_is_earlier_than_another(count: int, start: int) -> None:
    first, second = turn(list(range(count)), 2 * start), turn(list(range(count)), 2 * start + 1)
    assert {first.index(name) + second.index(name) for name in first} == {count - 1}


def test_every_item_runs_once_on_every_entry() -> None:
    log: list[tuple[str, int]] = []

    def run(entry: str, item: int) -> int:
        log.append((entry, item))
        return len(log)

    found = rotate(["a", "b", "c", "a"], [7, 8], run)
    assert log == [("a", 7), ("b", 7), ("c", 7), ("c", 8), ("b", 8), ("a", 8)]
    assert found == {"a": [1, 6], "b": [2, 5], "c": [3, 4]}


def test_a_machine_that_slows_down_steadily_slows_all_alike() -> None:
    clock = 0.0

    def run(entry: str, item: int) -> float:
        nonlocal clock
        clock += 1.0
        return 100.0 - clock

    found = rotate(["a", "b", "c"], list(range(6)), run)
    assert len({sum(speeds) for speeds in found.values()}) == 1


def around(value: int) -> list[int]:
    return next_to(LADDER, value)


def speeds_by(truth: Callable[[int], float], noise: float = 0.0) -> Callable[..., dict[int, float]]:
    chance = random.Random(5)

    def speeds(values: Sequence[int], items: Sequence[int]) -> dict[int, float]:
        return {
            value: sum(truth(value) * math.exp(chance.gauss(0, noise)) for _ in items) / len(items)
            for value in values
        }

    return speeds


@pytest.mark.parametrize("best", LADDER)
def test_the_best_is_found_wherever_it_is_and_its_neighbours_were_tried(best: int) -> None:
    """The grid goes on beyond where it began, until the best has been beaten on both sides."""
    found, tried = tune((2, 4), around, speeds_by(lambda value: 9 - abs(math.log(value / best))), range(8))
    assert found == best
    assert {best, *around(best)} <= set(tried)


def near(best: float) -> Callable[[int], float]:
    return lambda value: 100 - abs(value - best)


def test_all_that_it_starts_with_run_on_all_items_and_who_seems_faster_fights_a_duel() -> None:
    asked: list[tuple[list[int], int]] = []

    def speeds(values: Sequence[int], items: Sequence[int]) -> dict[int, float]:
        asked.append((sorted(values), len(items)))
        return {value: near(6)(value) for value in values}

    assert tune((1, 2, 4, 8), around, speeds, range(8))[0] == 6
    assert asked == [([1, 2, 4, 8], 8), ([3, 4, 5], 8), ([4, 5], 16), ([5, 6], 8), ([5, 6], 16), ([6, 8], 8)]


def test_a_neighbour_that_was_lucky_once_does_not_take_the_place_of_the_best() -> None:
    luck = {3: 2.0}

    def speeds(values: Sequence[int], items: Sequence[int]) -> dict[int, float]:
        lucky = len(values) > 2
        return {value: near(4)(value) + (luck.get(value, 0) if lucky else 0) for value in values}

    best, tried = tune((4,), around, speeds, range(8))
    assert best == 4
    assert tried[3] == 99, "the speed that counts is that of the duel"


def test_the_luck_of_one_neighbour_does_not_hide_another_that_is_faster() -> None:
    def speeds(values: Sequence[int], items: Sequence[int]) -> dict[int, float]:
        return {value: near(5)(value) + (3.0 if value == 3 and len(values) > 2 else 0) for value in values}

    assert tune((4,), around, speeds, range(8))[0] == 5


def test_a_slow_minute_makes_nobody_slower_than_those_of_another_minute() -> None:
    pace = iter([1.0, 0.5, 0.25])

    def speeds(values: Sequence[int], items: Sequence[int]) -> dict[int, float]:
        now = next(pace)
        return {value: now * near(4)(value) for value in values}

    best, tried = tune((2, 4), around, speeds, range(8))
    assert best == 4
    assert tried == pytest.approx({2: 98, 3: 99, 4: 100, 5: 99})


def test_who_fails_loses_and_scales_nobody() -> None:
    def speeds(values: Sequence[int], items: Sequence[int]) -> dict[int, float]:
        return {value: 0.0 if value == 2 else float(value) for value in values}

    assert tune((2,), around, speeds, range(8)) == (24, {value: value for value in LADDER} | {2: 0})


def test_a_duel_has_items_of_its_own_where_some_are_given() -> None:
    asked: list[Sequence[int]] = []

    def speeds(values: Sequence[int], items: Sequence[int]) -> dict[int, float]:
        asked.append(items)
        return {value: float(value) for value in values}

    assert tune((20,), around, speeds, range(8), range(8, 24)) == (24, {16: 16, 20: 20, 24: 24})
    assert asked == [range(8), range(8, 24)]


def test_noise_costs_little_speed_and_never_goes_on_for_ever() -> None:
    def truth(value: int) -> float:
        return 100 - 2 * abs(LADDER.index(value) - 6)

    speeds = speeds_by(truth, 0.05)
    found = [truth(tune((2, 4, 8), around, speeds, range(8))[0]) for _ in range(50)]
    assert min(found) >= 94
    assert sum(found) / len(found) >= 99.5


def test_what_has_no_neighbours_needs_no_measuring() -> None:
    def nothing(_value: str) -> Iterator[str]:
        return iter(())

    assert tune(["only"], nothing, lambda _values, _items: {}, [1]) == ("only", {})
