"""`/v1/messages` and `/v1/messages/count_tokens` of Anthropic's API.

Their bodies and the chat request with the same meaning; a message's object and events as blocks.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import AliasChoices, ConfigDict, Field, Tag

from ssd_serve.base.messages import Ready
from ssd_serve.server.errors import ApiError, bad_request
from ssd_serve.server.limits import MAX_MESSAGES, MAX_TOKEN_IDS, MAX_TOOLS
from ssd_serve.server.openai.chat import ChatEndpoint
from ssd_serve.server.openai.conversation import (
    FunctionFields,
    Message,
    NamedTool,
    function_tool,
    json_format,
    model_message,
    named_tool,
    tool_call,
)
from ssd_serve.server.openai.fields import (
    Ignored,
    Lenient,
    Media,
    NotBuilt,
    Stop,
    ToolName,
    by_type,
    not_built,
    text_or_list,
)
from ssd_serve.server.openai.formats import Schema
from ssd_serve.server.openai.message import arguments_object
from ssd_serve.server.openai.prompts import chat_text, text_ids
from ssd_serve.server.openai.protocol import RULES, ChatRequest, GenerationRequest
from ssd_serve.server.openai.serialize import ResponseHead
from ssd_serve.server.openai.stream import Entry, Event, MessageStream, handle_generation
from ssd_serve.server.openai.tasks import GenerationTask
from ssd_serve.server.openai.unknown_fields import ignored_header
from ssd_serve.server.service import Service


class _Block(Lenient):
    """Any block may have `cache_control`; it is ignored, since equal prefixes are always cached."""

    cache_control: object = None


class TextBlock(_Block):
    """Text."""

    type: Literal["text"]
    text: str
    citations: object = None


class ThinkingBlock(_Block):
    """Reasoning of the model, for chat templates."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Block):
    """Encrypted reasoning; it is ignored."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(_Block):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, object]


Texts = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[TextBlock], Field(fail_fast=True, max_length=1024), Tag("<list>")],
    text_or_list("text blocks"),
]


class ToolResultBlock(_Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Media,
    by_type("text", "thinking", "redacted_thinking", "tool_use", "tool_result", media=("image", "document")),
]


class AnthropicMessage(Lenient):
    """A message of a conversation."""

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
    """Return the conversation; results of calls become messages of tools."""
    text = text_of(system)
    found = [Message.model_construct(role="system", content=text)] if text else []
    for message in messages:
        blocks = message.content
        if isinstance(blocks, str):
            found.append(Message.model_construct(role=message.role, content=blocks))
        elif message.role == "assistant":
            found.append(_answer(blocks))
        else:
            found += [_result(block) for block in blocks if isinstance(block, ToolResultBlock)]
            texts = [block.text for block in blocks if isinstance(block, TextBlock)]
            if texts or not blocks:
                found.append(Message.model_construct(role="user", content="\n".join(texts)))
    return found


def text_of(texts: str | list[TextBlock] | None) -> str:
    if texts is None or isinstance(texts, str):
        return texts or ""
    return "\n".join(block.text for block in texts)


def _answer(blocks: Sequence[object]) -> Message:
    calls = [
        tool_call(block.id, block.name, json.dumps(block.input))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    thinking = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    return model_message(text, thinking, calls)


def _result(block: ToolResultBlock) -> Message:
    return Message.model_construct(
        role="tool", content=text_of(block.content), tool_call_id=block.tool_use_id
    )


class AnthropicTool(FunctionFields):
    """A function; the tools that Anthropic runs itself are not supported."""

    type: Literal["custom"] | None = None
    input_schema: dict[str, object]
    cache_control: object = None


class AnthropicChoice(Lenient):
    """The choice of tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Lenient):
    """Thinking of the model, for its chat template (`enable_thinking`)."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_IDS)] | None = Field(
        None, description="most thinking tokens, where thinking is enabled"
    )
    display: object = None


class OutputSchema(Lenient):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: Schema = Field(validation_alias=AliasChoices("schema"))


class OutputConfig(Lenient):
    """Options of the output."""

    effort: Annotated[str, Field(pattern="^[a-z]{1,16}$")] | None = None
    format: OutputSchema | None = None


class AskedConversation(Lenient):
    """Fields of both paths."""

    messages: AnthropicMessages
    system: Texts | None = None
    tools: list[AnthropicTool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputSchema | None = None
    container: NotBuilt = None
    mcp_servers: Annotated[object, not_built([])] = None

    def chat(self, **common: object) -> ChatRequest:
        """Return the chat request with the same meaning and the fields of `common`. Raises `ApiError` for
        what only this API has."""
        messages = messages_of(self.system, self.messages)
        if not messages:
            raise bad_request("messages: say nothing", "messages", "invalid_value")
        config, choice, thinking, tools = self.output_config, self.tool_choice, self.thinking, self.tools
        form = self.output_format or (None if config is None else config.format)
        if form is not None:
            common["response_format"] = json_format(form.json_schema)
        if thinking is not None and thinking.type != "adaptive":
            common["chat_template_kwargs"] = {"enable_thinking": thinking.type == "enabled"}
        asked: dict[str, Any] = {
            **common,
            "messages": messages,
            "tools": None if tools is None else [function_tool(each, each.input_schema) for each in tools],
            "tool_choice": _chosen(choice),
            "parallel_tool_calls": choice is None or not choice.disable_parallel_tool_use,
            "continue_final_message": _goes_on(messages[-1]) or None,
            "reasoning_effort": config and config.effort,
            "thinking_token_budget": thinking and thinking.budget_tokens,
        }
        return ChatRequest.model_construct(**asked)


class CountRequest(AskedConversation):
    """Body of `/v1/messages/count_tokens`."""

    model: str | None = None


class MessagesRequest(AskedConversation, GenerationRequest):
    """Body of `/v1/messages`."""

    model_config = ConfigDict(
        json_schema_extra={"dependentSchemas": RULES, "required": ["messages", "max_tokens"]}
    )

    stop_sequences: Stop | None = Field(None, description="this API's name of stop")
    service_tier: Ignored = None

    def chat_request(self) -> ChatRequest:
        """Return the chat request with the same meaning."""
        if self.n not in (None, 1):
            raise bad_request("n: a message is one; ask several times", "n", "not_built")
        if self.max_tokens is None:
            raise bad_request("max_tokens: field required", "max_tokens", "missing_field")
        common = {name: getattr(self, name) for name in GenerationRequest.model_fields}
        return self.chat(**{**common, "stop": self.stop_sequences or self.stop})


def _goes_on(last: Message) -> bool:
    return last.role == "assistant" and bool(last.content) and not last.tool_calls


def _chosen(choice: AnthropicChoice | None) -> str | NamedTool | None:
    if choice is None:
        return None
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if choice.name is None:
        raise bad_request("tool_choice.name: field required", "tool_choice.name", "missing_field")
    return named_tool(choice.name)


@dataclass(frozen=True, slots=True)
class MessagesEndpoint:
    """Handlers of the routes. Their requests become chat requests."""

    service: Service

    async def handle(self, request: Request) -> Response:
        return await handle_generation(
            self.service,
            request,
            MessagesRequest,
            self._task,
            lambda _body, head: AnthropicStream(head),
        )

    async def count(self, request: Request) -> Response:
        ready = self.service.require_ready()
        count = await self.service.bodies.use(
            request, CountRequest, ready, lambda body: self._count(body, ready)
        )
        return JSONResponse({"input_tokens": count}, headers=ignored_header(request))

    async def _task(self, body: MessagesRequest, ready: Ready, request: Request) -> GenerationTask:
        return await ChatEndpoint(self.service).task(body.chat_request(), ready, request)

    async def _count(self, body: CountRequest, ready: Ready) -> int:
        service = self.service
        service.require_model(body.model)
        text = await chat_text(service, service.tokenize_pool, body.chat())
        steps = text_ids(service.tokenizer, ready, text, False, "messages")
        return len(await service.tokenize_pool.steps(len(text), steps))


class AnthropicStream(MessageStream):
    """Writes one message."""

    def __init__(self, head: ResponseHead) -> None:
        super().__init__(head)
        self._arguments: list[str] = []
        """Arguments of the last block, where it is a call."""

    def opening(self) -> Iterator[Event]:
        message = {**self._message(), "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", {"message": message})

    def thinking(self, text: str) -> Iterator[Event]:
        yield from self._text("thinking", text, {"type": "thinking", "thinking": "", "signature": ""})

    def text(self, text: str, entry: Entry) -> Iterator[Event]:
        del entry
        yield from self._text("text", text, {"type": "text", "text": ""})

    def _text(self, kind: str, text: str, block: dict[str, object]) -> Iterator[Event]:
        if not self.is_open or self.blocks[-1]["type"] != kind:
            yield from self.end_block()
            yield self._begin(block)
        self.blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def begin_call(self, identifier: str, name: str) -> Iterator[Event]:
        yield self._begin({"type": "tool_use", "id": identifier, "name": name, "input": {}})

    def arguments(self, text: str) -> Iterator[Event]:
        self._arguments.append(text)
        yield self._delta({"type": "input_json_delta", "partial_json": text})

    def _begin(self, block: dict[str, object]) -> Event:
        self.blocks.append(block)
        self.is_open = True
        return _event("content_block_start", {**self._index(), "content_block": dict(block)})

    def _delta(self, delta: dict[str, object]) -> Event:
        return _event("content_block_delta", {**self._index(), "delta": delta})

    def end_block(self) -> Iterator[Event]:
        if not self.is_open:
            return
        self.is_open = False
        if self.blocks[-1]["type"] == "tool_use":
            self.blocks[-1]["input"] = arguments_object("".join(self._arguments))
            self._arguments.clear()
        yield _event("content_block_stop", self._index())

    def closing(self) -> Iterator[Event]:
        yield from self.end_block()
        yield _event("message_delta", {"delta": _stop(self.last), "usage": self._usage()})
        yield _event("message_stop", {})

    def whole(self) -> Mapping[str, object]:
        return {**self._message(), **_stop(self.last), "metrics": self.counts.figures}

    def failed(self, error: ApiError) -> Event:
        return "error", error.body()

    def _message(self) -> dict[str, object]:
        return {
            "id": f"msg_{self.head.name}",
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": list(self.blocks),
            "seed": self.head.seed,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, object]:
        return {
            "input_tokens": self.counts.prompt - self.counts.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.counts.cached,
            "output_tokens": self.counts.output,
        }

    def _index(self) -> dict[str, object]:
        return {"index": len(self.blocks) - 1}


def _event(kind: str, fields: Mapping[str, object]) -> Event:
    return kind, {"type": kind, **fields}


def _stop(entry: Entry) -> dict[str, object]:
    cause, reason = entry.get("stop_reason"), entry.get("finish_reason")
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    found = reasons.get(str(reason), "stop_sequence" if isinstance(cause, str) else "end_turn")
    return {"stop_reason": found, "stop_sequence": cause if found == "stop_sequence" else None}
