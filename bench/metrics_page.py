"""Reads pages of metrics, of this server or of another."""

from prometheus_client.parser import text_string_to_metric_families


def metric(page: str, name: str) -> float:
    """The sum of a metric over its labels; 0 where it is not told."""
    families = text_string_to_metric_families(page)
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)
