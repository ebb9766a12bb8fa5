"""Tools for chat templates that have none: in the system prompt, and in the texts of messages.

The format is that of Hermes: functions as JSON between `<tools>` marks, calls between `<tool_call>` marks, results
between `<tool_response>` marks in messages of the user.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

FORMAT = "hermes"
"""Name of the format, as `SSD_TOOL_PARSER` has it."""

_PROMPT = """You can call functions. Each line between <tools> and </tools> describes one:
<tools>
{functions}
</tools>
To call a function, answer with its name and arguments as JSON, in this form:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>
The result comes between <tool_response> and </tool_response>."""

Messages = Sequence[Mapping[str, Any]]


def tools_as_text(messages: Messages, tools: Sequence[Any] | None, *, system: bool = True) -> Messages:
    """Return the conversation without calls and messages of tools: their text is content.

    `tools` are described in the system message, or in the first one of the user where there may be no system.
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        entry = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        if message.get("tool_calls"):
            calls = [_call(call.get("function", call)) for call in message["tool_calls"]]
            entry["content"] = "\n".join([each for each in (message.get("content"), *calls) if each])
        answers = message.get("role") == "tool"
        if answers:
            response = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            entry |= {"role": "user", "content": response}
        # Some templates take no two messages of one role in a row.
        if (
            found
            and entry.get("role") == found[-1].get("role") == "user"
            and (answers or found[-1]["answers"])
        ):
            found[-1] |= {"content": f"{found[-1]['content']}\n{entry['content']}", "answers": answers}
        else:
            found.append({**entry, "answers": answers})
    for entry in found:
        del entry["answers"]
    if tools:
        _describe(found, tools, "system" if system else "user")
    return found


def _call(function: Mapping[str, Any]) -> str:
    called = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(called, ensure_ascii=False)}\n</tool_call>"


def _describe(messages: list[dict[str, Any]], tools: Sequence[Any], role: str) -> None:
    functions = "\n".join(json.dumps(each, ensure_ascii=False) for each in cast("Sequence[object]", tools))
    text = _PROMPT.format(functions=functions)
    place = next((place for place, each in enumerate(messages) if each.get("role") == role), None)
    if place is None or (role == "system" and place):
        messages.insert(0, {"role": role, "content": text})
    else:
        parts = [messages[place]["content"], text]
        content = "\n\n".join(parts if role == "system" else parts[::-1])
        messages[place] = {**messages[place], "content": content}
