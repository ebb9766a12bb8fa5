"""A metric is found on a page, whatever its labels."""

from ssd_serve.bench.metrics_page import metric


def test_a_metric_is_summed_over_its_labels() -> None:
    page = (
        '# HELP a b\nssd_drafter_requests{drafter="d0"} 2.0\nssd_drafter_requests{drafter="d1"} 1.0\n'
        "ssd_a 4.0\n"
    )
    assert metric(page, "ssd_drafter_requests") == 3.0
    assert metric(page, "ssd_a") == 4.0
    assert metric(page, "ssd_b") == 0.0
