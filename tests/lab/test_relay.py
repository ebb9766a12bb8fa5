"""`python -m lab.relay`: all reports go through the hub, and every figure is one that was measured."""

from lab.relay.experiment import run_relay
from lab.relay.report import table


def test_every_report_passes_the_hub_and_every_figure_is_told() -> None:
    result = run_relay(streams=3, rounds=20, tokens=50)
    assert result["reports"] == 60
    for name in ("hub_us_a_report", "decode_us", "hop_us", "two_threads_gain"):
        figures = result[name]
        assert isinstance(figures, list)
        assert all(figure > 0 for figure in figures)
    assert "hands on a report" in table(result)
