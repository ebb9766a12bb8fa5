"""How wide a draft step is."""

from ssd_serve.drafter.width import choose_width, widths_to_measure


def test_widths_double_up_to_the_most() -> None:
    assert widths_to_measure(8) == [4, 8]
    assert widths_to_measure(20) == [4, 8, 16, 20]
    assert widths_to_measure(1) == [1]


def test_the_widest_that_costs_little_more() -> None:
    assert choose_width({4: 0.010, 8: 0.011, 16: 0.0135, 32: 0.02}) == 16
    assert choose_width({4: 0.010, 8: 0.02}) == 4
    assert choose_width({8: 0.01}) == 8
