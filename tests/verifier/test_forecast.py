"""Tests of the forecast of speedups by mode from measured cost tables."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from ssd_serve.base.cost import CostTable, HostCost, Timing
from ssd_serve.verifier.control.forecast import (
    DecodingLoad,
    DraftStep,
    LevelAcceptance,
    forecast,
    with_prefill,
)
from ssd_serve.verifier.drafters.pool import SpeculationMode
from tests.examples import examples

ROWS = (1, 8, 64)


def table(step_s: float, row_s: float) -> CostTable:
    return CostTable([Timing(rows, 0, step_s + row_s * rows) for rows in ROWS])


def gains(
    requests: int = 1,
    one: float = 0.020,
    two: float = 0.012,
    row_s: float = 2e-4,
    draft_s: float = 0.002,
    acceptance_rate: float = 0.7,
) -> dict[SpeculationMode, float]:
    alone = table(two, row_s / 2)
    costs = {
        SpeculationMode.ASYNC: table(one, row_s),
        SpeculationMode.SYNC: alone,
        SpeculationMode.PLAIN: alone,
    }
    steps = {mode: DraftStep(draft_s, 16) for mode in (SpeculationMode.ASYNC, SpeculationMode.SYNC)}
    unit_s = alone.seconds(requests)
    return forecast(DecodingLoad(requests), unit_s, costs, steps, HostCost(0.0), acceptance_rate)


def test_forecast_of_plain_decoding_is_one() -> None:
    assert gains()[SpeculationMode.PLAIN] == pytest.approx(1.0)


def test_forecast_without_acceptance_is_below_plain_decoding() -> None:
    found = gains(acceptance_rate=0.01)
    assert max(found[SpeculationMode.ASYNC], found[SpeculationMode.SYNC]) < 1.0


def test_forecast_prefers_async_if_a_second_core_gains_little() -> None:
    found = gains(two=0.019)
    assert found[SpeculationMode.ASYNC] > found[SpeculationMode.SYNC] > found[SpeculationMode.PLAIN]


def test_forecast_prefers_sync_if_two_cores_are_twice_as_fast() -> None:
    found = gains(two=0.010, draft_s=0.0005)
    assert found[SpeculationMode.SYNC] > found[SpeculationMode.ASYNC]


@pytest.mark.parametrize("concurrent", [True, False])
def test_draft_prefill_costs_more_if_the_target_waits_for_it(
    concurrent: bool,
) -> None:
    given = with_prefill(2.0, plain_s=1.0, read_s=0.1, concurrent=concurrent)
    assert given == pytest.approx(1 / (0.5 + (0.05 if concurrent else 0.1)))
    assert with_prefill(0.5, plain_s=1.0, read_s=0.1, concurrent=True) == 0.5


def test_forecast_prefers_plain_for_many_requests() -> None:
    found = gains(requests=32, row_s=2e-3)
    assert found[SpeculationMode.PLAIN] == max(found.values())


def test_no_forecast_without_a_draft_step_time() -> None:
    assert set(gains(draft_s=0.0)) == {SpeculationMode.PLAIN}


@given(
    st.integers(1, 64),
    st.floats(1e-4, 0.1),
    st.floats(1e-4, 0.1),
    st.floats(1e-5, 0.1),
    st.floats(0.01, 0.95),
)
@settings(max_examples=examples(50))
def test_forecast_rises_with_acceptance(
    requests: int, one: float, two: float, draft_s: float, acceptance_rate: float
) -> None:
    low = gains(requests, one, two, draft_s=draft_s, acceptance_rate=acceptance_rate)
    high = gains(requests, one, two, draft_s=draft_s, acceptance_rate=min(0.99, acceptance_rate + 0.04))
    assert all(0 < low[mode] <= high[mode] * (1 + 1e-9) for mode in low)


def test_forecast_counts_kv_reads_of_long_contexts() -> None:
    """Saved rounds outweigh drafting at long contexts, because a round then mostly reads the KV cache."""
    cost = CostTable(
        [Timing(rows, read, 0.004 + (2e-6 + 1e-9 * rows) * read) for rows in ROWS for read in (0, 1024)]
    )
    costs: dict[SpeculationMode, CostTable] = {SpeculationMode.SYNC: cost, SpeculationMode.PLAIN: cost}
    steps = {SpeculationMode.SYNC: DraftStep(0.006, 16)}
    for load, pays in ((DecodingLoad(1, 0), False), (DecodingLoad(1, 20_000), True)):
        unit_s = cost.seconds(1, load.reading())
        found = forecast(load, unit_s, costs, steps, HostCost(0.0), 0.6)
        assert found[SpeculationMode.PLAIN] == pytest.approx(1.0)
        assert (found[SpeculationMode.SYNC] > 1.0) is pays


def test_level_acceptance_follows_levels_with_nodes() -> None:
    acceptance_rate = LevelAcceptance()
    assert acceptance_rate.share > 0.5
    for _ in range(2000):
        acceptance_rate.observe(1, 5)
    assert acceptance_rate.share == pytest.approx(0.2, abs=0.01)
    before = acceptance_rate.share
    acceptance_rate.observe(0, 0)
    assert acceptance_rate.share == before
