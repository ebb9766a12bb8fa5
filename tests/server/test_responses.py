"""`/v1/responses`: conversations, tools and schemas, whole and streamed, as OpenAI's client reads them."""

import json
from typing import Any, cast

import pytest
from openai import AsyncOpenAI

from tests.server.fakes import END, Script, say, tokens
from tests.server.running_server import RunningServer, post, running_server
from tests.server.template_reader import TemplateReader

pytestmark = pytest.mark.anyio
PATH = "/v1/responses"
TEMPLATE = "{{ '<tool_call> <think> </think>' }}"
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
SAID = (
    "<think>Hm.</think>I look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
)
CALL = {"type": "function_call", "call_id": "abc", "name": "weather", "arguments": '{"city": "Ulm"}'}


def speak(text: str, group: int = 3) -> Script:
    return tokens([*text.encode(), END], group=group)


def client(server: RunningServer) -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://server/v1", api_key="none", http_client=cast(Any, server.http))


async def test_responses_api_text_response() -> None:
    async with running_server(lambda _: speak("Hello")) as server:
        response = await client(server).responses.create(model="ssd-embedded", input="Hi", temperature=0.5)
    assert (response.output_text, response.status) == ("Hello", "completed")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len("user: Hi\nassistant: "), 6)
    assert response.temperature == 0.5
    assert response.id.startswith("resp_")


async def test_responses_api_length_limit_is_incomplete() -> None:
    async with running_server(lambda _: say("Hello, hello")) as server:
        answer = await post(server, PATH, input="Hi", max_output_tokens=5)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["content"][0]["text"] == "Hello"


@pytest.mark.parametrize("group", [4, 300])
async def test_responses_api_stream_events_add_up_to_whole(group: int) -> None:
    tokenizer = TemplateReader(TEMPLATE)
    asked: dict[str, Any] = {"model": "ssd-embedded", "input": "Hi", "tools": [WEATHER]}
    async with running_server(lambda _: speak(SAID, group), tokenizer=tokenizer) as server:
        whole = await client(server).responses.create(**asked, extra_body={"seed": 3})
        stream = await client(server).responses.create(**asked, stream=True, extra_body={"seed": 3})
        events: list[Any] = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    last = events[-1].response

    def told(response: Any) -> list[Any]:
        return [item.model_dump(exclude={"id", "call_id"}) for item in response.output]

    assert told(last) == told(whole)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in last.output]
    words = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(words) == whole.output_text == "I look."
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == '{"city": "Ulm"}{"city": "Bonn"}'
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert (0 < whole.usage.output_tokens_details.reasoning_tokens < len(SAID)) == (group == 4)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output[0].content[0].text == "Hm."
    assert len({item.id for item in whole.output}) == 4


async def test_responses_api_items_reach_chat_template() -> None:
    tokenizer = TemplateReader(TEMPLATE)
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        CALL,
        {"type": "function_call_output", "call_id": "abc", "output": "rain"},
    ]
    async with running_server(lambda _: speak("Yes"), tokenizer=tokenizer) as server:
        await post(
            server, PATH, input=items, instructions="Be kind.", tools=[WEATHER], reasoning={"effort": "low"}
        )
    roles = [entry["role"] for entry in tokenizer.entries]
    assert roles == ["system", "user", "assistant", "tool"]
    answer = tokenizer.entries[2]
    assert (answer["reasoning_content"], answer["content"]) == ("Hm.", "I look.")
    assert answer["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Ulm"}}
    assert (tokenizer.entries[3]["tool_call_id"], tokenizer.entries[3]["content"]) == ("abc", "rain")
    assert tokenizer.variables["reasoning_effort"] == "low"
    assert tokenizer.variables["tools"][0]["function"]["name"] == "weather"


async def test_responses_api_json_schema_reaches_engine() -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    async with running_server(lambda _: speak("{}")) as server:
        answer = await post(server, PATH, input="Hi", text={"format": form}, temperature=0, seed=5)
        (submit,) = server.engine.submits()
    assert '"type": "object"' in submit.parameters.grammar
    assert (submit.parameters.temperature, answer["seed"]) == (0, 5)
    assert answer["text"]["format"]["schema"] == {"type": "object"}


async def test_responses_api_logprobs() -> None:
    async with running_server(lambda _: speak("Hi")) as server:
        answer = await post(
            server, PATH, input="Hi", include=["message.output_text.logprobs"], top_logprobs=2
        )
    scored = answer["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in scored][:2] == ["H", "i"]
    assert len(scored[0]["top_logprobs"]) == 2


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id: not built"),
        ({"background": True}, "background: not built"),
        ({"n": 2}, "n: a response is one"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"input": [{"type": "computer_call"}]}, "Input should have one of the types".lower()),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"max_output_token": 3}, "did you mean max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"tool_choice": "required"}, "tool_choice: tools have none to call"),
    ],
)
async def test_responses_api_invalid_request_returns_400(more: dict[str, Any], words: str) -> None:
    async with running_server(lambda _: say("Hello")) as server:
        answer = await server.http.post(PATH, json={"input": "Hi", **more})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"].lower() or words in answer.json()["error"]["message"]


async def test_responses_api_stream_failure_is_an_error_event() -> None:
    async with running_server(lambda _: Script(((72, 105),), error="out of luck")) as server:
        answer = await server.http.post(PATH, json={"input": "Hi", "stream": True})
    last = answer.text.strip().split("\n\n")[-1]
    name, data = last.splitlines()
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "server_error"


async def test_responses_api_text_behind_a_call_in_one_round() -> None:
    said = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call> Done.'
    async with running_server(
        lambda _: speak(said, said.index("Ulm")), tokenizer=TemplateReader(TEMPLATE)
    ) as server:
        answer = await post(server, PATH, input="Hi", tools=[WEATHER])
    assert [item["type"] for item in answer["output"]] == ["function_call", "message"]
    assert json.loads(answer["output"][0]["arguments"]) == {"city": "Ulm"}
