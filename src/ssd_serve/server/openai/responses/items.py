"""What `input` of `/v1/responses` holds, and the messages that a chat template reads of it."""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from pydantic import AfterValidator, Field, Tag
from pydantic_core import PydanticCustomError

from ssd_serve.server.limits import MAX_MESSAGES
from ssd_serve.server.openai.fields import Lenient, NotBuilt, by_type, text_or_list
from ssd_serve.server.openai.protocol import CalledFunction, Message, ToolCall, model_message


class InputText(Lenient):
    """A text in a message, or one that was answered before."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[object] | None = None
    logprobs: list[object] | None = None


class ThoughtText(Lenient):
    """A text among thoughts."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


Texts = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[InputText], Field(fail_fast=True, max_length=1024), Tag("<list>")],
    text_or_list("texts"),
]


class _Item(Lenient):
    """Of an earlier answer, it may have these."""

    id: str | None = None
    status: str | None = None


class InputMessage(_Item):
    """What was said."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts


def _json(text: str) -> str:
    try:
        msgspec.json.decode(text or "{}")
    except msgspec.DecodeError as error:
        raise PydanticCustomError("json", "not JSON: {why}", {"why": str(error)}) from error
    return text


class FunctionCall(_Item):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Annotated[str, AfterValidator(_json)]


class FunctionCallOutput(_Item):
    """What it gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: Texts


class Reasoning(_Item):
    """What the model thought; templates may read it."""

    type: Literal["reasoning"]
    summary: list[ThoughtText] | None = None
    content: list[ThoughtText] | None = None
    encrypted_content: NotBuilt = None


AnyItem = InputMessage | FunctionCall | FunctionCallOutput | Reasoning
Item = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[FunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[Reasoning, Tag("<reasoning>")],
    by_type("message", "function_call", "function_call_output", "reasoning", usual="message"),
]
Items = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[Item], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES), Tag("<list>")],
    text_or_list("items"),
]


def messages_of(items: str | Sequence[AnyItem]) -> list[Message]:
    """The conversation. What the model thought, said and called one after the other is one message."""
    if isinstance(items, str):
        return [Message.model_construct(role="user", content=items)]
    found: list[Message] = []
    answer = _Answer()
    for item in items:
        if isinstance(item, Reasoning):
            answer.thoughts += [part.text for part in item.content or item.summary or ()]
        elif isinstance(item, FunctionCall):
            function = CalledFunction.model_construct(name=item.name, arguments=item.arguments)
            answer.calls.append(ToolCall.model_construct(id=item.call_id, function=function))
        elif isinstance(item, InputMessage) and item.role == "assistant":
            found += answer.taken() if answer.calls else ()
            answer.words.append(text_of(item.content))
        else:
            found += answer.taken()
            found.append(_other(item))
    return [*found, *answer.taken()]


def text_of(texts: str | list[InputText]) -> str:
    """All of it."""
    return texts if isinstance(texts, str) else "".join(part.text for part in texts)


def _other(item: InputMessage | FunctionCallOutput) -> Message:
    if isinstance(item, FunctionCallOutput):
        return Message.model_construct(role="tool", content=text_of(item.output), tool_call_id=item.call_id)
    return Message.model_construct(role=item.role, content=text_of(item.content))


class _Answer:
    """A message of the model, as far as its items have come."""

    def __init__(self) -> None:
        self.thoughts: list[str] = []
        self.words: list[str] = []
        self.calls: list[ToolCall] = []

    def taken(self) -> list[Message]:
        """It, if there is anything in it; the next one begins."""
        if not (self.thoughts or self.words or self.calls):
            return []
        message = model_message("".join(self.words), "".join(self.thoughts), self.calls)
        self.thoughts, self.words, self.calls = [], [], []
        return [message]
