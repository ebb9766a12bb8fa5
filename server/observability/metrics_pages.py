"""Joins the metrics pages of several replicas into one, in which every series has the label `replica`.

A proxy hands each scrape to whichever replica it likes: only together do counters never run backwards. Knows
Prometheus's text format; not how the pages are fetched.
"""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LABEL = "replica"


class _Joined(Collector):
    """The families of all pages."""

    def __init__(self, pages: Mapping[str, str]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        """One family a name, with the samples of every replica."""
        families: dict[str, Metric] = {}
        for replica, page in self._pages.items():
            for family in text_string_to_metric_families(page):
                joined = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, LABEL: replica}
                    joined.add_sample(sample.name, labels, sample.value)
        yield from families.values()


def join_pages(pages: Mapping[str, str]) -> bytes:
    """One page from the pages of replicas, by the replicas' names."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Joined(pages))
    return generate_latest(registry)
