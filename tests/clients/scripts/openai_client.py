"""OpenAI's own client: sync and async, streamed, tools, structured output, responses."""

import asyncio
import sys

import openai
from checks import BASE_URL, KEY, MODEL, TOOLS, Checks
from objects import WarmPlace

ASK = [{"role": "user", "content": "Write a function that adds two numbers."}]
checks = Checks("openai")
client = openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY)
same = {"model": MODEL, "seed": 7, "max_tokens": 48}
long = {**same, "max_tokens": 200}


with checks.check("models") as seen:
    seen.append([each.id for each in client.models.list()])
with checks.check("a chat, whole and streamed: the same text") as seen:
    whole = client.chat.completions.create(messages=ASK, **same).choices[0].message.content
    chunks = client.chat.completions.create(messages=ASK, stream=True, **same)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole == streamed
    seen.append(repr(whole[:60]))
with checks.check("async, 4 at once") as seen:

    async def many() -> list[str]:
        asked = openai.AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY)
        answers = [asked.chat.completions.create(messages=ASK, **same) for _ in range(4)]
        return [answer.choices[0].message.content for answer in await asyncio.gather(*answers)]

    texts = asyncio.run(many())
    assert texts == [whole] * 4
    seen.append(f"{len(texts)} equal texts")
with checks.check("completions with log-probabilities") as seen:
    answer = client.completions.create(model=MODEL, prompt="def add(a, b):", logprobs=2, max_tokens=8, seed=1)
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens
    seen.append(answer.choices[0].logprobs.token_logprobs[:3])
with checks.check("a tool that must be called, whole and streamed: the same call") as seen:
    wish = {"messages": ASK, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, **long}
    whole_call = client.chat.completions.create(**wish).choices[0].message.tool_calls[0].function
    with client.chat.completions.stream(**wish) as stream:
        for _ in stream:
            pass
        streamed_call = stream.get_final_completion().choices[0].message.tool_calls[0].function
    assert (whole_call.name, whole_call.arguments) == (streamed_call.name, streamed_call.arguments)
    seen.append(f"{whole_call.name} {whole_call.arguments}")
with checks.check("structured output, parsed") as seen:
    parsed = client.chat.completions.parse(messages=ASK, response_format=WarmPlace, **long)
    place = parsed.choices[0].message.parsed
    assert isinstance(place, WarmPlace)
    seen.append(place)
with checks.check("responses: whole, streamed, structured, with a tool") as seen:
    again = {"model": MODEL, "input": "A place?", "max_output_tokens": 200, "extra_body": {"seed": 7}}
    place = client.responses.parse(text_format=WarmPlace, **again).output_parsed
    with client.responses.stream(text_format=WarmPlace, **again) as events:
        kinds = [event.type for event in events]
        streamed = events.get_final_response().output_parsed
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert isinstance(place, WarmPlace)
    assert place == streamed
    tool = {"type": "function", **TOOLS[0]["function"]}
    called = client.responses.create(tools=[tool], tool_choice="required", parallel_tool_calls=False, **again)
    seen += [place, kinds[-1], f"{called.output[0].name} {called.output[0].arguments}"]
with checks.check("what is wrong is told as OpenAI's errors") as seen:
    try:
        client.chat.completions.create(model=MODEL, messages=ASK, temperature=-1)
    except openai.BadRequestError as error:
        seen.append(error.body["message"])
    else:
        raise AssertionError("it was taken")
sys.exit(checks.report())
