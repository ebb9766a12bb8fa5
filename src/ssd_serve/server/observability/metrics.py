"""Prometheus metrics: figures that the server measures, and the last status of the engine.

Base names follow vLLM's, so that dashboards carry over. Each server has its own registry.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from ssd_serve.base.messages import (
    POSITIONS,
    AcceptanceHealth,
    Figures,
    SourceFigures,
    Status,
    bounded_positions,
    by_position,
)
from ssd_serve.base.version import __version__
from ssd_serve.server.access.tenants import Tenants, TenantUsage
from ssd_serve.server.engine.client import EngineClient

PREFIX = "ssd_"
SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
)
ROUND_TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
ROUND_NODES = (0, 1, 2, 4, 8, 16, 32, 64, 128)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000)

_GAUGES: dict[str, tuple[str, Callable[[Status], float]]] = {
    "num_requests_running": ("requests that decode", lambda s: s.running),
    "num_requests_waiting": ("requests in the queue", lambda s: s.waiting),
    "kv_cache_usage_perc": ("share of KV slots in use, 0 to 1", lambda s: s.slots_used / max(1, s.slots)),
    "speculation_nodes": (
        "nodes that the last round verified, over all requests",
        lambda s: s.decision.nodes if s.decision is not None else 0,
    ),
    "drafters_alive": ("responsive drafters with a device of their own", lambda s: s.drafters_alive),
}
_COUNTERS: dict[str, tuple[str, Callable[[Status], float]]] = {
    "prefix_cache_queries": ("prompt tokens looked up in the prefix cache", lambda s: s.prefix_queries),
    "prefix_cache_hits": ("prompt tokens found in the prefix cache", lambda s: s.prefix_hits),
    "prompt_tokens": ("prompt tokens processed", lambda s: s.prompt_tokens),
    "generation_tokens": ("tokens generated", lambda s: s.generation_tokens),
    "num_preemptions": ("requests preempted for lack of slots", lambda s: s.preemptions),
    "drafter_restarts": ("drafters restarted", lambda s: s.drafter_restarts),
    "drafter_moves": ("requests moved from one drafter to another", lambda s: s.drafter_moves),
    "spec_decode_num_drafts": ("rounds (target forwards of a request)", lambda s: s.totals.rounds),
    "spec_decode_num_draft_tokens": ("nodes verified", lambda s: s.totals.drafted),
    "spec_decode_num_accepted_tokens": ("nodes accepted", lambda s: s.totals.accepted),
    "spec_decode_num_emitted_tokens": ("tokens committed by rounds", lambda s: s.totals.tokens),
    "speculation_cache_hits": ("rounds after which the new root was ready", lambda s: s.totals.hits),
    "speculation_cache_misses": ("rounds after which the new root was not ready", lambda s: s.totals.misses),
    "speculation_ready_depth": ("depth of ready trees, summed over rounds", lambda s: s.totals.ready_depth),
    "speculation_ready_nodes": ("nodes of ready trees, summed over rounds", lambda s: s.totals.ready_nodes),
    "tree_decode_differences": (
        "checked attention outputs that differed from the second backend's",
        lambda s: s.attention_differences,
    ),
    "draft_expansions": ("nodes expanded by drafters", lambda s: s.expansions),
    "draft_expansions_awaited": (
        "expanded nodes that a round waited for; the others arrived during target forwards",
        lambda s: s.awaited_expansions,
    ),
    "draft_expansions_late": ("late expansions dropped", lambda s: s.late_expansions),
    "engine_memory_shortages": (
        "rounds that ran out of device memory and were repeated in smaller parts",
        lambda s: s.memory_shortages,
    ),
    "speculation_expected_tokens": (
        "tokens that the cost model expected from rounds with drafts",
        lambda s: s.expected_tokens,
    ),
    "speculation_given_tokens": ("tokens that rounds with drafts gave", lambda s: s.given_tokens),
    "engine_forward_seconds": ("time in target forwards", lambda s: s.forward_s),
    "engine_wait_seconds": ("time waiting for drafts or requests", lambda s: s.wait_s),
    "engine_host_seconds": ("time in scheduling, sampling and messages", lambda s: s.host_s),
}
_BY_POSITION: dict[str, tuple[str, Callable[[Figures], list[int]]]] = {
    "spec_decode_num_drafts_per_pos": ("rounds that verified a node", lambda t: t.verified_depths),
    "spec_decode_num_accepted_tokens_per_pos": ("nodes accepted", lambda t: t.accepted_depths),
}
_BY_SOURCE: dict[str, tuple[str, Callable[[SourceFigures], int]]] = {
    "spec_decode_source_draft_tokens": ("nodes verified", lambda each: each.verified),
    "spec_decode_source_accepted_tokens": ("nodes accepted", lambda each: each.accepted),
}
_BY_KEY: dict[str, tuple[str, Callable[[TenantUsage], int]]] = {
    "key_requests": ("requests of each key's holder", lambda used: used.requests),
    "key_prompt_tokens": ("prompt tokens of each key's holder", lambda used: used.prompt_tokens),
    "key_generation_tokens": ("tokens generated for each key's holder", lambda used: used.output_tokens),
}


class EngineCollector(Collector):
    """Metrics of the engine's last status."""

    def __init__(self, engine: EngineClient, up: Callable[[], bool], show_cached: bool) -> None:
        self._engine = engine
        self._up = up
        self._hidden = set() if show_cached else {"prefix_cache_hits"}

    def collect(self) -> Iterator[Metric]:
        """Gauges and counters; few before the engine's first status."""
        yield GaugeMetricFamily("ssd_engine_up", "1 when tokens can be generated", value=float(self._up()))
        yield CounterMetricFamily(
            "ssd_engine_restarts", "engines that replaced a dead one", value=self._engine.restarts
        )
        yield CounterMetricFamily(
            "ssd_requests_resumed", "requests continued on another engine", value=self._engine.resumed
        )
        ready = self._engine.ready
        if ready is not None:
            yield _gauge("mode", "1 for the mode of decoding", ["mode"], [((ready.mode,), 1)])
            names = ("version", "target", "draft", "mode", "target_device", "draft_device")
            values = (__version__, *(str(getattr(ready, name)) for name in names[1:]))
            yield _gauge("info", "1, with the models and devices as labels", names, [(values, 1)])
        status = self._engine.status
        if status is None:
            return
        for name, (text, read) in _GAUGES.items():
            yield GaugeMetricFamily(f"ssd_{name}", text, value=float(read(status)))
        for name, (text, read) in _COUNTERS.items():
            if name not in self._hidden:
                yield CounterMetricFamily(f"ssd_{name}", text, value=float(read(status)))
        yield from _acceptance(status.totals)
        requests = [((name,), count) for name, count in status.drafter_requests.items()]
        yield _gauge("drafter_requests", "requests of each drafter", ["drafter"], requests)
        layout = [((status.layout,), 1)] if status.layout else []
        yield _gauge("layout", "1 for the current decoding mode: async, sync or off", ["layout"], layout)
        gains = [
            ((layout, str(requests)), gain)
            for requests, by_layout in status.layout_gains.items()
            for layout, gain in by_layout.items()
        ]
        text = "tokens per second of each decoding mode relative to plain, by number of requests; 0: unknown"
        yield _gauge("layout_gain", text, ["layout", "requests"], gains)
        backend = [((status.attention,), 1)] if status.attention else []
        yield _gauge("tree_decode_backend", "1 for the target's tree attention backend", ["backend"], backend)
        problems = [each for each in AcceptanceHealth if each is not AcceptanceHealth.GOOD]
        health = [((each.value,), float(status.health is each)) for each in problems]
        yield _gauge("speculation_unhealthy", "1 while drafts do not help, by reason", ["reason"], health)


