"""Tests of reading a metric from a page, with any labels."""

from ssd_serve.bench.metrics_page import by_label, metric


def test_a_metric_is_summed_over_its_labels() -> None:
    page = (
        '# HELP a b\nssd_drafter_requests{drafter="d0"} 2.0\nssd_drafter_requests{drafter="d1"} 1.0\n'
        "ssd_a 4.0\n"
    )
    assert metric(page, "ssd_drafter_requests") == 3.0
    assert metric(page, "ssd_a") == 4.0
    assert metric(page, "ssd_b") == 0.0


def test_a_metric_is_told_by_one_label_whatever_the_others() -> None:
    samples = ('position="0",replica="x"} 2', 'position="0",replica="y"} 3', 'position="1"} 1')
    page = "".join(f"a_total{{{sample}\n" for sample in samples)
    assert by_label(page, "a_total", "position") == {"0": 5.0, "1": 1.0}
    assert by_label(page, "a_total", "engine") == {}
