"""Every answer that this server gives is accepted as history: cut at any token, in each API."""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import msgspec
import pytest

from ssd_serve.models.text.chat import ChatTemplate
from tests.server.fakes import READY, ByteTokenizer, Script, say
from tests.server.running_server import RunningServer, post, running_server

pytestmark = pytest.mark.anyio
LONG = msgspec.structs.replace(READY, context=8192)
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object"}
THOUGHT = "<think>Hm é</think>"
HERMES = '{}<tool_call>\n{{"name": "add it", "arguments": {{"a": "1"}}}}\n</tool_call>'.format(
    THOUGHT + "Se 🎉 "
)
LLAMA = '{"name": "weather", "parameters": {"a": [1]}}; {"name": "weather", "parameters": "no"}'
MISTRAL = 'Yes. [TOOL_CALLS][{"name": "weather", "arguments": {"a": 1}}, {"name": ""}]'
TEMPLATE = """{% if tools %}{% endif %}{% for message in messages %}[{{ message.role }}] {{ message.content | trim }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}
{%- for name, value in call.function.arguments.items() %} {{ name }}={{ value | tojson }}{% endfor %}{% endfor %}
;{% endfor %}"""


class Strict(ByteTokenizer):
    """Its template takes arguments of calls only as objects, as many templates do."""

    def __init__(self, marks: str) -> None:
        self.template = f"{marks} {{{{ tools }}}}"

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        /,
        **variables: object,
    ) -> str:
        return ChatTemplate(TEMPLATE, {}).render(messages, add_generation_prompt=add_generation_prompt)


def cuts(said: str, step: int = 1) -> list[Script]:
    return [say(said[:size]) for size in (*range(0, len(said), step), len(said))]


async def taken(server: RunningServer, path: str, **body: object) -> str:
    """Send a conversation; return the prompt that it makes."""
    answer = await server.http.post(path, json={**body, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    return bytes(server.engine.submits()[-1].prompt).decode()


@pytest.mark.parametrize(
    ("marks", "said"),
    [("<tool_call><think>", HERMES), ('"parameters"<|start_header_id|>', LLAMA), ("[TOOL_CALLS]", MISTRAL)],
)
async def test_chat_accepts_its_answers(marks: str, said: str) -> None:
    scripts, place = cuts(said), count()
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    async with running_server(
        lambda _: scripts[next(place) % len(scripts)], tokenizer=Strict(marks), model=LONG
    ) as server:
        asked = {"messages": [USER], "tools": tools, "n": len(scripts)}
        choices = (await post(server, "/v1/chat/completions", **asked))["choices"]
        history = [USER]
        for choice in choices:
            calls = choice["message"].get("tool_calls", [])
            results = [{"role": "tool", "tool_call_id": each["id"], "content": None} for each in calls]
            history += [choice["message"], *results, USER]
        prompt = await taken(server, "/v1/chat/completions", messages=history, tools=tools)
    assert prompt.count("[assistant]") == len(scripts)
    assert any(choice["message"].get("tool_calls") for choice in choices)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_other_apis_accept_their_answers(path: str) -> None:
    field, parts = ("input", "output") if path == "/v1/responses" else ("messages", "content")
    tools: list[dict[str, Any]] = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    if field == "messages":
        tools = [{"name": "weather", "input_schema": SCHEMA}]
    scripts, place = cuts(HERMES, 4), count()
    async with running_server(
        lambda _: scripts[next(place) % len(scripts)], tokenizer=Strict("<tool_call><think>"), model=LONG
    ) as server:
        asked = {field: [USER], "tools": tools, "max_tokens": 200}
        answers = await asyncio.gather(*[post(server, path, **asked) for _ in scripts])
        history = [USER]
        for answer in answers:
            said = answer[parts]
            history += said if field == "input" else [{"role": "assistant", "content": said}]
            history.append(USER)
        prompt = await taken(server, path, **{field: history, "tools": tools})
    assert 'add it arguments="{' in prompt
    assert 'add it a="1"' in prompt


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "'}}
REFUSED: list[dict[str, Any]] = [{"type": "refusal", "refusal": "No."}]


@pytest.mark.parametrize(
    ("turn", "written"),
    [
        ({"content": None}, "[assistant] ;"),
        ({}, "[assistant] ;"),
        ({"content": None, "refusal": "No."}, "[assistant] No.;"),
        ({"content": REFUSED}, "[assistant] No.;"),
        ({"content": None, "tool_calls": [CALL]}, '[assistant] f arguments="{\\"a\\": \\"";'),
        ({"content": [{"type": "text", "text": ""}], "tool_calls": []}, "[assistant] ;"),
    ],
)
async def test_turns_of_other_servers_are_accepted(turn: dict[str, Any], written: str) -> None:
    async with running_server(lambda _: say("x"), tokenizer=Strict("")) as server:
        history = [USER, {"role": "assistant", **turn}, USER]
        assert written in await taken(server, "/v1/chat/completions", messages=history)
        if turn.get("content") == REFUSED:
            assert written in await taken(server, "/v1/responses", input=history)


MEDIA = [
    ("/v1/chat/completions", "messages", {"type": "image_url", "image_url": {"url": "x"}}),
    ("/v1/responses", "input", {"type": "input_image", "image_url": "x"}),
    ("/v1/messages", "messages", {"type": "image", "source": {}}),
]


@pytest.mark.parametrize(("path", "field", "part"), MEDIA)
async def test_media_are_not_built(path: str, field: str, part: dict[str, Any]) -> None:
    async with running_server(lambda _: say("x")) as server:
        body = {field: [{"role": "user", "content": [part]}], "max_tokens": 1}
        answer = await server.http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "not_built")
    assert "reads text only; send a description" in error["message"]