def _gauge(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    family = GaugeMetricFamily(f"ssd_{name}", text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, float(value))
    return family


def _counter(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"ssd_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], float(value))
    return family


def _acceptance(totals: Figures) -> Iterator[Metric]:
    by_depth = f"by depth: position 0 is depth 1, position {POSITIONS} is all depths above {POSITIONS}"
    for name, (text, histogram) in _BY_POSITION.items():
        counts = enumerate(bounded_positions(by_position(histogram(totals))))
        yield _counter(
            name, f"{text}, {by_depth}", "position", {str(place): count for place, count in counts}
        )
    for name, (text, read) in _BY_SOURCE.items():
        counts_by_source = {source: read(each) for source, each in totals.sources.items()}
        yield _counter(name, f"{text}, for each source that proposed them", "source", counts_by_source)


class TenantsCollector(Collector):
    """Usage of each key's holder; holders without a key are left out."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    def collect(self) -> Iterator[Metric]:
        """Counters by the holder's name; none without keys."""
        yield CounterMetricFamily(
            "ssd_unknown_keys", "requests without a known key", value=self._tenants.unknown_keys
        )
        found = self._tenants.all()
        for name, (text, read) in _BY_KEY.items():
            yield _counter(name, text, "key", {tenant.name: read(tenant.used) for tenant in found})
        refused = CounterMetricFamily(
            "ssd_key_over_limit", "requests refused because a limit was reached", labels=["key", "limit"]
        )
        for tenant in found:
            refused.add_metric([tenant.name, "requests"], float(tenant.used.over_requests))
            refused.add_metric([tenant.name, "tokens"], float(tenant.used.over_tokens))
        yield refused


class ServerMetrics:
    """The registry of a server, and its own histograms."""

    def __init__(
        self,
        engine: EngineClient,
        up: Callable[[], bool],
        tenants: Tenants | None = None,
        show_cached: bool = True,
        model: str = "",
        prefix: str = PREFIX,
    ) -> None:
        """`show_cached=False` hides how much of prompts was found in the prefix cache.

        Names begin with `prefix`, and all series have the `model` as a label unless it is empty.
        """
        self._model, self._prefix = model, prefix
        self._show_cached = show_cached
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(EngineCollector(engine, up, show_cached))
        if tenants is not None:
            self.registry.register(TenantsCollector(tenants))
        histogram = self._histogram
        self.first_token = histogram("time_to_first_token_seconds", "time to the first token", SECONDS)
        self.inter_token = histogram(
            "inter_token_latency_seconds",
            "time between tokens, a round's time divided by its tokens",
            SECONDS,
        )
        self.whole = histogram("e2e_request_latency_seconds", "time to the last token", SECONDS)
        self.decode = histogram(
            "request_decode_time_seconds", "time from the first to the last token", SECONDS
        )
        self.queue = histogram("request_queue_time_seconds", "time in the queue", SECONDS)
        self.prefill = histogram(
            "request_prefill_time_seconds", "time from the queue to the first token", SECONDS
        )
        self.round_tokens = histogram("request_round_tokens", "tokens per round", ROUND_TOKENS)
        self.round_nodes = histogram("request_round_nodes", "nodes verified per round", ROUND_NODES)
        self.prompt_tokens = histogram("request_prompt_tokens", "prompt tokens of a request", TOKENS)
        self.output_tokens = histogram("request_generation_tokens", "output tokens of a request", TOKENS)
        self.ended = Counter(
            "ssd_request_success", "requests by finish reason", ["finished_reason"], registry=self.registry
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"ssd_{name}", text, buckets=buckets, registry=self.registry)

    def render(self) -> bytes:
        """Return the page that Prometheus scrapes."""
        return generate_latest(_Renamed(self.registry, self._model, self._prefix))

    def observe_prefill(self, first_token_s: float, prefill_s: float) -> None:
        """Observe the prefill, a part of the time to the first token; its time shows what was cached."""
        if self._show_cached and prefill_s > 0:
            self.queue.observe(max(0.0, first_token_s - prefill_s))
            self.prefill.observe(prefill_s)


class _Renamed(Collector):
    """The families of another collector with the prefix of settings, and the model as a label."""

    def __init__(self, metrics: Collector, model: str, prefix: str) -> None:
        self._metrics, self._prefix = metrics, prefix
        self._labels = {"model_name": model} if model else {}

    def collect(self) -> Iterator[Metric]:
        for family in self._metrics.collect():
            renamed = Metric(self._named(family.name), family.documentation, family.type)
            for sample in family.samples:
                labels = {**self._labels, **sample.labels}
                renamed.samples.append(sample._replace(name=self._named(sample.name), labels=labels))
            yield renamed

    def _named(self, name: str) -> str:
        return self._prefix + name.removeprefix(PREFIX)


class _Joined(Collector):
    def __init__(self, pages: Mapping[str, str]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for server, page in self._pages.items():
            for family in text_string_to_metric_families(page):
                empty = Metric(family.name, family.documentation, family.type)
                joined = families.setdefault(family.name, empty)
                for sample in family.samples:
                    joined.add_sample(sample.name, {**sample.labels, "replica": server}, sample.value)
        yield from families.values()


def join_pages(pages: Mapping[str, str]) -> bytes:
    """Join the pages of replicas, by name, into one page with the label `replica`.

    A scrape reaches any one of the replicas: only a joined page has counters that never decrease.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Joined(pages))
    return generate_latest(registry)
