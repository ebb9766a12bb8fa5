"""What the messages of `/v1/messages` hold, and the messages that a chat template reads of it."""

import json
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, Tag

from ssd_serve.server.limits import MAX_MESSAGES
from ssd_serve.server.openai.fields import Lenient, ToolName, by_type, text_or_list
from ssd_serve.server.openai.protocol import CalledFunction, Message, ToolCall, model_message


class _Block(Lenient):
    """Any block may say what shall be cached; what is alike is, always."""

    cache_control: object = None


class TextBlock(_Block):
    """Words."""

    type: Literal["text"]
    text: str
    citations: object = None


class ThinkingBlock(_Block):
    """What the model thought; templates may read it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Block):
    """Thoughts that nobody can read."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(_Block):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: ToolName
    input: dict[str, object]


Texts = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[TextBlock], Field(fail_fast=True, max_length=1024), Tag("<list>")],
    text_or_list("text blocks"),
]


class ToolResultBlock(_Block):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    by_type("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]


class AnthropicMessage(Lenient):
    """One message of a conversation."""

    role: Literal["user", "assistant"]
    content: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[Block], Field(fail_fast=True, max_length=1024), Tag("<list>")],
        text_or_list("blocks"),
    ]


AnthropicMessages = Annotated[
    list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


def messages_of(system: str | list[TextBlock] | None, messages: Sequence[AnthropicMessage]) -> list[Message]:
    """The conversation; what calls gave comes as messages of tools."""
    told = text_of(system)
    found = [Message.model_construct(role="system", content=told)] if told else []
    for message in messages:
        blocks = message.content
        if isinstance(blocks, str):
            found.append(Message.model_construct(role=message.role, content=blocks))
        elif message.role == "assistant":
            found.append(_answer(blocks))
        else:
            found += [_result(block) for block in blocks if isinstance(block, ToolResultBlock)]
            words = [block.text for block in blocks if isinstance(block, TextBlock)]
            if words or not blocks:
                found.append(Message.model_construct(role="user", content="\n".join(words)))
    return found


def text_of(texts: str | list[TextBlock] | None) -> str:
    """All of it."""
    if texts is None or isinstance(texts, str):
        return texts or ""
    return "\n".join(block.text for block in texts)


def _answer(blocks: Sequence[object]) -> Message:
    calls = [
        ToolCall.model_construct(
            id=block.id,
            function=CalledFunction.model_construct(name=block.name, arguments=json.dumps(block.input)),
        )
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    thoughts = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    words = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    return model_message(words, thoughts, calls)


def _result(block: ToolResultBlock) -> Message:
    return Message.model_construct(
        role="tool", content=text_of(block.content), tool_call_id=block.tool_use_id
    )
