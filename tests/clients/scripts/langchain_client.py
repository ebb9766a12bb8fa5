"""LangChain's ChatOpenAI: messages, streams, tools, structured output, batches."""

import sys

from checks import BASE_URL, KEY, MODEL, Checks
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from objects import WarmPlace

checks = Checks("langchain-openai", "langchain-core")
model = ChatOpenAI(model=MODEL, base_url=f"{BASE_URL}/v1", api_key=KEY, seed=7, max_tokens=96)


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


@tool
def get_time(city: str) -> str:
    """The time in a city."""
    return f"noon in {city}"


with checks.check("invoke and stream: the same text") as seen:
    whole = model.invoke("Add two numbers.").content
    assert "".join(chunk.content for chunk in model.stream("Add two numbers.")) == whole
    seen.append(repr(whole[:60]))
with checks.check("batch") as seen:
    assert [each.content for each in model.batch(["Add two numbers."] * 3)] == [whole] * 3
    seen.append("3 equal texts")
with checks.check("bind_tools, a call, its result") as seen:
    bound = model.bind_tools([get_weather, get_time], tool_choice="required", strict=True)
    called = bound.bind(parallel_tool_calls=False, max_tokens=None).invoke("What is the weather in Rome?")
    assert isinstance(called, AIMessage)
    (call,) = called.tool_calls
    result = {"get_weather": get_weather, "get_time": get_time}[call["name"]].invoke(call)
    assert isinstance(result, ToolMessage)
    after = model.invoke([("user", "What is the weather in Rome?"), called, result])
    seen += [call["name"], call["args"], result.content, repr(after.content[:20])]
for method in ("json_schema", "function_calling"):
    with checks.check(f"with_structured_output, {method}") as seen:
        place = model.with_structured_output(WarmPlace, method=method, strict=True).invoke("A place?")
        assert isinstance(place, WarmPlace)
        seen.append(place)
sys.exit(checks.report())
