"""Clients that read a stream slowly: unread output is bounded, and requests are aborted."""

import asyncio
import json
import time
from collections.abc import MutableMapping
from typing import Any

import pytest

from ssd_serve.base.messages import Abort, Submit
from tests.server.fakes import Script, say
from tests.server.running_server import post, running_server

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"
HEADERS = [(b"content-type", b"application/json")]


class StoppedReader:
    def __init__(self, body: dict[str, Any]) -> None:
        self._body: bytes | None = json.dumps(body).encode()
        self.go = asyncio.Event()
        self.taken: list[bytes] = []

    async def receive(self) -> dict[str, Any]:
        if self._body is None:
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.taken.append(message.get("body", b""))
        if len(self.taken) > 2:
            await self.go.wait()


def scope() -> dict[str, Any]:
    return {
        "type": "http",
        "http_version": "1.1",
        "scheme": "http",
        "client": ("127.0.0.1", 1),
        "method": "POST",
        "path": PATH,
        "headers": HEADERS,
        "query_string": b"",
        "root_path": "",
        "server": None,
    }


async def test_slow_client_is_disconnected_at_backlog_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd_serve.server.engine.generation.MAX_UNREAD", 100)
    async with running_server(lambda _: say("x" * 400, group=2)) as server:
        reader = StoppedReader({"prompt": "a", "n": 3, "max_tokens": 400, "stream": True})
        reading = asyncio.ensure_future(server.app(scope(), reader.receive, reader.send))
        await asyncio.to_thread(server.engine.wait_for, lambda: len(server.engine.sent(Abort)) == 3)
        assert server.client.active == 0
        reader.go.set()
        await reading
        assert (await post(server, PATH, prompt="a", max_tokens=400))["choices"][0]["text"] == "x" * 400
    said = b"".join(reader.taken)
    assert b'"code":"slow_reader"' in said
    assert b"[DONE]" not in said


async def test_single_large_report_is_no_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd_serve.server.engine.generation.MAX_UNREAD", 100)
    async with running_server(lambda _: say("x" * 400, group=400)) as server:
        answered = await asyncio.wait_for(post(server, PATH, prompt="a", max_tokens=400), 10.0)
    assert answered["choices"][0]["text"] == "x" * 400


async def test_blocked_server_merges_rounds_into_fewer_events() -> None:
    text = "to be or not to be, that is the question: whether it is nobler"
    loop = asyncio.get_running_loop()

    def block_server(_: Submit) -> Script:
        loop.call_soon_threadsafe(time.sleep, 1.0)
        return say(text, group=1)

    async with running_server(block_server) as server:
        body = {"prompt": "a", "max_tokens": len(text), "stream": True, "speculation": {"trace": True}}
        answer = await server.http.post(PATH, json=body)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == text
    assert [count for choice in choices for count in choice.get("rounds", [])] == [1] * len(text)
    assert len(events) < len(text) / 2
