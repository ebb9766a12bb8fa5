"""Tests of tool calls and reasoning in `/v1/chat/completions`, whole and streamed."""

import json
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.base.messages import ThinkingBudget
from ssd_serve.base.settings import Settings
from ssd_serve.server.openai.message import MessageRules, MessageWriter
from tests.server.fakes import END, ByteTokenizer, Script, say, tokens
from tests.server.running_server import events, post, running_server
from tests.server.template_reader import TemplateReader

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
ASK = [{"role": "user", "content": "Hi"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
SAID = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
)


class Qwen(ByteTokenizer):
    template = "{{ tools }} <tool_call> <think> </think>"


def speak(text: str) -> Script:
    return tokens([*text.encode(), END])


def put_together(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = dict(choice["delta"])
            for piece in delta.pop("tool_calls", []):
                if piece["index"] == len(calls):
                    calls.append({"id": piece["id"], "type": piece["type"], "function": piece["function"]})
                else:
                    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
            for name, value in delta.items():
                message[name] = message.get(name, "") + value
    return {**message, **({"tool_calls": calls} if calls else {})}


@pytest.mark.parametrize("said", [SAID, "Only words.", "<think>Hm.</think>" + SAID.partition("\n")[2]])
async def test_tool_call_deltas_add_up_to_whole_message(said: str) -> None:
    async with running_server(lambda _: speak(said), tokenizer=Qwen()) as server:
        whole = await post(server, PATH, messages=ASK, tools=[WEATHER], seed=3)
        streamed = await events(server, PATH, messages=ASK, tools=[WEATHER], seed=3)
    choice, told = whole["choices"][0], put_together(streamed)
    message = choice["message"]
    assert told.get("content") == (message["content"] or "")
    assert told.get("reasoning_content") == message.get("reasoning_content")
    called = message.get("tool_calls", [])
    assert [each["function"] for each in told.get("tool_calls", [])] == [each["function"] for each in called]
    assert [json.loads(each["function"]["arguments"])["city"] for each in called] == ["Ulm", "Bonn"] * bool(
        called
    )
    assert len({each["id"] for each in called}) == len(called)
    ends = [choice["finish_reason"] for chunk in streamed for choice in chunk["choices"]]
    assert [end for end in ends if end] == [choice["finish_reason"]] == ["tool_calls" if called else "stop"]
    assert (message["content"] == "I look.") == (said == SAID)


@pytest.mark.parametrize("sizes", [(1,), (7, 1, 30), (200,)])
async def test_tool_calls_are_independent_of_round_size(sizes: tuple[int, ...]) -> None:
    raw, groups, place = [*SAID.encode(), END], list[tuple[int, ...]](), 0
    while place < len(raw):
        size = sizes[len(groups) % len(sizes)]
        groups.append(tuple(raw[place : place + size]))
        place += size
    async with running_server(lambda _: Script(tuple(groups)), tokenizer=Qwen()) as server:
        told = put_together(await events(server, PATH, messages=ASK, tools=[WEATHER]))
    assert told["content"] == "I look."
    assert [json.loads(each["function"]["arguments"])["city"] for each in told["tool_calls"]] == [
        "Ulm",
        "Bonn",
    ]


async def test_parallel_tool_calls_false_allows_one_call() -> None:
    async with running_server(lambda _: speak(SAID), tokenizer=Qwen()) as server:
        body = {"messages": ASK, "tools": [WEATHER], "parallel_tool_calls": False}
        message = (await post(server, PATH, **body))["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1


async def test_tool_choice_none_keeps_calls_as_text() -> None:
    async with running_server(lambda _: speak(SAID), tokenizer=Qwen()) as server:
        asked: list[dict[str, Any]] = [{}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}]
        for more in asked:
            choice = (await post(server, PATH, messages=ASK, **more))["choices"][0]
            assert choice["message"]["content"] == SAID
            assert choice["finish_reason"] == "stop"


async def test_reasoning_content_is_separate_or_excluded() -> None:
    async with running_server(lambda _: speak("<think>\nHm.\n</think>\n\nYes."), tokenizer=Qwen()) as server:
        message = (await post(server, PATH, messages=ASK))["choices"][0]["message"]
        without = await post(server, PATH, messages=ASK, include_reasoning=False)
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    assert without["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}


async def test_tool_and_reasoning_parser_settings() -> None:
    settings = Settings(tool_parser="mistral", reasoning_parser="think")
    said = '<think>a</think>[TOOL_CALLS][{"name": "weather", "arguments": {}}]'
    tokenizer = TemplateReader("{{ tools }}")
    async with running_server(lambda _: speak(said), settings, tokenizer=tokenizer) as server:
        message = (await post(server, PATH, messages=ASK, tools=[WEATHER]))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("a", None)
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": "{}"}


async def test_tools_and_results_reach_chat_template() -> None:
    called = {
        "id": "abc",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Ulm"}'},
    }
    conversation = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "abc", "content": "rain"},
    ]
    tokenizer = TemplateReader("{{ tools }} <tool_call>")
    async with running_server(lambda _: say("x"), tokenizer=tokenizer) as server:
        await post(server, PATH, messages=conversation, tools=[WEATHER], reasoning_effort="low")
    _, assistant, tool = tokenizer.entries
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"city": "Ulm"}
    assert (assistant["content"], tool["tool_call_id"]) == ("", "abc")
    assert tokenizer.variables["tools"] == [WEATHER]
    assert (tokenizer.variables["reasoning_effort"], tokenizer.variables["enable_thinking"]) == ("low", True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [WEATHER]}, "tools"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [WEATHER] * 257}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ],
)
async def test_invalid_tools_return_400_with_param(body: dict[str, Any], param: str) -> None:
    async with running_server(lambda _: say("x"), tokenizer=TemplateReader("{{ tools }}")) as server:
        answer = await server.http.post(PATH, json={"messages": ASK, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("parser", ["auto", "mistral", "none"])
async def test_template_without_tools_gets_the_default_format(
    parser: Literal["auto", "mistral", "none"],
) -> None:
    settings = Settings(tool_parser=parser)
    async with running_server(lambda _: speak(SAID), settings) as server:
        body = {"messages": ASK, "tools": [WEATHER], "tool_choice": "required"}
        answer = await server.http.post(PATH, json=body)
        if parser == "none":
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
            return
        grammar = server.engine.submits()[0].parameters.grammar
    calls = answer.json()["choices"][0]["message"]["tool_calls"]
    assert [each["function"]["name"] for each in calls] == ["weather"] * 2
    assert "<tool_call>" in grammar
    assert "SPACE call)*" not in grammar


class TwoTemplates(TemplateReader):
    """Its `tool_use` template teaches Mistral's calls, the other one those of Hermes."""

    def chat_template(self, name: str | None = None, tools: bool = False) -> str:
        return "{{ tools }} [TOOL_CALLS]" if tools and name is None else "{{ tools }} <tool_call>"


async def test_tool_parser_follows_the_chosen_template() -> None:
    said, tokenizer = '[TOOL_CALLS][{"name": "weather", "arguments": {}}]', TwoTemplates()
    async with running_server(lambda _: speak(said), tokenizer=tokenizer) as server:
        found = await post(server, PATH, messages=ASK, tools=[WEATHER])
        assert "chat_template" not in tokenizer.variables
        other = await post(server, PATH, messages=ASK, tools=[WEATHER], chat_template="default")
    assert found["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert (other["choices"][0]["message"]["content"], tokenizer.variables["chat_template"]) == (
        said,
        "default",
    )


@given(st.integers(0, len(SAID)))
def test_resumed_message_returns_rest_of_text(had: int) -> None:
    rules = MessageRules("hermes", {"weather"})
    whole, rest = MessageWriter(rules, "x"), MessageWriter(rules, "x")
    whole.push(SAID, last=True)
    rest.skip(SAID[:had])
    rest.push(SAID[had:], last=True)
    assert rest.message().get("tool_calls") == whole.message().get("tool_calls")
    assert str(whole.message()["content"]).endswith(str(rest.message()["content"] or ""))


async def test_thinking_token_budget_reaches_engine() -> None:
    tokenizer = Qwen()
    async with running_server(lambda _: speak("Yes."), tokenizer=tokenizer) as server:
        await post(server, PATH, messages=ASK, thinking_token_budget=9)
        await post(server, PATH, messages=ASK, reasoning_budget=0)
        await post(server, PATH, messages=ASK)
        budgets = [submit.parameters.thinking_budget for submit in server.engine.submits()]
    begin, end = (tuple(mark.encode()) for mark in ("<think>", "</think>"))
    assert budgets == [ThinkingBudget(9, begin, end), ThinkingBudget(0, begin, end), None]
    async with running_server(lambda _: speak("Yes.")) as server:  # a model without thinking
        await post(server, PATH, messages=ASK, thinking_token_budget=9)
        assert server.engine.submits()[0].parameters.thinking_budget is None
        refused = await server.http.post(PATH, json={"messages": ASK, "thinking_token_budget": -1})
    assert refused.status_code == 400
