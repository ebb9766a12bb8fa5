"""Prometheus metrics: what the server measures itself, and what the engine last reported.

Base names follow vLLM's, so that dashboards carry over; the prefix is `ssd_` where no setting says another.
Has its own registry: two servers in one process do not meet.
"""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from ssd_serve.base.version import __version__
from ssd_serve.base.depths import POSITIONS, bounded, by_position
from ssd_serve.base.messages import (
    AcceptanceHealth,
    Figures,
    SourceFigures,
    Status,
)
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
    "drafters_alive": ("drafters with a device of their own that answer", lambda s: s.drafters_alive),
}
_COUNTERS: dict[str, tuple[str, Callable[[Status], float]]] = {
    "prefix_cache_queries": ("prompt tokens looked up in the prefix cache", lambda s: s.prefix_queries),
    "prefix_cache_hits": ("prompt tokens found in the prefix cache", lambda s: s.prefix_hits),
    "prompt_tokens": ("prompt tokens processed", lambda s: s.prompt_tokens),
    "generation_tokens": ("tokens generated", lambda s: s.generation_tokens),
    "num_preemptions": ("requests set aside for lack of slots", lambda s: s.preemptions),
    "drafter_restarts": ("drafters started again", lambda s: s.drafter_restarts),
    "drafter_moves": ("requests that went from one drafter to another", lambda s: s.drafter_moves),
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
    "draft_expansions": ("nodes that drafters have expanded", lambda s: s.expansions),
    "draft_expansions_awaited": (
        "expanded nodes that a round waited for; the others came while the target worked",
        lambda s: s.awaited_expansions,
    ),
    "draft_expansions_late": (
        "expanded nodes that came when a text had left their place, and were dropped",
        lambda s: s.late_expansions,
    ),
    "engine_memory_shortages": (
        "rounds that a device had too little memory for, and that were run again smaller",
        lambda s: s.memory_shortages,
    ),
    "speculation_expected_tokens": (
        "tokens that rounds with drafts should have given, by their cost model",
        lambda s: s.expected_tokens,
    ),
    "speculation_given_tokens": ("tokens that these rounds gave", lambda s: s.given_tokens),
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


class EngineCollector(Collector):
    """Reads what the engine said last when scraped."""

    def __init__(self, engine: EngineClient, up: Callable[[], bool], tell_cached: bool) -> None:
        self._engine = engine
        self._up = up
        self._left_out = set() if tell_cached else {"prefix_cache_hits"}

    def collect(self) -> Iterator[Metric]:
        """Gauges and counters; little before the engine has said anything."""
        yield GaugeMetricFamily("ssd_engine_up", "1 when tokens can be generated", value=float(self._up()))
        yield CounterMetricFamily(
            "ssd_engine_restarts", "engines that came after another one", value=self._engine.restarts
        )
        yield CounterMetricFamily(
            "ssd_requests_resumed", "requests that went on in another engine", value=self._engine.resumed
        )
        ready = self._engine.ready
        if ready is not None:
            mode = GaugeMetricFamily("ssd_mode", "1 for the mode; ssd has a drafter", labels=["mode"])
            mode.add_metric([ready.mode], 1.0)
            yield mode
            names = ("version", "target", "draft", "mode", "target_device", "draft_device")
            info = GaugeMetricFamily("ssd_info", "1, with what serves as labels", labels=names)
            info.add_metric([__version__, *(str(getattr(ready, name)) for name in names[1:])], 1.0)
            yield info
        status = self._engine.status
        if status is None:
            return
        for name, (text, read) in _GAUGES.items():
            yield GaugeMetricFamily(f"ssd_{name}", text, value=float(read(status)))
        for name, (text, read) in _COUNTERS.items():
            if name in self._left_out:
                continue
            yield CounterMetricFamily(f"ssd_{name}", text, value=float(read(status)))
        yield from _acceptance(status.totals)
        requests = GaugeMetricFamily("ssd_drafter_requests", "requests of each drafter", labels=["drafter"])
        for name, count in status.drafter_requests.items():
            requests.add_metric([name], float(count))
        yield requests
        yield from _layouts(status)
        attention = GaugeMetricFamily(
            "ssd_tree_decode_backend", "1 for the target's tree attention", labels=["backend"]
        )
        if status.attention:
            attention.add_metric([status.attention], 1.0)
        yield attention
        health = GaugeMetricFamily(
            "ssd_speculation_unhealthy", "1 while drafts are useless, by reason", labels=["reason"]
        )
        for reason in AcceptanceHealth:
            if reason is not AcceptanceHealth.GOOD:
                health.add_metric([reason.value], float(status.health is reason))
        yield health


def _acceptance(totals: Figures) -> Iterator[Metric]:
    deep = f"by depth: position 0 is depth 1, position {POSITIONS} all that are deeper than {POSITIONS}"
    for name, (text, histogram) in _BY_POSITION.items():
        family = CounterMetricFamily(f"ssd_{name}", f"{text}, {deep}", labels=["position"])
        for position, count in enumerate(bounded(by_position(histogram(totals)))):
            family.add_metric([str(position)], float(count))
        yield family
    for name, (text, read) in _BY_SOURCE.items():
        family = CounterMetricFamily(
            f"ssd_{name}", f"{text} that a source had proposed; of several, for each", labels=["source"]
        )
        for source, each in totals.sources.items():
            family.add_metric([source], float(read(each)))
        yield family


def _layouts(status: Status) -> Iterator[Metric]:
    running = GaugeMetricFamily("ssd_layout", "1 for the way in which drafts are made now", labels=["layout"])
    if status.layout:
        running.add_metric([status.layout], 1.0)
    yield running
    text = (
        "tokens a second of each way to draft, plain decoding being 1, at about so many requests; 0: unknown"
    )
    gains = GaugeMetricFamily("ssd_layout_gain", text, labels=["layout", "requests"])
    for requests, by_layout in status.layout_gains.items():
        for layout, gain in by_layout.items():
            gains.add_metric([layout, str(requests)], gain)
    yield gains


_BY_KEY: dict[str, tuple[str, Callable[[TenantUsage], int]]] = {
    "key_requests": ("requests of each key's holder", lambda used: used.requests),
    "key_prompt_tokens": ("prompt tokens of each key's holder", lambda used: used.prompt_tokens),
    "key_generation_tokens": ("tokens generated for each key's holder", lambda used: used.output_tokens),
}


class TenantsCollector(Collector):
    """What each holder of a key has used; nothing of those whose keys were taken away."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    def collect(self) -> Iterator[Metric]:
        """Counters by the holder's name; none where there are no keys."""
        yield CounterMetricFamily(
            "ssd_unknown_keys", "requests without a key that is known", value=self._tenants.unknown_keys
        )
        found = self._tenants.all()
        for name, (text, read) in _BY_KEY.items():
            family = CounterMetricFamily(f"ssd_{name}", text, labels=["key"])
            for tenant in found:
                family.add_metric([tenant.name], float(read(tenant.used)))
            yield family
        refused = CounterMetricFamily(
            "ssd_key_over_limit", "requests refused because a limit was reached", labels=["key", "limit"]
        )
        for tenant in found:
            refused.add_metric([tenant.name, "requests"], float(tenant.used.over_requests))
            refused.add_metric([tenant.name, "tokens"], float(tenant.used.over_tokens))
        yield refused


class ServerMetrics:
    """The registry and the server's own histograms."""

    def __init__(
        self,
        engine: EngineClient,
        up: Callable[[], bool],
        tenants: Tenants | None = None,
        tell_cached: bool = True,
        model: str = "",
        prefix: str = PREFIX,
    ) -> None:
        """Without `tell_cached` no metric shows how much of a prompt was found in the cache. Names begin with
        `prefix`, and all series have the `model` as a label unless it is empty."""
        self._model, self._prefix = model, prefix
        self._tell_cached = tell_cached
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(EngineCollector(engine, up, tell_cached))
        if tenants is not None:
            self.registry.register(TenantsCollector(tenants))
        self.first_token = self._histogram("time_to_first_token_seconds", "until the first token", SECONDS)
        self.between = self._histogram(
            "inter_token_latency_seconds", "between tokens, a round's shared out", SECONDS
        )
        self.whole = self._histogram("e2e_request_latency_seconds", "until the last token", SECONDS)
        self.decoding = self._histogram("request_decode_time_seconds", "from first to last token", SECONDS)
        self.queue = self._histogram("request_queue_time_seconds", "until it left the queue", SECONDS)
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "from then to the first token", SECONDS
        )
        self.round_tokens = self._histogram("request_round_tokens", "tokens a round", ROUND_TOKENS)
        self.round_nodes = self._histogram("request_round_nodes", "nodes verified a round", ROUND_NODES)
        self.prompt_tokens = self._histogram("request_prompt_tokens", "prompt tokens of a request", TOKENS)
        self.output_tokens = self._histogram(
            "request_generation_tokens", "output tokens of a request", TOKENS
        )
        self.ended = Counter(
            "ssd_request_success", "requests by how they ended", ["finished_reason"], registry=self.registry
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"ssd_{name}", text, buckets=buckets, registry=self.registry)

    def render(self) -> bytes:
        """The page that Prometheus scrapes."""
        return generate_latest(_Renamed(self.registry, self._model, self._prefix))

    def observe_prompt(self, first_token_s: float, prompt_s: float) -> None:
        """A prompt was read in `prompt_s` of the seconds to its first token. Both times would tell what was
        cached."""
        if self._tell_cached and prompt_s > 0:
            self.queue.observe(max(0.0, first_token_s - prompt_s))
            self.prefill.observe(prompt_s)


class _Renamed(Collector):
    """All families of another collector, by their names on the page."""

    def __init__(self, metrics: Collector, model: str, prefix: str) -> None:
        self._metrics, self._prefix = metrics, prefix
        self._labels = {"model_name": model} if model else {}

    def collect(self) -> Iterator[Metric]:
        """Each with its samples."""
        for family in self._metrics.collect():
            renamed = Metric(self._named(family.name), family.documentation, family.type)
            for sample in family.samples:
                labels = {**self._labels, **sample.labels}
                renamed.samples.append(sample._replace(name=self._named(sample.name), labels=labels))
            yield renamed

    def _named(self, name: str) -> str:
        return self._prefix + name.removeprefix(PREFIX)


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


def join_pages(pages: Mapping[str, str], label: str = "replica") -> bytes:
    """Join the pages of servers, by name, into one page with the name as a label of each sample.

    A scrape reaches any one of the servers: only a joined page has counters that never run backwards.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Joined(pages, label))
    return generate_latest(registry)
