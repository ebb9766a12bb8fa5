"""Anthropic's own client: messages, streamed, with tools; counting tokens."""

import sys

import anthropic
from checks import BASE_URL, KEY, MODEL, TOOLS, Checks

checks = Checks("anthropic")
client = anthropic.Anthropic(base_url=BASE_URL, api_key=KEY)
same = {
    "model": MODEL,
    "max_tokens": 48,
    "messages": [{"role": "user", "content": "Write a function that adds two numbers."}],
    "extra_body": {"seed": 7},
}
tools = [
    {"name": each["function"]["name"], "input_schema": each["function"]["parameters"], "strict": True}
    for each in TOOLS
]

with checks.check("a message, whole and streamed: the same text") as seen:
    whole = client.messages.create(**same)
    with client.messages.stream(**same) as stream:
        streamed = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert whole.content[0].text == streamed == last.content[0].text
    assert (whole.stop_reason, whole.usage.output_tokens) == (last.stop_reason, last.usage.output_tokens)
    seen += [repr(streamed[:60]), whole.stop_reason, whole.usage.output_tokens]
with checks.check("a system prompt and blocks") as seen:
    blocks = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    answer = client.messages.create(**{**same, "messages": blocks, "system": "Be brief."})
    seen.append(answer.usage.input_tokens)
with checks.check(
    "a tool that must be called, whole and streamed: the same call; its result is taken"
) as seen:
    wish = {
        **same,
        "max_tokens": 200,
        "tools": tools,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    answer = client.messages.create(**wish)
    with client.messages.stream(**wish) as stream:
        streamed = stream.get_final_message()
    (use,) = [each for each in answer.content if each.type == "tool_use"]
    (other,) = [each for each in streamed.content if each.type == "tool_use"]
    assert (answer.stop_reason, use.name, use.input) == (streamed.stop_reason, other.name, other.input)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "12:00"}
    turns = [*same["messages"], {"role": "assistant", "content": answer.content}]
    after = client.messages.create(**{**same, "messages": [*turns, {"role": "user", "content": [result]}]})
    seen += [answer.stop_reason, use.name, use.input, after.stop_reason]
with checks.check("count_tokens is what a message then has") as seen:
    counted = client.messages.count_tokens(model=MODEL, messages=same["messages"]).input_tokens
    assert counted == whole.usage.input_tokens
    seen.append(counted)
with checks.check("what is wrong is told as Anthropic's errors") as seen:
    try:
        client.messages.create(**{**same, "max_tokens": -5})
    except anthropic.BadRequestError as error:
        seen.append(error.body["error"]["message"])
    else:
        raise AssertionError("it was taken")
sys.exit(checks.report())
