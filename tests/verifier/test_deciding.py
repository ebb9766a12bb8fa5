"""How much of a prompt is read beside running requests, under a latency target."""

import math

import hypothesis.strategies as st
from hypothesis import given

from ssd_serve.verifier.cost import CostTable, HostCost, Timing
from ssd_serve.verifier.deciding import Decider, DraftBounds
from ssd_serve.verifier.drafters import Drafters
from ssd_serve.verifier.growing import Never
from tests.fakes import HELLO


def decider(most_tpot_s: float) -> Decider:
    """One millisecond a row, and a host that takes a quarter of one for each request."""
    cost = CostTable([Timing(rows, 0, 0.001 * rows) for rows in (1, 64)])
    bounds = DraftBounds(4096, None, 8, most_tpot_s)
    return Decider(Drafters(HELLO), cost, Never(), bounds, HostCost(node_s=0.0))


def test_without_a_target_or_without_company_prompts_are_read_in_whole_chunks() -> None:
    assert decider(math.inf).prompt_rows(8, 512) == 512
    assert decider(0.010).prompt_rows(0, 512) == 512


def test_a_chunk_shrinks_to_what_keeps_the_target() -> None:
    assert decider(0.1005).prompt_rows(8, 512) == 92
    assert decider(10.0).prompt_rows(8, 512) == 512


@given(st.floats(1e-6, 1.0), st.integers(0, 64), st.integers(1, 600))
def test_prompts_always_get_on(most_tpot_s: float, requests: int, most: int) -> None:
    rows = decider(most_tpot_s).prompt_rows(requests, most)
    assert min(most, 16) <= rows <= most
