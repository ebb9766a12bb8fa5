"""Requests of client programs are answered: recorded sessions, and LibreChat's as in its sources of 2025."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ssd_serve.base.settings import Settings
from tests.server.fakes import READY, say
from tests.server.running_server import running_server

pytestmark = pytest.mark.anyio
SESSIONS = sorted((Path(__file__).parent / "sessions").glob("*.json"))
KEY = "sk-no-key-is-needed-here-0123456789abcdef"
"""The key that all recorded clients used."""
MODEL = replace(READY, context=1 << 16)
CHAT = "/v1/chat/completions"
LIBRECHAT: dict[str, Any] = {
    "method": "POST",
    "path": CHAT,
    "headers": {"Authorization": f"Bearer {KEY}"},
    "body": {
        "model": "ssd-embedded",
        "user": "66f2b1c5e4b0a1a2b3c4d5e6",
        "temperature": 1,
        "top_p": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [
            {"role": "system", "content": "You are helpful."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "And now?"},
        ],
    },
}


def requests_of(file: Path) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = json.loads(file.read_text())["requests"]
    return requests


def check_chat(body: dict[str, Any], text: str) -> None:
    if not body.get("stream"):
        assert json.loads(text)["choices"][0]["message"]["content"] == "Good."
        return
    *lines, last = (line.removeprefix("data: ") for line in text.split("\n\n") if line)
    chunks = [json.loads(line) for line in lines]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert last == "[DONE]"
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Good."
    if (body.get("stream_options") or {}).get("include_usage"):
        assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 5)


@pytest.mark.parametrize(
    "requests",
    [*map(requests_of, SESSIONS), [LIBRECHAT]],
    ids=[*(file.stem for file in SESSIONS), "librechat"],
)
async def test_requests_of_client_programs_are_answered(requests: list[dict[str, Any]]) -> None:
    async with running_server(lambda _: say("Good."), Settings(api_key=KEY), model=MODEL) as server:
        for each in requests:
            body = each["body"] or {}
            answer = await server.http.request(
                each["method"], each["path"], headers=each["headers"], json=each["body"]
            )
            wrong = body.get("temperature") == -1
            assert answer.status_code == (400 if wrong else 200), (each, answer.text)
            if each["path"] == CHAT and not wrong:
                check_chat(body, answer.text)


def test_openwebui_session_has_model_list_streams_and_titles() -> None:
    (file,) = (each for each in SESSIONS if each.stem == "openwebui")
    requests = requests_of(file)
    seen = {(each["method"], each["path"], (each["body"] or {}).get("stream")) for each in requests}
    assert seen >= {("GET", "/v1/models", None), ("POST", CHAT, True), ("POST", CHAT, False)}
    assert any("title" in str(each["body"]) for each in requests)
