"""Tests of OpenTelemetry traces: spans, privacy, and operation without a collector."""

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from ssd_serve.base.errors import SettingsError
from ssd_serve.base.settings import Settings
from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.http.app import create_app
from tests.server.fakes import FIGURES, ByteTokenizer, say
from tests.server.running_server import running_server

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"


@contextmanager
def collector() -> Generator[tuple[str, list[ExportTraceServiceRequest]], None, None]:
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def spans(received: list[ExportTraceServiceRequest]) -> list[Span]:
    return [
        span
        for request in received
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def told(span: Span) -> dict[str, object]:
    return {each.key: getattr(each.value, str(each.value.WhichOneof("value"))) for each in span.attributes}


@pytest.mark.parametrize("stream", [False, True])
async def test_trace_has_spans_of_request_and_choices(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(FIGURES, "prompt_s", 1e-6)
    theirs = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with collector() as (endpoint, received):
        async with running_server(lambda _: say("four"), Settings(otlp_traces_endpoint=endpoint)) as server:
            headers = {"traceparent": theirs, "X-Request-Id": "mine"}
            await server.http.post(COMPLETIONS, json={"prompt": "ab", "stream": stream}, headers=headers)
            await server.http.get("/health")
        found = {span.name: span for span in spans(received)}
        resource = {
            each.key: each.value.string_value for each in received[0].resource_spans[0].resource.attributes
        }
    assert set(found) == {f"POST {COMPLETIONS}", "queue", "prefill", "decode"}
    assert resource["service.name"] == "ssd-serve"
    above = found[f"POST {COMPLETIONS}"]
    assert {span.trace_id.hex() for span in found.values()} == {"0af7651916cd43dd8448eb211c80319c"}
    assert above.parent_span_id.hex() == "b7ad6b7169203331"
    assert all(each.parent_span_id == above.span_id for each in found.values() if each is not above)
    seen = {"http.response.status_code": 200, "gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 4}
    assert told(above).items() >= {**seen, "gen_ai.response.id": "mine"}.items()
    assert told(found["decode"])["ssd.rounds"] == 4
    queue, prefill, decode = (found[name] for name in ("queue", "prefill", "decode"))
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert above.start_time_unix_nano <= queue.start_time_unix_nano + 10_000_000
    assert decode.end_time_unix_nano <= above.end_time_unix_nano + 10_000_000


async def test_trace_has_no_prompts_or_outputs() -> None:
    with collector() as (endpoint, received):
        async with running_server(lambda _: say("fig"), Settings(otlp_traces_endpoint=endpoint)) as server:
            await server.http.post(COMPLETIONS, json={"prompt": "apple"})
        written = b"".join(request.SerializeToString() for request in received)
    assert b"decode" in written
    assert not any(word in written for word in (b"apple", b"fig"))


async def test_trace_of_a_refused_request_has_its_status() -> None:
    with collector() as (endpoint, received):
        async with running_server(lambda _: say("x"), Settings(otlp_traces_endpoint=endpoint)) as server:
            await server.http.post(COMPLETIONS, json={"prompt": 5})
        (span,) = spans(received)
    assert told(span)["http.response.status_code"] == 400


async def test_trace_context_without_sampling() -> None:
    with collector() as (endpoint, received):
        async with running_server(lambda _: say("x"), Settings(otlp_traces_endpoint=endpoint)) as server:
            headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}
            await server.http.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
    assert spans(received) == []


async def test_missing_trace_collector_is_harmless() -> None:
    begun = time.monotonic()
    async with running_server(
        lambda _: say("x"), Settings(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")
    ) as server:
        answers = [await server.http.post(COMPLETIONS, json={"prompt": "a"}) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert time.monotonic() - begun < 10


def test_missing_opentelemetry_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ssd_serve.server.observability.traces", None)
    settings = Settings(otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces")
    with pytest.raises(SettingsError, match=r"ssd-serve\[otel\]"):
        create_app(settings, EngineClient(), ByteTokenizer)


def test_trace_endpoint_must_be_a_url() -> None:
    with pytest.raises(ValueError, match="otlp_traces_endpoint"):
        Settings(otlp_traces_endpoint="collector:4318")
