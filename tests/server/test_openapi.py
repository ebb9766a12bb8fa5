"""The OpenAPI document names every path, status and content type; `running_server` holds answers against it."""

from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from ssd_serve.base.messages import Refused
from ssd_serve.base.settings import Settings
from ssd_serve.server.limits import Limits
from ssd_serve.server.openapi import OPERATIONS, SecuritySchemes, build_document
from tests.server.fakes import ByteTokenizer, Script, say
from tests.server.running_server import RunningServer, listening_server, running_server

pytestmark = pytest.mark.anyio
KEY = {"Authorization": "Bearer sesame"}
ASK = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": ASK},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": ASK, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": ASK},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}
GETS = sorted(path for path in OPERATIONS if path not in BODIES)


async def test_openapi_lists_every_route() -> None:
    async with running_server(lambda _: say("x")) as server:
        routes = {
            (route.path.replace(":path}", "}"), method.lower())
            for route in server.app.routes
            if isinstance(route, APIRoute)
            for method in route.methods or ()
        }
    told = {(path, method) for path, each in OPERATIONS.items() for method in each.methods}
    assert told - routes == {("/openapi.json", "get"), ("/openapi.json", "head")}
    assert routes <= told


@pytest.mark.parametrize(
    ("schemes", "open_paths"),
    [
        (SecuritySchemes(), set(OPERATIONS)),
        (SecuritySchemes(keyed=True), {"/health", "/ping"}),
        (SecuritySchemes(metrics_keyed=True), set(OPERATIONS) - {"/metrics"}),
    ],
)
def test_openapi_security_only_where_a_key_is_required(
    schemes: SecuritySchemes, open_paths: set[str]
) -> None:
    document = build_document("x", "1", schemes)
    assert ("securitySchemes" in document["components"]) == (open_paths != set(OPERATIONS))
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert bool(operation.get("security")) == (path not in open_paths)
            assert ("401" in operation["responses"]) == (path not in open_paths)
            assert not {"422", "default"} & set(operation["responses"])


async def ask_all(server: RunningServer, headers: dict[str, str]) -> None:
    for path in GETS:
        filled = path.replace("{name}", "ssd-embedded")
        for method in ("GET", "HEAD"):
            await server.http.request(method, filled, headers=headers)
    for path, body in BODIES.items():
        await server.http.post(path, json=body, headers=headers)


async def test_successful_responses_match_openapi() -> None:
    rich: dict[str, Any] = {"n": 2, "logprobs": 2, "return_token_ids": True, "seed": 7, "stop": ["c"]}
    chatty: dict[str, Any] = {**rich, "logprobs": True, "top_logprobs": 2}
    streamed: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    steady = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async with running_server(lambda _: say("abcdefgh", group=2)) as server:
        await ask_all(server, {})
        for more in ({}, streamed, steady, {"stream": True}):
            await server.http.post("/v1/completions", json={"prompt": "a", **rich, **more})
            await server.http.post("/v1/chat/completions", json={"messages": ASK, **chatty, **more})
        for path in ("/v1/responses", "/v1/messages"):
            await server.http.post(path, json={**BODIES[path], "stream": True})
        await server.http.post("/v1/completions", json={"prompt": "a", "echo": True, "logprobs": 1})
        await server.http.post("/tokenize", json={"prompt": "a", "return_token_strs": True})
        seen = {(path, method, kind) for path, method, status, kind in server.contract.seen if status == 200}
    for path, operation in OPERATIONS.items():
        for method in operation.methods:
            kinds = {kind for where, how, kind in seen if (where, how) == (path, method.upper())}
            wanted = set(
                build_document("x", "1", SecuritySchemes())["paths"][path][method]["responses"]["200"][
                    "content"
                ]
            )
            assert kinds == wanted or (path, method) == ("/ping", "post"), (path, method, kinds)


class Broken(ByteTokenizer):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise ZeroDivisionError


async def test_error_responses_match_openapi() -> None:
    seen: set[tuple[str, int]] = set()

    def note(server: RunningServer) -> None:
        seen.update((path, status) for path, _, status, _ in server.contract.seen)

    async with running_server(lambda _: say("x"), Settings(api_key="sesame")) as server:
        await ask_all(server, {})
        note(server)
    async with running_server(lambda _: say("x"), ready=False) as server:
        await ask_all(server, {})
        note(server)
    async with running_server(lambda _: say("x"), limits=Limits(max_body_bytes=100)) as server:
        await server.http.get("/v1/models/other")
        for path, body in BODIES.items():
            await server.http.post(path, json={**body, "model": "other"})
            await server.http.post(path, json={**body, "modell": 1})
            await server.http.post(path, json={**body, "user": "x" * 100})
            await server.http.post(path, content=b"{}")
        note(server)
    async with running_server(
        lambda _: Script((), refused=Refused(0, "no room", retry_after_s=2.5))
    ) as server:
        for stream in (False, True):
            await server.http.post("/v1/completions", json={"prompt": "a", "stream": stream})
            for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
                await server.http.post(path, json={**BODIES[path], "stream": stream})
        note(server)
    async with running_server(lambda _: say("x"), Settings(key_requests_per_minute=1)) as server:
        for path, body in BODIES.items():
            for _ in range(2):
                await server.http.post(path, json=body)
        note(server)
    async with running_server(lambda _: say("x"), tokenizer=Broken()) as server:
        await server.http.post("/v1/completions", json={"prompt": "a"})
        note(server)
    missing = {
        (path, status)
        for path, each in OPERATIONS.items()
        for status in (*each.problems, 503 if each.open or each.body else 401, 503 if each.open else 401)
        if (path, status) not in seen
    }
    assert missing == {(path, 408) for path in BODIES}


def status_of_half_a_body(host: str, port: int, path: str) -> int:
    with closing(HTTPConnection(host, port, timeout=60.0)) as client:
        client.putrequest("POST", path)
        client.putheader("Content-Type", "application/json")
        client.putheader("Content-Length", "2")
        client.endheaders(b"{")
        return client.getresponse().status


def test_body_timeout_response_matches_openapi() -> None:
    with listening_server(lambda _: say("x"), limits=Limits(body_timeout_s=0.05)) as server:
        url = httpx.URL(server.url)
        for path in BODIES:
            assert status_of_half_a_body(url.host, url.port or 80, path) == 408
