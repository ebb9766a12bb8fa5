"""`/v1/responses`: OpenAI's newer API, without anything kept between requests.

Its body and the chat request with the same meaning; its object and events as items of reasoning, text and calls.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Request, Response
from pydantic import ConfigDict, Discriminator, Field, Tag

from ssd_serve.base.messages import Ready
from ssd_serve.server.errors import ApiError, bad_request
from ssd_serve.server.limits import MAX_LABELS, MAX_MESSAGES, MAX_TOOLS
from ssd_serve.server.openai.chat import ChatEndpoint
from ssd_serve.server.openai.conversation import (
    Function,
    Message,
    NamedFunction,
    ToolCall,
    function_tool,
    json_format,
    model_message,
    named_tool,
    tool_call,
)
from ssd_serve.server.openai.fields import (
    JsonObject,
    Lenient,
    Media,
    NamedSchema,
    NotBuilt,
    RefusalPart,
    TextFormat,
    Tokens,
    by_type,
    not_built,
    text_of_parts,
    text_or_list,
)
from ssd_serve.server.openai.protocol import RULES, ChatRequest, GenerationRequest, TopLogprobs
from ssd_serve.server.openai.serialize import ResponseHead
from ssd_serve.server.openai.stream import Entry, Event, MessageStream, handle_generation
from ssd_serve.server.openai.tasks import GenerationTask
from ssd_serve.server.service import Service

_LOGPROBS = "message.output_text.logprobs"


class InputText(Lenient):
    """A text of a message or of an earlier answer."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[object] | None = None
    logprobs: list[object] | None = None


