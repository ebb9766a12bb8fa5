"""Recorded sessions of client programs are answered: every request gets a complete answer."""

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


@pytest.mark.parametrize("file", SESSIONS, ids=lambda file: file.stem)
async def test_recorded_session_is_answered(file: Path) -> None:
    requests: list[dict[str, Any]] = json.loads(file.read_text())["requests"]
    assert len(requests) > 3
    async with running_server(lambda _: say("Good."), Settings(api_key=KEY), model=MODEL) as server:
        for each in requests:
            answer = await server.http.request(
                each["method"], each["path"], headers=each["headers"], json=each["body"]
            )
            wrong = (each["body"] or {}).get("temperature") == -1
            assert answer.status_code == (400 if wrong else 200), (each, answer.text)
            if (each["body"] or {}).get("stream") and "/completions" in each["path"]:
                assert answer.text.rstrip().endswith("data: [DONE]"), each


def test_chats_streams_titles_and_the_list_of_models_were_recorded() -> None:
    (file,) = (each for each in SESSIONS if each.stem == "openwebui")
    requests = json.loads(file.read_text())["requests"]
    seen = {(each["method"], each["path"], (each["body"] or {}).get("stream")) for each in requests}
    chat = "/v1/chat/completions"
    assert seen >= {("GET", "/v1/models", None), ("POST", chat, True), ("POST", chat, False)}
    assert any("title" in str(each["body"]) for each in requests)
