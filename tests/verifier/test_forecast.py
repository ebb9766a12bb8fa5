"""Tests of the forecast of speedups by mode from measured cost tables."""

from typing import Any

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


ASYNC, SYNC, PLAIN = SpeculationMode.ASYNC, SpeculationMode.SYNC, SpeculationMode.PLAIN


@pytest.mark.parametrize(
    ("given", "order"),
    [
        ({"two": 0.019}, [ASYNC, SYNC, PLAIN]),  # a second core gains little
        ({"two": 0.010, "draft_s": 0.0005}, [SYNC, ASYNC]),  # two cores are twice as fast
        ({"acceptance_rate": 0.01}, [PLAIN, SYNC]),
        ({"acceptance_rate": 0.01}, [PLAIN, ASYNC]),
        ({"requests": 32, "row_s": 2e-3}, [PLAIN, SYNC]),
        ({"requests": 32, "row_s": 2e-3}, [PLAIN, ASYNC]),
        ({"draft_s": 0.0}, [PLAIN]),
    ],
)
def test_forecast_order_of_modes(given: dict[str, Any], order: list[SpeculationMode]) -> None:
    found = gains(**given)
    assert found[PLAIN] == pytest.approx(1.0)
    assert [mode for mode in sorted(found, key=lambda each: -found[each]) if mode in order] == order
    assert len(found) == (3 if given.get("draft_s", 1.0) else 1)


@pytest.mark.parametrize("concurrent", [True, False])
def test_draft_prefill_costs_more_if_the_target_waits_for_it(
    concurrent: bool,
) -> None:
    given = with_prefill(2.0, plain_s=1.0, read_s=0.1, concurrent=concurrent)
    assert given == pytest.approx(1 / (0.5 + (0.05 if concurrent else 0.1)))
    assert with_prefill(0.5, plain_s=1.0, read_s=0.1, concurrent=True) == 0.5


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