class ThoughtText(Lenient):
    """A text of the model's reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


def _kind_of(value: object) -> str:
    kind: Any = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    media = ("input_image", "input_audio", "input_file")
    return "<refusal>" if kind == "refusal" else "<media>" if kind in media else "<text>"


Part = Annotated[
    Annotated[InputText, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")] | Media,
    Discriminator(_kind_of),
]
Texts = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[Part], Field(fail_fast=True, max_length=1024), Tag("<list>")],
    text_or_list("texts"),
]


class _Item(Lenient):
    id: str | None = None
    status: str | None = None


class InputMessage(_Item):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts


class FunctionCall(_Item):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(_Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Texts


class Reasoning(_Item):
    """Reasoning of the model, for chat templates."""

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
    by_type("message", "function_call", "function_call_output", "reasoning", default="message"),
]
Items = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[Item], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES), Tag("<list>")],
    text_or_list("items"),
]


def messages_of(items: str | Sequence[AnyItem]) -> list[Message]:
    """Return the conversation; successive reasoning, text and calls of the model become one message."""
    if isinstance(items, str):
        return [Message.model_construct(role="user", content=items)]
    found: list[Message] = []
    thoughts, words, calls = list[str](), list[str](), list[ToolCall]()

    def end_answer() -> None:
        if thoughts or words or calls:
            found.append(model_message("".join(words), "".join(thoughts), calls))
            thoughts.clear()
            words.clear()
            calls.clear()

    for item in items:
        if isinstance(item, Reasoning):
            thoughts += [part.text for part in item.content or item.summary or ()]
        elif isinstance(item, FunctionCall):
            calls.append(tool_call(item.call_id, item.name, item.arguments))
        elif isinstance(item, InputMessage) and item.role == "assistant":
            if calls:
                end_answer()
            words.append(text_of(item.content))
        else:
            end_answer()
            found.append(_other(item))
    end_answer()
    return found


def text_of(texts: str | Sequence[Any]) -> str:
    return texts if isinstance(texts, str) else text_of_parts(texts)


def _other(item: InputMessage | FunctionCallOutput) -> Message:
    if isinstance(item, FunctionCallOutput):
        return Message.model_construct(role="tool", content=text_of(item.output), tool_call_id=item.call_id)
    return Message.model_construct(role=item.role, content=text_of(item.content))


class FlatTool(Function):
    """A function; the tools that OpenAI runs itself are not supported."""

    type: Literal["function"]


class FlatChoice(NamedFunction):
    """The function that must be called."""

    type: Literal["function"]


class FlatSchema(NamedSchema):
    """JSON that matches a schema."""

    type: Literal["json_schema"]


class TextSettings(Lenient):
    """The format of the text."""

    format: (
        Annotated[
            Annotated[TextFormat, Tag("<text>")]
            | Annotated[JsonObject, Tag("<json_object>")]
            | Annotated[FlatSchema, Tag("<json_schema>")],
            by_type("text", "json_object", "json_schema"),
        ]
        | None
    ) = None
    verbosity: Annotated[object, not_built("medium")] = None


class ReasoningSettings(Lenient):
    """Options of reasoning."""

    effort: Annotated[str, Field(pattern="^[a-z]{1,16}$")] | None = None
    summary: Annotated[object, Field(description="ignored: reasoning is not summarized")] = None
    generate_summary: object = None


def _choice_of(value: object) -> str:
    return "<word>" if isinstance(value, str) else "<function>"


class ResponsesRequest(GenerationRequest):
    """Body of `/v1/responses`. Nothing is stored: a client sends the whole conversation."""

    model_config = ConfigDict(json_schema_extra={"dependentSchemas": RULES})

    input: Items = Field(description="a text, or the items of a conversation")
    instructions: str | None = Field(None, description="the system prompt")
    max_output_tokens: Tokens | None = Field(None, description="this API's name of max_tokens")
    tools: list[FlatTool] | None = Field(
        None, max_length=MAX_TOOLS, fail_fast=True, description="functions that the model may call"
    )
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("<word>")]
            | Annotated[FlatChoice, Tag("<function>")],
            Discriminator(_choice_of),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")
    text: TextSettings | None = Field(None, description="format of the output")
    reasoning: ReasoningSettings | None = None
    include: list[str] | None = Field(
        None, max_length=MAX_LABELS, description=f"{_LOGPROBS} is supported; other values are ignored"
    )
    top_logprobs: TopLogprobs | None = None
    store: bool | None = Field(None, description="accepted; nothing is stored")

    conversation: NotBuilt = None
    max_tool_calls: NotBuilt = None
    previous_response_id: NotBuilt = None
    prompt: NotBuilt = None
    background: Annotated[object, not_built(False)] = None
    service_tier: Annotated[object, not_built("auto", "default")] = None
    truncation: Annotated[object, not_built("disabled")] = None

    def chat(self) -> ChatRequest:
        """Return the chat request with the same meaning. Raises `ApiError` for what only this API has."""
        if self.n not in (None, 1):
            raise bad_request("n: a response is one; ask several times", "n", "not_built")
        text = self.instructions
        system = [Message.model_construct(role="system", content=text)] if text else []
        messages = [*system, *messages_of(self.input)]
        if not messages:
            raise bad_request("input: says nothing", "input", "invalid_value")
        choice, form = self.tool_choice, None if self.text is None else self.text.format
        return self.as_chat(
            messages=messages,
            max_tokens=self.max_tokens if self.max_output_tokens is None else self.max_output_tokens,
            tools=None
            if self.tools is None
            else [function_tool(each, each.parameters) for each in self.tools],
            tool_choice=named_tool(choice.name) if isinstance(choice, FlatChoice) else choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning and self.reasoning.effort,
            response_format=json_format(form.json_schema)
            if isinstance(form, FlatSchema)
            else form or self.response_format,
            logprobs=_LOGPROBS in (self.include or ()) or bool(self.top_logprobs),
            top_logprobs=self.top_logprobs,
        )

    def echo(self) -> Mapping[str, object]:
        """Return the fields that a response repeats."""
        asked = None if self.text is None else self.text.format
        form: dict[str, object] = {"type": "text"} if asked is None else asked.model_dump()
        if "json_schema" in form:
            form["schema"] = form.pop("json_schema")
        choice = self.tool_choice
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "tool_choice": choice.model_dump() if isinstance(choice, FlatChoice) else choice or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "text": {"format": form},
            "reasoning": {"effort": self.reasoning and self.reasoning.effort, "summary": None},
        }


_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


@dataclass(frozen=True, slots=True)
class ResponsesEndpoint:
    """Handler of the route. Its requests become chat requests."""

    service: Service

    async def handle(self, request: Request) -> Response:
        return await handle_generation(
            self.service,
            request,
            ResponsesRequest,
            self._task,
            lambda body, head: ResponsesStream(head, body.echo()),
        )

    async def _task(self, body: ResponsesRequest, ready: Ready, request: Request) -> GenerationTask:
        return await ChatEndpoint(self.service).task(body.chat(), ready, request)


class ResponsesStream(MessageStream):
    """Writes one response. `echo` has the fields of its request that it repeats."""

    def __init__(self, head: ResponseHead, echo: Mapping[str, object]) -> None:
        super().__init__(head)
        self._echo = echo
        self._events = 0

    def opening(self) -> Iterator[Event]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, {"response": self._response("in_progress")})

    def thinking(self, text: str) -> Iterator[Event]:
        part = {"type": "reasoning_text", "text": ""}
        yield from self._begin_text("reasoning", {"summary": [], "content": []}, part)
        self.blocks[-1]["content"][0]["text"] += text
        yield self._event("response.reasoning_text.delta", {**self._part(), "delta": text})

    def text(self, text: str, entry: Entry) -> Iterator[Event]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield from self._begin_text("message", {"role": "assistant", "content": []}, part)
        scored: Sequence[object] = (entry.get("logprobs") or {}).get("content", [])
        content = self.blocks[-1]["content"][0]
        content["text"] += text
        content["logprobs"].extend(scored)
        yield self._event("response.output_text.delta", {**self._part(), "delta": text, "logprobs": scored})

    def _begin_text(
        self, kind: str, fields: Mapping[str, object], part: Mapping[str, object]
    ) -> Iterator[Event]:
        """Begin an item of text, unless the last one continues."""
        if self.is_open and self.blocks[-1]["type"] == kind:
            return
        yield from self.end_block()
        yield from self._begin(kind, fields)
        self.blocks[-1]["content"].append(dict(part))
        yield self._event("response.content_part.added", {**self._part(), "part": part})

    def begin_call(self, identifier: str, name: str) -> Iterator[Event]:
        yield from self._begin("function_call", {"call_id": identifier, "name": name, "arguments": ""})

    def arguments(self, text: str) -> Iterator[Event]:
        self.blocks[-1]["arguments"] += text
        yield self._event("response.function_call_arguments.delta", {**self._item(), "delta": text})

    def _begin(self, kind: str, fields: Mapping[str, object]) -> Iterator[Event]:
        name = f"{_PREFIXES[kind]}_{self.head.name}_{len(self.blocks)}"
        self.blocks.append({"id": name, "type": kind, "status": "in_progress", **fields})
        self.is_open = True
        yield self._event("response.output_item.added", {**self._index(), "item": dict(self.blocks[-1])})

    def end_block(self) -> Iterator[Event]:
        if not self.is_open:
            return
        self.is_open = False
        item = self.blocks[-1]
        item["status"] = "completed"
        if item["type"] == "function_call":
            fields = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", {**self._item(), **fields})
        else:
            part = dict(item["content"][0])
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            scored = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
            yield self._event(f"response.{kind}.done", {**self._part(), "text": part["text"], **scored})
            yield self._event("response.content_part.done", {**self._part(), "part": part})
        yield self._event("response.output_item.done", {**self._index(), "item": dict(item)})

    def closing(self) -> Iterator[Event]:
        yield from self.end_block()
        response = self.whole()
        yield self._event(f"response.{response['status']}", {"response": response})

    def whole(self) -> Mapping[str, object]:
        cut, counts = self.last.get("finish_reason") == "length", self.counts
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {}
        return {
            **self._response("incomplete" if cut else "completed"),
            **details,
            "usage": {
                "input_tokens": counts.prompt,
                "input_tokens_details": {"cached_tokens": counts.cached},
                "output_tokens": counts.output,
                "output_tokens_details": {"reasoning_tokens": counts.thinking},
                "total_tokens": counts.prompt + counts.output,
            },
            "metrics": counts.figures,
        }

    def failed(self, error: ApiError) -> Event:
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return self._event("error", {**fields, **error.body()})

    def _response(self, status: str) -> dict[str, object]:
        return {
            "id": f"resp_{self.head.name}",
            "object": "response",
            "created_at": self.head.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self.head.model,
            "output": [dict(item) for item in self.blocks],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "metadata": {},
            "seed": self.head.seed,
            "system_fingerprint": self.head.fingerprint,
            "usage": None,
            **self._echo,
        }

    def _index(self) -> dict[str, object]:
        return {"output_index": len(self.blocks) - 1}

    def _item(self) -> dict[str, object]:
        return {**self._index(), "item_id": self.blocks[-1]["id"]}

    def _part(self) -> dict[str, object]:
        return {**self._item(), "content_index": 0}

    def _event(self, kind: str, fields: Mapping[str, object]) -> Event:
        self._events += 1
        return kind, {**fields, "type": kind, "sequence_number": self._events - 1}
