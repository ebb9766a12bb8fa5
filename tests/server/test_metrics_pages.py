"""Pages of several replicas become one that Prometheus can read."""

from prometheus_client.parser import text_string_to_metric_families

from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.observability.metrics import ServerMetrics, join_pages


def page(requests: int) -> str:
    metrics = ServerMetrics(EngineClient(), lambda: True)
    for _ in range(requests):
        metrics.ended.labels("stop").inc()
        metrics.first_token.observe(0.2)
    return metrics.render().decode()


def test_joined_metrics_have_a_replica_label() -> None:
    joined = join_pages({"a": page(1), "b": page(2)}).decode()
    assert 'ssd_request_success_total{finished_reason="stop",replica="a"} 1.0' in joined
    assert 'ssd_request_success_total{finished_reason="stop",replica="b"} 2.0' in joined
    assert 'ssd_time_to_first_token_seconds_bucket{le="0.25",replica="b"} 2.0' in joined


def test_joined_metrics_keep_all_samples() -> None:
    alone, joined = page(1), join_pages({"a": page(1), "b": page(1)}).decode()
    assert joined.count("# TYPE") == alone.count("# TYPE")
    families = {family.name: family for family in text_string_to_metric_families(joined)}
    for family in text_string_to_metric_families(alone):
        assert len(families[family.name].samples) == 2 * len(family.samples)
        assert families[family.name].type == family.type


def test_joined_metrics_without_pages() -> None:
    assert join_pages({}) == b""
