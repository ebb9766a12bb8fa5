"""The cost model: what a forward of some rows takes, and what a node costs the host."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from ssd_serve.verifier.cost import MOST_ROWS, CostTable, HostCost

OBSERVATIONS = st.lists(st.tuples(st.integers(1, 1024), st.floats(1e-6, 10.0)), min_size=1, max_size=30)


@given(OBSERVATIONS)
def test_more_rows_never_cost_less(observations: list[tuple[int, float]]) -> None:
    table = CostTable()
    for rows, seconds in observations:
        table.observe(rows, seconds)
    curve = table.span(0, MOST_ROWS + 500)
    assert len(curve) == MOST_ROWS + 501
    assert curve[0] == 0.0
    assert (np.diff(curve) >= 0).all()
    assert np.isfinite(curve).all()
    assert curve[77:99].tolist() == [table.seconds(rows) for rows in range(77, 99)]


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


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_the_host_learns_what_a_node_costs_whatever_else_varies(seed: int) -> None:
    random = np.random.default_rng(seed)
    host = HostCost()
    for _ in range(400):
        requests, nodes = int(random.integers(1, 9)), int(random.integers(0, 65))
        true = 0.3e-3 + 40e-6 * requests + 25e-6 * nodes
        host.observe(requests, nodes, true * float(random.uniform(0.8, 1.2)))
    assert host.node_s == pytest.approx(25e-6, rel=0.3)
    assert host.seconds(4, 20) == pytest.approx(0.3e-3 + 40e-6 * 4 + 25e-6 * 20, rel=0.25)


@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(0, 64), st.floats(0.0, 100.0)), max_size=60),
    st.integers(0, 3000),
)
@settings(max_examples=40, deadline=None)
def test_the_host_cost_stays_finite_whatever_is_seen_and_however_long_nothing_changes(
    seen: list[tuple[int, int, float]], same: int
) -> None:
    host = HostCost()
    for requests, nodes, seconds in [*seen, *[(1, 0, 0.3e-3)] * same]:
        host.observe(requests, nodes, seconds)
        assert np.isfinite(host.seconds(64, 64))
        assert np.isfinite(host.node_s)
    assert host.node_s >= 0.0
    assert host.seconds(1, 0) >= 0.0


def test_a_pause_is_hardly_taken_for_the_cost_of_nodes() -> None:
    host = HostCost()
    for nodes in [0, 8, 16, 32] * 50:
        host.observe(1, nodes, 0.3e-3 + 20e-6 * nodes)
    host.observe(1, 32, 10.0)
    assert host.node_s < 60e-6
