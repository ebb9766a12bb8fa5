"""`/v1/chat/completions`: messages, the template, choices, streams."""

import pytest

from ssd_serve.base.settings import Settings
from tests.server.fakes import CONTEXT, END, Script, say, tokens
from tests.server.running_server import events, post, running_server
from tests.server.template_reader import TemplateReader

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
ASK = [{"role": "user", "content": "Hi"}]


def prompt_text(ids: tuple[int, ...]) -> str:
    return bytes(ids).decode()


async def test_chat_completion_response() -> None:
    async with running_server(lambda _: tokens([*b"Hello!", END])) as server:
        found = await post(server, PATH, messages=ASK, seed=3)
        # The template writes the begin token, so the tokenizer adds none.
        assert prompt_text(server.engine.submits()[0].prompt) == "user: Hi\nassistant: "
    assert found["object"] == "chat.completion"
    assert found["seed"] == 3
    assert found["choices"][0]["message"] == {"role": "assistant", "content": "Hello!", "refusal": None}
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] == 7


async def test_chat_stream_begins_with_role_and_ends_with_finish_reason() -> None:
    async with running_server(lambda _: tokens([*b"Hello!", END])) as server:
        first, *rest = await events(server, PATH, messages=ASK, seed=3)
        several = await events(server, PATH, messages=ASK, n=3)
    assert first["object"] == "chat.completion.chunk"
    assert first["seed"] == 3
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in rest) == "Hello!"
    assert [chunk["choices"][0]["finish_reason"] for chunk in rest] == [None] * (len(rest) - 1) + ["stop"]
    choices = [choice for chunk in several for choice in chunk["choices"]]
    assert [each["index"] for each in choices if each["delta"].get("role") == "assistant"] == [0, 1, 2]


async def test_chat_content_parts_and_developer_role() -> None:
    conversation = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    async with running_server(lambda _: say("x")) as server:
        await post(server, PATH, messages=conversation)
        assert prompt_text(server.engine.submits()[0].prompt) == "system: Be brief.\nuser: ab\nassistant: "


async def test_earlier_response_message_is_accepted_as_input() -> None:
    async with running_server(lambda _: say("x")) as server:
        answer = (await post(server, PATH, messages=ASK))["choices"][0]["message"]
        returned = {**answer, "tool_calls": None, "function_call": None, "annotations": None, "audio": None}
        await post(server, PATH, messages=[*ASK, returned, *ASK])


async def test_chat_template_kwargs_reach_template() -> None:
    async with running_server(lambda _: say("x")) as server:
        await post(server, PATH, messages=ASK, chat_template_kwargs={"enable_thinking": True, "self": 1})
        assert prompt_text(server.engine.submits()[0].prompt).endswith("(thinking)")
        body = {"messages": ASK, "chat_template_kwargs": {"messages": []}}
        answer = await server.http.post(PATH, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template_kwargs"


async def test_unknown_message_fields_reach_chat_template() -> None:
    said = {"role": "assistant", "content": "x", "reasoning_content": "Hm.", "id": "m1"}
    tokenizer = TemplateReader()
    async with running_server(lambda _: say("x"), tokenizer=tokenizer) as server:
        await post(server, PATH, messages=[*ASK, said, *ASK])
    assert tokenizer.entries[1] == said


async def test_continue_final_message() -> None:
    conversation = [*ASK, {"role": "assistant", "content": " The answer is "}]
    async with running_server(lambda _: say("4")) as server:
        await post(server, PATH, messages=conversation, continue_final_message=True)
        assert prompt_text(server.engine.submits()[0].prompt) == "user: Hi\nassistant:  The answer is "
        both = {"messages": conversation, "continue_final_message": True, "add_generation_prompt": True}
        answer = await server.http.post(PATH, json=both)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "add_generation_prompt"


async def test_system_prompt_setting_precedes_client_system_prompt() -> None:
    settings = Settings(system_prompt="Be kind.")
    asked = [{"role": "system", "content": "Be brief."}, *ASK]
    async with running_server(lambda _: say("x"), settings=settings) as server:
        await post(server, PATH, messages=ASK)
        await post(server, PATH, messages=asked)
        counted = await server.http.post("/tokenize", json={"messages": ASK})
        first, second = (prompt_text(each.prompt) for each in server.engine.submits())
    assert first == "system: Be kind.\nuser: Hi\nassistant: "
    assert second == "system: Be kind.\n\nBe brief.\nuser: Hi\nassistant: "
    assert counted.json()["count"] == len(first)


async def test_chat_template_error_returns_400() -> None:
    async with running_server(lambda _: say("x")) as server:
        answer = await server.http.post(PATH, json={"messages": [{"role": "assistant", "content": "x"}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"
    assert "begin with the user" in answer.json()["error"]["message"]


async def test_chat_default_max_tokens_fills_context() -> None:
    async with running_server(lambda _: say("x")) as server:
        await post(server, PATH, messages=ASK)
        await post(server, PATH, messages=ASK, max_completion_tokens=9)
        first, second = server.engine.submits()
    assert first.parameters.max_tokens == CONTEXT - len(first.prompt)
    assert second.parameters.max_tokens == 9


async def test_chat_logprobs_have_tokens_and_bytes() -> None:
    said = "a🙂é"
    async with running_server(lambda _: tokens([*said.encode(), END])) as server:
        found = await post(server, PATH, messages=ASK, logprobs=True, top_logprobs=2)
        pieces = await events(server, PATH, messages=ASK, logprobs=True)
    content = found["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"] or ()).decode() == said
    assert [entry["token"] for entry in content[:2]] == ["a", r"bytes:\xf0"]
    assert len({entry["token"] for entry in content}) == len(content)
    assert (content[-1]["token"], content[-1]["bytes"]) == ("<end>", None)
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["a", "b"]
    streamed = [chunk["choices"][0]["logprobs"] for chunk in pieces if chunk["choices"][0]["logprobs"]]
    assert sum(len(part["content"]) for part in streamed) == len(content)


async def test_utf8_characters_are_not_split_in_stream() -> None:
    text = "naïve 日本語 🙂 e\N{COMBINING ACUTE ACCENT}"
    async with running_server(lambda _: say(text, group=1)) as server:
        found = await events(server, PATH, messages=ASK)
    parts = [chunk["choices"][0]["delta"].get("content", "") for chunk in found]
    assert "".join(parts) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)
    async with running_server(lambda _: Script(((*b"ok ", 0xF0, 0x9F),))) as server:
        broken = await post(server, PATH, messages=ASK)
    assert broken["choices"][0]["message"]["content"] == "ok \N{REPLACEMENT CHARACTER}"
