"""Reads metrics pages of any server."""

from prometheus_client.parser import text_string_to_metric_families


def by_label(page: str, name: str, label: str) -> dict[str, float]:
    """Return a metric by the values of one of its labels, summed over the others."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == name and label in sample.labels:
                value = sample.labels[label]
                found[value] = found.get(value, 0.0) + sample.value
    return found


def metric(page: str, name: str) -> float:
    """Return the sum of a metric over its labels; 0 if the page lacks it."""
    families = text_string_to_metric_families(page)
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)
