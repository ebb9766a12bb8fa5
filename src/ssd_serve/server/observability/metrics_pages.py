"""Joins the metrics pages of several servers behind one address into one, in which a label tells them apart.

Each scrape comes to whichever of them it likes: only together do counters never run backwards. Knows
Prometheus's text format; not how the pages are fetched.
"""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

REPLICA = "replica"
API_WORKER = "api_worker"


class _Joined(Collector):
    """The families of all pages."""

    def __init__(self, pages: Mapping[str, str], label: str) -> None:
        self._pages, self._label = pages, label

    def collect(self) -> Iterator[Metric]:
        """One family a name, with the samples of every server."""
        families: dict[str, Metric] = {}
        for server, page in self._pages.items():
            for family in text_string_to_metric_families(page):
                joined = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, self._label: server}
                    joined.add_sample(sample.name, labels, sample.value)
        yield from families.values()


def join_pages(pages: Mapping[str, str], label: str = REPLICA) -> bytes:
    """One page from those of servers, by their names."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Joined(pages, label))
    return generate_latest(registry)
