"""The average of step times: it follows, and one stretched step hardly moves it."""

import pytest

from ssd_serve.drafter.step_time import StepTime


def test_the_first_step_is_believed_where_nothing_was_measured() -> None:
    average = StepTime(0.0)
    average.observe(0.002)
    assert average.seconds == 0.002


def test_it_follows_what_steps_take() -> None:
    average = StepTime(0.002)
    for _ in range(100):
        average.observe(0.004)
    assert average.seconds == pytest.approx(0.004, rel=1e-3)


def test_a_step_that_was_held_up_counts_as_four_times_as_long_at_most() -> None:
    average = StepTime(0.002)
    average.observe(10.0)
    assert average.seconds == pytest.approx(0.002 + 0.1 * 0.006)
