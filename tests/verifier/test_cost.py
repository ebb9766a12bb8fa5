"""The cost table: what a forward of some rows takes."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from ssd_serve.verifier.cost import POINTS, CostTable

OBSERVATIONS = st.lists(st.tuples(st.integers(1, 1024), st.floats(1e-6, 10.0)), min_size=1, max_size=30)


@given(OBSERVATIONS)
def test_more_rows_never_cost_less(observations: list[tuple[int, float]]) -> None:
    table = CostTable()
    for rows, seconds in observations:
        table.observe(rows, seconds)
    curve = table.curve()
    assert len(curve) == POINTS[-1] + 1
    assert curve[0] == 0.0
    assert (np.diff(curve) >= 0).all()
    assert np.isfinite(curve).all()
    assert table.seconds(POINTS[-1] + 500) >= table.seconds(POINTS[-1])


def test_between_measured_points_it_is_a_line_and_beyond_them_a_slope() -> None:
    table = CostTable()
    table.observe(4, 0.010)
    table.observe(8, 0.014)
    assert table.seconds(6) == pytest.approx(0.012)
    assert table.seconds(2) == pytest.approx(0.010)
    assert table.seconds(10) == pytest.approx(0.016)


def test_unmeasured_it_knows_a_prior() -> None:
    table = CostTable(prior_s=0.5)
    assert table.seconds(1) == table.seconds(1000) == 0.5
    assert table.seconds(0) == 0.0


def test_one_point_means_that_rows_are_free() -> None:
    table = CostTable()
    table.observe(1, 0.01)
    assert table.seconds(64) == 0.01


def test_an_outlier_moves_the_average_by_a_tenth_at_most() -> None:
    table = CostTable()
    table.observe(4, 0.010)
    table.observe(4, 100.0)
    assert table.seconds(4) == pytest.approx(0.011)
    for _ in range(60):
        table.observe(4, 0.020)
    assert table.seconds(4) == pytest.approx(0.020, rel=0.01)


@pytest.mark.parametrize(("rows", "seconds"), [(0, 1.0), (-3, 1.0), (5, 0.0), (5, -1.0), (5000, 1.0)])
def test_impossible_observations_are_ignored(rows: int, seconds: float) -> None:
    table = CostTable(prior_s=0.5)
    table.observe(rows, seconds)
    assert table.seconds(5) == 0.5
