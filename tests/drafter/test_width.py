"""How wide a draft step is."""

from ssd_serve.drafter.step_time import LiveWidth, choose_width, widths_to_measure


def test_widths_double_up_to_the_most() -> None:
    assert widths_to_measure(8) == [4, 8]
    assert widths_to_measure(20) == [4, 8, 16, 20]
    assert widths_to_measure(1) == [1]


def test_the_widest_that_costs_little_more() -> None:
    assert choose_width({4: 0.010, 8: 0.011, 16: 0.0135, 32: 0.02}) == 16
    assert choose_width({4: 0.010, 8: 0.02}) == 4
    assert choose_width({8: 0.01}) == 8


def steps(widths: LiveWidth, nodes: int, seconds: float, count: int = 640) -> int:
    """The width after so many equal steps."""
    for _ in range(count):
        widths.observe(nodes, seconds)
    return widths.width


def test_a_wide_step_that_became_dear_is_no_longer_taken() -> None:
    widths = LiveWidth({4: 0.010, 8: 0.011, 16: 0.012})
    assert widths.width == 16
    for _ in range(640):
        widths.observe(4, 0.010)
        widths.observe(16, 0.030)
    assert widths.width == 8


def test_a_device_that_is_slower_altogether_changes_no_width() -> None:
    assert steps(LiveWidth({4: 0.010, 8: 0.011, 16: 0.012, 32: 0.02}), 16, 0.013) == 16


def test_one_long_step_changes_nothing() -> None:
    widths = LiveWidth({4: 0.010, 8: 0.011, 16: 0.012})
    steps(widths, 16, 0.012)
    assert steps(widths, 16, 2.0, count=1) == 16
    assert steps(widths, 16, 0.012) == 16
