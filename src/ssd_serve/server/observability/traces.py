"""OpenTelemetry traces: a span for each authorized POST, with child spans for queue, prefill and decode.

Spans hold times and counts, no prompts and no outputs. They continue the client's W3C trace context. Sampling,
service name and collector headers are set by OpenTelemetry's own variables.
"""

import threading
import time
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ssd_serve.base.messages import Figures
from ssd_serve.base.version import __version__
from ssd_serve.server.observability.timing import ChoiceTiming, FinishedRequest

_FLUSH_S = 2.0
"""Time to send the last spans when the server ends."""


class Traces:
    """Sends the spans of one server, in a thread."""

    def __init__(self, endpoint: str, model: str) -> None:
        """`endpoint`: URL for OTLP over HTTP, e.g. http://127.0.0.1:4318/v1/traces."""
        default = Resource({"service.name": "ssd-serve", "service.version": __version__})
        self._provider = TracerProvider(
            resource=default.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self.tracer = self._provider.get_tracer("ssd_serve", __version__)
        self.model = model

    def middleware(self, app: ASGIApp) -> "TraceMiddleware":
        """Wrap `app` with the middleware of these traces."""
        return TraceMiddleware(app, self)

    def close(self) -> None:
        """Send the remaining spans, if the collector accepts them in time."""
        flushing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        flushing.start()
        flushing.join(_FLUSH_S)


class TraceMiddleware:
    """ASGI middleware: a span around each POST."""

    def __init__(self, app: ASGIApp, traces: Traces) -> None:
        self._app = app
        self._traces = traces
        self._context = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = {name: headers[name] for name in self._context.fields if name in headers}
        state = scope.setdefault("state", {})
        span = self._traces.tracer.start_span(
            "POST",
            self._context.extract(given),
            SpanKind.SERVER,
            {"http.request.method": "POST", "gen_ai.response.id": str(state.get("request_id", ""))},
        )
        state["trace"] = RequestSpans(span, self._traces)

        async def send_seen(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= 500:
                    span.set_status(StatusCode.ERROR)
            await send(message)

        try:
            await self._app(scope, receive, send_seen)
        except BaseException:
            span.set_status(StatusCode.ERROR)
            raise
        finally:
            route = getattr(scope.get("route"), "path", None)
            if route is not None:
                span.update_name(f"POST {route}")
                span.set_attribute("http.route", route)
            span.end()


class RequestSpans:
    """The spans of one request."""

    def __init__(self, span: Span, traces: Traces) -> None:
        self._span = span
        self._traces = traces
        self._clock = time.time_ns() - time.monotonic_ns()

    @property
    def identifier(self) -> str:
        return format_trace_id(self._span.get_span_context().trace_id)

    def finished(self, request: FinishedRequest) -> None:
        self._span.set_attributes(
            {
                "gen_ai.request.model": self._traces.model,
                "gen_ai.request.choice.count": len(request.choices),
                "gen_ai.response.finish_reasons": request.reasons,
                "gen_ai.usage.input_tokens": request.prompt_tokens,
                "gen_ai.usage.output_tokens": request.output_tokens,
            }
        )
        if self._span.is_recording():
            for choice in request.choices:
                self._add_choice(choice)

    def _add_choice(self, choice: ChoiceTiming) -> None:
        """Add the spans `queue`, `prefill` and `decode` of a choice, as far as it got."""
        prefill_at, first = choice.prefill_at, choice.first_token_at
        if first is None:
            self._add("queue", choice.started_at, choice.ended_at, {"ssd.reason": choice.reason})
            return
        if prefill_at is not None:
            self._add("queue", choice.started_at, prefill_at, {})
        prompt = {"gen_ai.usage.input_tokens": choice.prompt_tokens}
        if choice.figures is not None:
            prompt["ssd.cached_tokens"] = choice.figures.cached_prompt_tokens
        self._add("prefill", choice.started_at if prefill_at is None else prefill_at, first, prompt)
        output = {"gen_ai.usage.output_tokens": choice.output_tokens, **_speculation(choice.figures)}
        self._add("decode", first, choice.last_token_at, {"ssd.reason": choice.reason, **output})

    def _add(self, name: str, start: float, end: float, attributes: Mapping[str, str | float]) -> None:
        """Add a child span; `start` and `end` are times of `time.monotonic`."""
        child = self._traces.tracer.start_span(
            name,
            set_span_in_context(self._span),
            attributes=attributes,
            start_time=self._clock + int(1e9 * start),
        )
        child.end(self._clock + int(1e9 * end))


def _speculation(figures: Figures | None) -> dict[str, float]:
    if figures is None:
        return {}
    counts: dict[str, float] = {
        "rounds": figures.rounds,
        "draft_tokens": figures.drafted,
        "accepted_tokens": figures.accepted,
        "cache_hits": figures.hits,
        "cache_misses": figures.misses,
        "preemptions": figures.preemptions,
    }
    if figures.rounds:
        counts["tokens_per_round"] = figures.tokens / figures.rounds
    return {f"ssd.{name}": value for name, value in counts.items()}
