"""An agent with two tools: `python agent.py [URL]`. Needs `pip install openai`.

The first answer must call a tool (`required` holds a small model to the form of a call); then the model sees the result
and answers in words. For SmolLM2, whose chat template has no tools: `ssd serve smollm2 --tool-parser hermes`.
"""

import json
import sys
from collections.abc import Callable

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam


def weather(city: str) -> str:
    return {"Paris": "rain, 12 degrees", "Tokyo": "sun, 21 degrees"}.get(city, f"no weather known for {city}")


def add(a: float, b: float) -> str:
    return str(a + b)


def tool(name: str, description: str, **properties: object) -> ChatCompletionToolParam:
    schema: dict[str, object] = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    tool("weather", "The weather in a city", city={"type": "string", "enum": ["Paris", "Tokyo"]}),
    tool("add", "The sum of two numbers", a={"type": "integer"}, b={"type": "integer"}),
]
RUN: dict[str, Callable[..., str]] = {"weather": weather, "add": add}

client = OpenAI(base_url=(sys.argv[1:] or ["http://127.0.0.1:8000"])[0] + "/v1", api_key="none")
model = client.models.list().data[0].id
messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather in Tokyo?"}]
call = (
    client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice="required", max_tokens=120, temperature=0
    )
    .choices[0]
    .message
)
messages.append(call.model_dump(exclude_none=True))  # type: ignore[arg-type]
for each in call.tool_calls or []:
    if each.type == "function":
        result = RUN[each.function.name](**json.loads(each.function.arguments))
        print(f"{each.function.name}({each.function.arguments}) = {result}")
        messages.append({"role": "tool", "tool_call_id": each.id, "content": result})
answer = client.chat.completions.create(model=model, messages=messages, max_tokens=80, temperature=0)
print(answer.choices[0].message.content)
