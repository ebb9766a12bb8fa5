"""Whether a layout is worth beginning for requests whose texts its drafters have not read."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ssd_serve.verifier.planning.late_start import LateStart
from ssd_serve.verifier.planning.layout import Layout

SECONDS = st.floats(0.0, 1e4)


def test_before_anything_was_measured_all_of_the_reading_counts() -> None:
    late_start = LateStart()
    assert late_start.lasting(Layout.SYNC, 0.8, 0.2) == pytest.approx(0.8)
    assert late_start.lasting(Layout.SYNC, 0.8, 0.0) == 1.0
    assert late_start.lasting(Layout.SYNC, 0.0, 0.2) == 0.0
    late_start.observe(Layout.ASYNC, 0.0, 0.2)
    assert late_start.lasting(Layout.ASYNC, 0.0, 0.2) == 0.0


def test_a_request_like_those_that_were_measured_pays_for_its_reading_once() -> None:
    """Else a layout that was left once would stay so while prompts are long and answers short."""
    late_start = LateStart()
    for _ in range(100):
        late_start.observe(Layout.SYNC, 0.8, 0.2)
    assert late_start.lasting(Layout.SYNC, 0.8, 0.2) == pytest.approx(1.0)
    assert late_start.lasting(Layout.ASYNC, 0.8, 0.2) == pytest.approx(0.8), "nobody has measured it"


def test_the_nearer_the_end_of_a_request_the_less_is_worth_beginning() -> None:
    late_start = LateStart()
    late_start.observe(Layout.SYNC, 0.8, 0.2)
    half = late_start.lasting(Layout.SYNC, 0.4, 0.2)
    assert half == pytest.approx((0.4 / 0.6) / 0.8)
    assert late_start.lasting(Layout.SYNC, 0.1, 0.2) < half < 1.0


def test_a_longer_prompt_than_those_that_were_measured_counts_as_far_as_it_is_longer() -> None:
    late_start = LateStart()
    late_start.observe(Layout.SYNC, 0.8, 0.01)
    assert late_start.lasting(Layout.SYNC, 0.8, 0.8) == pytest.approx(0.5, rel=0.02)
    for _ in range(3000):  # but what was measured changes with the requests
        late_start.observe(Layout.SYNC, 0.8, 0.8)
    assert late_start.lasting(Layout.SYNC, 0.8, 0.8) == pytest.approx(1.0, rel=0.01)


@given(st.lists(st.tuples(SECONDS, SECONDS), max_size=20), SECONDS, SECONDS)
def test_it_is_a_share_whatever_was_seen(seen: list[tuple[float, float]], plain: float, read: float) -> None:
    late_start = LateStart()
    for each in seen:
        late_start.observe(Layout.ASYNC, *each)
    assert 0.0 <= late_start.lasting(Layout.ASYNC, plain, read) <= 1.0
