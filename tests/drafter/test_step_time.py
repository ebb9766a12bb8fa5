"""The average step time and the width chosen from measured times."""

import pytest

from ssd_serve.drafter.step_time import LiveWidth, StepTime, choose_width


def test_step_time_is_a_running_average_without_outliers() -> None:
    average = StepTime(0.0)
    average.observe(0.002)
    assert average.seconds == 0.002
    average.observe(10.0)
    assert average.seconds == pytest.approx(0.002 + 0.1 * 0.006)
    for _ in range(100):
        average.observe(0.004)
    assert average.seconds == pytest.approx(0.004, rel=1e-3)


@pytest.mark.parametrize(
    ("seconds", "width"),
    [({4: 0.010, 8: 0.011, 16: 0.0135, 32: 0.02}, 16), ({4: 0.010, 8: 0.02}, 4), ({8: 0.01}, 8)],
)
def test_the_widest_affordable_width_is_chosen(seconds: dict[int, float], width: int) -> None:
    assert choose_width(seconds) == width


def test_width_follows_measured_steps_and_ignores_one_outlier() -> None:
    widths = LiveWidth({4: 0.010, 8: 0.011, 16: 0.012})
    for step_s in (*[0.012] * 64, 2.0, *[0.012] * 640):
        widths.observe(16, step_s)
    assert widths.width == 16
    for _ in range(640):
        widths.observe(4, 0.010)
        widths.observe(16, 0.030)
    assert widths.width == 8
