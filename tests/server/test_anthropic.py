"""`/v1/messages`: conversations and tools in Anthropic's words, whole and streamed."""

import json
from typing import Any

import pytest

from ssd_serve.base.settings import Settings
from tests.server.fakes import END, Script, say, tokens
from tests.server.running_server import RunningServer, post, running_server
from tests.server.template_reader import TemplateReader

pytestmark = pytest.mark.anyio
PATH = "/v1/messages"
ASK = [{"role": "user", "content": "Hi"}]
TEMPLATE = "{{ '<tool_call> <think> </think>' }}"
WEATHER = {"name": "weather", "input_schema": {"type": "object"}}
SAID = (
    "<think>Hm.</think>I look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
)


def speak(text: str, group: int = 3) -> Script:
    return tokens([*text.encode(), END], group=group)


async def streamed(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    answer = await server.http.post(PATH, json={"stream": True, **body})
    assert answer.status_code == 200, answer.text
    events: list[dict[str, Any]] = []
    for each in answer.text.strip().split("\n\n"):
        name, data = each.splitlines()
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {}
    arguments = ""
    for event in events:
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            arguments = ""
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                arguments += delta["partial_json"]
                continue
            kind = delta["type"].removesuffix("_delta")
            block[kind] += delta[kind]
        elif event["type"] == "content_block_stop" and arguments:
            message["content"][event["index"]]["input"] = json.loads(arguments)
        elif event["type"] == "message_delta":
            message.update(event["delta"], usage=event["usage"])
    return message


@pytest.mark.parametrize("group", [4, 300])
async def test_anthropic_stream_events_add_up_to_whole_message(group: int) -> None:
    asked: dict[str, Any] = {"messages": ASK, "tools": [WEATHER], "max_tokens": 300, "seed": 3}
    async with running_server(lambda _: speak(SAID, group), tokenizer=TemplateReader(TEMPLATE)) as server:
        whole = await post(server, PATH, **asked)
        events = await streamed(server, **asked)
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    told = put_together(events)
    for message in (whole, told):
        for block in message["content"]:
            block.pop("id", None)
    assert {name: told[name] for name in told if name != "id"} == {
        name: whole[name] for name in whole if name not in ("id", "metrics")
    }
    assert whole["stop_reason"] == "tool_use"
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block["input"] for block in whole["content"][2:]] == [{"city": "Ulm"}, {"city": "Bonn"}]


async def test_anthropic_blocks_reach_chat_template() -> None:
    tokenizer = TemplateReader(TEMPLATE)
    conversation = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Rain?", "cache_control": {"type": "ephemeral"}}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "abc", "name": "weather", "input": {"city": "Ulm"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "abc", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    async with running_server(lambda _: speak("Yes"), tokenizer=tokenizer) as server:
        body = {
            "messages": conversation,
            "tools": [WEATHER],
            "max_tokens": 9,
            "thinking": {"type": "disabled"},
        }
        await post(server, PATH, **body)
    assert [entry["role"] for entry in tokenizer.entries] == ["user", "assistant", "tool", "user"]
    answer = tokenizer.entries[1]
    assert (answer["reasoning_content"], answer["content"]) == ("Hm.", "I look.")
    assert answer["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Ulm"}}
    assert (tokenizer.entries[2]["tool_call_id"], tokenizer.entries[2]["content"]) == ("abc", "rain")
    assert tokenizer.variables["enable_thinking"] is False


async def test_anthropic_last_assistant_message_is_continued() -> None:
    async with running_server(lambda _: speak("world")) as server:
        begun = [*ASK, {"role": "assistant", "content": "Hello,"}]
        await post(server, PATH, messages=begun, max_tokens=9)
        (submit,) = server.engine.submits()
    assert bytes(submit.prompt).decode() == "user: Hi\nassistant: Hello,"


async def test_anthropic_stop_reasons_and_usage() -> None:
    async with running_server(lambda _: tokens([*b"one. two.", END])) as server:
        whole = await post(server, PATH, messages=ASK, max_tokens=50, system="Be kind.")
        stopped = await post(server, PATH, messages=ASK, max_tokens=50, stop_sequences=["."])
        cut = await post(server, PATH, messages=ASK, max_tokens=2)
    assert whole["content"] == [{"type": "text", "text": "one. two."}]
    assert (whole["role"], whole["stop_reason"], whole["stop_sequence"]) == ("assistant", "end_turn", None)
    assert whole["usage"]["input_tokens"] == len("system: Be kind.\nuser: Hi\nassistant: ")
    assert whole["usage"]["output_tokens"] == 10
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", ".")
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)


@pytest.mark.parametrize(
    ("choice", "grammar"),
    [({"type": "any"}, True), ({"type": "tool", "name": "weather"}, True), ({"type": "auto"}, False)],
)
async def test_anthropic_tool_choice_forces_call(choice: dict[str, str], grammar: bool) -> None:
    async with running_server(lambda _: speak(SAID), tokenizer=TemplateReader(TEMPLATE)) as server:
        await post(server, PATH, messages=ASK, max_tokens=200, tools=[WEATHER], tool_choice=choice)
        (submit,) = server.engine.submits()
    assert bool(submit.parameters.grammar) == grammar


async def test_anthropic_count_tokens_equals_usage() -> None:
    async with running_server(lambda _: say("Hello")) as server:
        answer = await post(server, f"{PATH}/count_tokens", messages=ASK)
        assert answer == {"input_tokens": len("user: Hi\nassistant: ")}
        assert not server.engine.submits()


async def test_anthropic_api_key_header_is_accepted() -> None:
    async with running_server(lambda _: say("Hello"), Settings(api_key="right-key-of-this-test")) as server:
        body = {"messages": ASK, "max_tokens": 3}
        for key, status in (("right-key-of-this-test", 200), ("wrong", 401)):
            answer = await server.http.post(PATH, json=body, headers={"x-api-key": key})
            assert answer.status_code == status
    assert answer.json()["type"] == "error"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "max_tokens: field required"),
        ({"max_tokens": 3, "n": 2}, "n: a message is one"),
        ({"max_tokens": 3, "messages": []}, "messages"),
        ({"max_tokens": 3, "tool_choice": {"type": "tool"}}, "tool_choice.name: field required"),
        ({"max_tokens": 3, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
        (
            {"max_tokens": 3, "messages": [{"role": "user", "content": [{"type": "bash"}]}]},
            "one of the types",
        ),
        ({"max_tokens": 3, "messages": [{"role": "system", "content": "x"}]}, "messages.0.role"),
        ({"max_tokens": 3, "stop_sequence": ["a"]}, "did you mean stop_sequences"),
    ],
)
async def test_anthropic_invalid_request_returns_400(body: dict[str, Any], words: str) -> None:
    async with running_server(lambda _: say("Hello")) as server:
        answer = await server.http.post(PATH, json={"messages": ASK, **body})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


async def test_anthropic_stream_failure_is_an_error_event() -> None:
    async with running_server(lambda _: Script(((72, 105),), error="out of luck")) as server:
        events = await streamed(server, messages=ASK, max_tokens=9)
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "server_error"
