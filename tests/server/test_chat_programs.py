"""What chat programs in browsers send, as their sources of 2025 have it, is answered as they read it."""

from typing import Any

import pytest

from ssd_serve.settings import Settings
from tests.server.fakes import say
from tests.server.played_servers import House, events, open_house

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
KEY = "sk-of-this-test-0123456789"
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
OPEN_WEBUI_CHAT: dict[str, Any] = {
    "stream": True,
    "model": "ssd-embedded",
    "messages": TURNS,
    "stream_options": {"include_usage": True},
    "temperature": 0.8,
    "max_tokens": 64,
    "top_k": 40,
    "min_p": 0.05,
    "frequency_penalty": 0.1,
    "repeat_penalty": 1.1,
    "seed": 42,
    "stop": ["<|im_end|>"],
}
OPEN_WEBUI_TITLE: dict[str, Any] = {
    "model": "ssd-embedded",
    "messages": [{"role": "user", "content": "### Task:\nGenerate a title."}],
    "stream": False,
    "max_completion_tokens": 200,
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


def signed(house: House) -> House:
    """Every request comes with a key and the program's headers."""
    house.http.headers.update(OPEN_WEBUI_HEADERS)
    return house


async def test_the_list_of_models_is_what_they_read() -> None:
    async with open_house(lambda _: say("x"), Settings(api_key=KEY)) as house:
        listed = (await signed(house).http.get("/v1/models")).json()
    assert [(model["id"], model["object"]) for model in listed["data"]] == [("ssd-embedded", "model")]
    assert all(isinstance(model["created"], int) and model["owned_by"] for model in listed["data"])


@pytest.mark.parametrize("body", [OPEN_WEBUI_CHAT, LIBRECHAT_CHAT], ids=["Open WebUI", "LibreChat"])
async def test_a_chat_streams_deltas_and_then_the_usage(body: dict[str, Any]) -> None:
    async with open_house(lambda _: say("Good."), Settings(api_key=KEY)) as house:
        chunks = await events(signed(house), CHAT, **body)
    assert (
        "".join(part["delta"].get("content") or "" for each in chunks for part in each["choices"]) == "Good."
    )
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 5)


async def test_titles_are_asked_for_whole() -> None:
    async with open_house(lambda _: say('{"title": "Hi"}'), Settings(api_key=KEY)) as house:
        answer = (await signed(house).http.post(CHAT, json=OPEN_WEBUI_TITLE)).json()
    assert answer["choices"][0]["message"]["content"] == '{"title": "Hi"}'
