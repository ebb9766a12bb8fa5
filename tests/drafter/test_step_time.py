"""The average step time and the width chosen from measured times."""

import pytest

from ssd_serve.drafter.step_time import LiveWidth, StepTime, choose_width


def test_an_unknown_step_time_starts_with_the_first_step() -> None:
    average = StepTime(0.0)
    average.observe(0.002)
    assert average.seconds == 0.002


def test_step_time_follows_observations() -> None:
    average = StepTime(0.002)
    for _ in range(100):
        average.observe(0.004)
    assert average.seconds == pytest.approx(0.004, rel=1e-3)


def test_an_outlier_counts_four_times_the_average_at_most() -> None:
    average = StepTime(0.002)
    average.observe(10.0)
    assert average.seconds == pytest.approx(0.002 + 0.1 * 0.006)


def test_the_widest_affordable_width_is_chosen() -> None:
    assert choose_width({4: 0.010, 8: 0.011, 16: 0.0135, 32: 0.02}) == 16
    assert choose_width({4: 0.010, 8: 0.02}) == 4
    assert choose_width({8: 0.01}) == 8


def steps(widths: LiveWidth, nodes: int, seconds: float, count: int = 640) -> int:
    """The width after so many equal steps."""
    for _ in range(count):
        widths.observe(nodes, seconds)
    return widths.width


def test_width_shrinks_when_wide_steps_become_slow() -> None:
    widths = LiveWidth({4: 0.010, 8: 0.011, 16: 0.012})
    assert widths.width == 16
    for _ in range(640):
        widths.observe(4, 0.010)
        widths.observe(16, 0.030)
    assert widths.width == 8


def test_width_ignores_one_slow_step() -> None:
    widths = LiveWidth({4: 0.010, 8: 0.011, 16: 0.012})
    steps(widths, 16, 0.012)
    assert steps(widths, 16, 2.0, count=1) == 16
    assert steps(widths, 16, 0.012) == 16
