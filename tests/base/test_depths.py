"""Counts by depth from histograms: every depth that something came to, and those above it."""

import pytest

from ssd_serve.base.messages import (
    POSITIONS,
    acceptance_rates,
    bounded_positions,
    by_position,
    sum_histograms,
)


def test_what_came_to_a_depth_was_at_every_one_above() -> None:
    assert by_position([5, 1, 0, 2]) == [3, 2, 2]
    assert by_position([5]) == by_position([]) == []


def test_the_counts_sum_up_to_all_depths_however_deep() -> None:
    histogram = [3, *range(40)]
    told = bounded_positions(by_position(histogram))
    assert len(told) == POSITIONS + 1
    assert sum(told) == sum(depth * count for depth, count in enumerate(histogram))
    assert told[POSITIONS] == sum((depth - POSITIONS) * histogram[depth] for depth in range(POSITIONS, 41))
    assert bounded_positions([]) == [0] * (POSITIONS + 1)


def test_histograms_of_different_depths_are_added() -> None:
    assert sum_histograms([[1, 2], [], [0, 1, 4]]) == [1, 3, 4]
    assert sum_histograms([]) == []


def test_rates_are_of_the_rounds_that_had_a_node_there() -> None:
    assert acceptance_rates([2, 0, 4, 4], [5, 3, 1, 1]) == [pytest.approx(5 / 8), pytest.approx(2 / 8), 1 / 4]
    assert acceptance_rates([0, 0, 3], [3]) == [0.0, 0.0]
    assert acceptance_rates([7], [7]) == []
    assert len(acceptance_rates([0] * 30 + [1], [1])) == POSITIONS
