"""Tests of the cost model: time of a forward by rows, and host time per node."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from ssd_serve.base.cost import FIRST_ROUNDS, MAX_ROWS, CostTable, HostCost, Reading, Timing

OBSERVATIONS = st.lists(
    st.tuples(st.integers(-2, 2000), st.floats(-1.0, 10.0), st.integers(0, 100_000), st.integers(0, 10**7)),
    max_size=30,
)
TIMINGS = st.lists(
    st.builds(Timing, st.integers(1, 200), st.integers(0, 2000), st.floats(1e-6, 1.0)), max_size=20
)


@given(TIMINGS, OBSERVATIONS)
def test_more_rows_never_cost_less(
    timings: list[Timing], observations: list[tuple[int, float, int, int]]
) -> None:
    table = CostTable(timings)
    for rows, seconds, context, row_context in observations:
        table.observe(rows, seconds, Reading(context, row_context))
    for reading in (Reading(), Reading(500, 4000)):
        curve = table.span(0, MAX_ROWS + 500, reading, each=300.0)
        assert len(curve) == MAX_ROWS + 501
        assert curve[0] == 0.0
        assert (np.diff(curve) >= 0).all()
        assert np.isfinite(curve).all()
        single = table.seconds(77, Reading(reading.context, reading.row_context + 77 * 300))
        assert curve[77] == pytest.approx(single)


def test_between_measured_points_it_is_a_line_and_beyond_them_a_slope() -> None:
    table = CostTable([Timing(4, 0, 0.010), Timing(8, 0, 0.014)])
    assert table.seconds(6) == pytest.approx(0.012)
    assert table.seconds(2) == pytest.approx(0.010)
    assert table.seconds(10) == pytest.approx(0.016)


def test_disturbed_measurements_are_corrected_by_other_rows() -> None:
    true = {rows: 0.001 + 3e-5 * rows for rows in (1, 2, 4, 6, 8, 12, 16, 24, 32, 64)}
    disturbed = {**true, 1: 0.009, 6: 0.019, 64: 0.055}
    table = CostTable([Timing(rows, 0, seconds) for rows, seconds in disturbed.items()])
    for rows in (2, 4, 8, 16, 32):
        assert table.seconds(rows) == pytest.approx(true[rows])
    assert table.seconds(1) == pytest.approx(true[2])
    assert table.seconds(6) == pytest.approx(true[8])
    assert table.seconds(64) == pytest.approx(2 * true[32])


def test_contexts_that_a_busy_start_measured_too_dear_are_learnt_again() -> None:
    true = CostTable([Timing(1, 128, 0.0191), Timing(8, 128, 0.0203), Timing(1, 1024, 0.0192)])
    table = CostTable([Timing(1, 128, 0.0191), Timing(8, 128, 0.0203), Timing(1, 1024, 0.0846)])
    chains = [(rows, Reading(300, 300 * rows)) for rows in (1, 3, 9, 6, 2, 12)]
    assert table.seconds(*chains[-1]) > 2 * true.seconds(*chains[-1])
    for _ in range(50):
        for rows, reading in chains:
            table.observe(rows, true.seconds(rows, reading), reading)
    for rows, reading in chains:
        assert table.seconds(rows, reading) == pytest.approx(true.seconds(rows, reading), rel=0.3)


def test_unmeasured_it_knows_a_prior_and_then_one_round() -> None:
    table = CostTable(prior_s=0.5)
    assert table.seconds(1) == table.seconds(1000) == 0.5
    assert table.seconds(0) == 0.0
    table.observe(1, 0.01)
    assert table.seconds(64) == pytest.approx(0.01)


@pytest.mark.parametrize("wrong", [0.1, 10.0])
def test_guess_takes_its_level_from_the_first_rounds(wrong: float) -> None:
    true = CostTable([Timing(1, 0, 0.010), Timing(64, 0, 0.050), Timing(1, 1000, 0.012)])
    guess = CostTable([Timing(1, 0, 0.010 * wrong), Timing(64, 0, 0.050 * wrong)], first_rounds=FIRST_ROUNDS)
    for rows in (33, 1, 1, 1, 1, 1, 1, 1):
        guess.observe(rows, true.seconds(rows))
    assert guess.seconds(1) == pytest.approx(true.seconds(1), rel=0.1)
    assert guess.first_seconds(16, Reading()) == pytest.approx(true.seconds(16), rel=0.1)
    guess.observe(1, 1.0)
    assert guess.seconds(1) < 2 * true.seconds(1), "later rounds count little"


def test_table_is_made_again_from_its_timings() -> None:
    table = CostTable([Timing(1, 0, 0.010), Timing(64, 0, 0.050), Timing(1, 1000, 0.013)])
    for rows in (1, 5, 70):
        table.observe(rows, 0.1, Reading(200, 200 * rows))
    again = CostTable(table.timings())
    for rows in (1, 2, 7, 30, 100, 500):
        reading = Reading(700, 700 * rows)
        assert again.seconds(rows, reading) == pytest.approx(table.seconds(rows, reading), rel=0.05)


@given(
    st.floats(1e-9, 1e-6), st.floats(1e-9, 1e-6), st.integers(1, 64), st.integers(0, 4000), st.integers(1, 8)
)
def test_contexts_cost_what_requests_and_rows_read(
    request_s: float, row_s: float, rows: int, context: int, requests: int
) -> None:
    def true(rows: int, reading: Reading) -> float:
        return 0.001 + 5e-5 * rows + request_s * reading.context + row_s * reading.row_context

    table = CostTable(
        [
            Timing(rows, context, true(rows, Reading(context, rows * context)))
            for rows in (1, 8, 32, 64)
            for context in (128, 1024)
        ]
    )
    reading = Reading(requests * context, rows * context)
    assert table.seconds(rows, reading) == pytest.approx(true(rows, reading), rel=1e-6)


def test_live_rounds_move_the_level_of_everything_and_their_own_rows_more() -> None:
    table = CostTable([Timing(rows, 0, 0.001 * (10 + rows)) for rows in (1, 8, 64)])
    shape = table.span(1, 64)
    for _ in range(100):
        table.observe(1, 2 * float(shape[0]))
    assert table.seconds(1) == pytest.approx(2 * shape[0], rel=0.02)
    assert shape[31] < table.seconds(32) <= 2 * shape[31]
    for _ in range(3000):
        table.observe(32, float(shape[31]))
        table.observe(1, float(shape[0]))
    assert table.span(1, 64) == pytest.approx(shape, rel=0.02)


def test_outlier_is_forgotten_without_new_samples_of_its_rows() -> None:
    table = CostTable([Timing(rows, 0, 0.001 * (10 + rows)) for rows in (1, 8, 64)])
    expected = table.seconds(8)
    table.observe(8, 100.0)
    assert table.seconds(8) < 1.15 * expected
    for _ in range(2000):
        table.observe(1, 0.011)
    assert table.seconds(8) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("rows", "seconds"), [(0, 1.0), (-3, 1.0), (5, 0.0), (5, -1.0), (5000, 1.0)])
def test_impossible_observations_are_ignored(rows: int, seconds: float) -> None:
    table = CostTable(prior_s=0.5)
    table.observe(rows, seconds)
    assert table.seconds(5) == 0.5


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_host_cost_learns_the_cost_of_a_node(seed: int) -> None:
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
def test_host_cost_stays_finite(seen: list[tuple[int, int, float]], same: int) -> None:
    host = HostCost()
    for requests, nodes, seconds in [*seen, *[(1, 0, 0.3e-3)] * same]:
        host.observe(requests, nodes, seconds)
        assert np.isfinite(host.seconds(64, 64))
        assert np.isfinite(host.node_s)
    assert host.node_s >= 0.0
    assert host.seconds(1, 0) >= 0.0


def test_pause_hardly_changes_the_cost_of_nodes() -> None:
    host = HostCost()
    for nodes in [0, 8, 16, 32] * 50:
        host.observe(1, nodes, 0.3e-3 + 20e-6 * nodes)
    host.observe(1, 32, 10.0)
    for nodes in [0, 8, 16, 32] * 4:
        host.observe(1, nodes, 0.3e-3 + 20e-6 * nodes)
    assert 15e-6 < host.node_s < 40e-6


def test_rounds_that_hardly_vary_do_not_tell_what_a_node_costs() -> None:
    host = HostCost(node_s=20e-6)
    for turn in range(500):  # the few nodes come when the host is busy with other things
        busy = turn % 2
        host.observe(1, busy, 0.4e-3 + 0.3e-3 * busy)
    assert 15e-6 < host.node_s < 40e-6
