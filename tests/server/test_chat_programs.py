"""Tests with requests of browser chat clients: Open WebUI as recorded, LibreChat as in its sources of 2025."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ssd_serve.base.settings import Settings
from tests.server.fakes import READY, say
from tests.server.running_server import RunningServer, events, running_server

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
ROOT = Path(__file__).parents[2]
KEY = "sk-of-this-test-0123456789"
LONG = replace(READY, context=1 << 16)
RECORDED_KEY = "sk-no-key-is-needed-here-0123456789abcdef"
TURNS = [
    {"role": "system", "content": "You are helpful."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "And now?"},
]
OPEN_WEBUI_HEADERS = {
    "Authorization": f"Bearer {KEY}",
    "X-OpenWebUI-User-Name": "Eve",
    "X-OpenWebUI-User-Id": "7",
    "X-OpenWebUI-User-Role": "user",
}
LIBRECHAT_CHAT: dict[str, Any] = {
    "model": "ssd-embedded",
    "user": "66f2b1c5e4b0a1a2b3c4d5e6",
    "temperature": 1,
    "top_p": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": TURNS,
}


RECORDED = json.loads((ROOT / "tests/clients/sessions/openwebui.json").read_text())["requests"]
"""Requests of Open WebUI, recorded by `python -m tests.clients.record openwebui`."""
CHATS = [each["body"] for each in RECORDED if each["method"] == "POST"]


def signed(server: RunningServer) -> RunningServer:
    server.http.headers.update(OPEN_WEBUI_HEADERS)
    return server


async def test_recorded_clients_can_read_model_list() -> None:
    async with running_server(lambda _: say("x"), Settings(api_key=KEY)) as server:
        listed = (await signed(server).http.get("/v1/models")).json()
    assert [(model["id"], model["object"]) for model in listed["data"]] == [("ssd-embedded", "model")]
    assert all(isinstance(model["created"], int) and model["owned_by"] for model in listed["data"])


@pytest.mark.parametrize("body", [*(body for body in CHATS if body.get("stream")), LIBRECHAT_CHAT])
async def test_recorded_clients_can_read_stream_and_usage(body: dict[str, Any]) -> None:
    async with running_server(lambda _: say("Good."), Settings(api_key=KEY)) as server:
        chunks = await events(signed(server), CHAT, **body)
    assert (
        "".join(part["delta"].get("content") or "" for each in chunks for part in each["choices"]) == "Good."
    )
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 5)


@pytest.mark.parametrize("body", [body for body in CHATS if not body.get("stream")])
async def test_recorded_clients_can_read_whole_response(body: dict[str, Any]) -> None:
    async with running_server(lambda _: say('{"title": "Hi"}'), Settings(api_key=KEY), model=LONG) as server:
        answer = (await signed(server).http.post(CHAT, json=body)).json()
    assert answer["choices"][0]["message"]["content"] == '{"title": "Hi"}'
