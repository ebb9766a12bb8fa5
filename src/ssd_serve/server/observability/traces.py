"""Traces by OpenTelemetry: a span for each request that is let in, with what the engine did of it below.

Spans tell times and counts, never what was asked or answered. A client's W3C context goes on here. Sampling,
the service's name and the collector's headers are set by OpenTelemetry's own variables.
"""

import threading
import time
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ssd_serve.base.version import __version__
from ssd_serve.base.messages import Figures
from ssd_serve.server.observability.finished import FinishedRequest
from ssd_serve.server.observability.stopwatch import Course

_LEAVES_WITHIN_S = 2.0
"""How long the last spans may take to be taken, when the server ends."""


class Traces:
    """Sends the spans of one server, on a thread."""

    def __init__(self, endpoint: str, model: str) -> None:
        """`endpoint` takes OTLP over HTTP, e.g. http://127.0.0.1:4318/v1/traces."""
        usual = Resource({"service.name": "ssd-serve", "service.version": __version__})
        self._provider = TracerProvider(
            resource=usual.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self.tracer = self._provider.get_tracer("ssd_serve", __version__)
        self.model = model

    def middleware(self, app: ASGIApp) -> "Traced":
        """What keeps the span of each request."""
        return Traced(app, self)

    def close(self) -> None:
        """Send what is left, unless nobody takes it."""
        leaving = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        leaving.start()
        leaving.join(_LEAVES_WITHIN_S)


class Traced:
    """ASGI middleware: every POST has a span for as long as it is answered."""

    def __init__(self, app: ASGIApp, traces: Traces) -> None:
        self._app = app
        self._traces = traces
        self._context = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on within its span."""
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
            {"http.request.method": "POST", "gen_ai.response.id": str(state.get("request_name", ""))},
        )
        state["trace"] = SpansOfRequest(span, self._traces)

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


class SpansOfRequest:
    """See `RequestTrace`."""

    def __init__(self, span: Span, traces: Traces) -> None:
        self._span = span
        self._traces = traces

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
            below = _Below(self._traces.tracer, self._span)
            for choice in request.choices:
                below.choice(choice)


class _Below:
    """Spans of what is over already."""

    def __init__(self, tracer: Tracer, above: Span) -> None:
        self._tracer = tracer
        self._context = set_span_in_context(above)
        self._clock = time.time_ns() - time.monotonic_ns()

    def choice(self, course: Course) -> None:
        """Waiting, reading, writing, as far as it came."""
        read_from, first = course.read_from, course.first
        if first is None:
            self._add("queue", course.begun, course.ended, {"ssd.reason": course.reason})
            return
        if read_from is not None:
            self._add("queue", course.begun, read_from, {})
        prompt = {"gen_ai.usage.input_tokens": course.prompt_tokens}
        if course.figures is not None:
            prompt["ssd.cached_tokens"] = course.figures.cached_prompt_tokens
        self._add("prefill", course.begun if read_from is None else read_from, first, prompt)
        written = {"gen_ai.usage.output_tokens": course.output_tokens, **_speculation(course.figures)}
        self._add("decode", first, course.last, {"ssd.reason": course.reason, **written})

    def _add(self, name: str, begun: float, ended: float, attributes: Mapping[str, str | float]) -> None:
        """Moments are those of `time.monotonic`."""
        span = self._tracer.start_span(
            name, self._context, attributes=attributes, start_time=self._clock + int(1e9 * begun)
        )
        span.end(self._clock + int(1e9 * ended))


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
