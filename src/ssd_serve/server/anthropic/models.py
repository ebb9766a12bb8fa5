"""The bodies of `/v1/messages`: content blocks, and the chat request with the same meaning."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, ConfigDict, Field, Tag
from typing_extensions import TypedDict

from ssd_serve.server.errors import bad_request
from ssd_serve.server.limits import MAX_MESSAGES, MAX_TOKEN_IDS, MAX_TOOLS
from ssd_serve.server.openai.fields import (
    Ignored,
    JsonOfSchema,
    Lenient,
    NamedSchema,
    NotBuilt,
    Schema,
    Stop,
    ToolName,
    by_type,
    not_built,
    text_or_list,
)
from ssd_serve.server.openai.protocol import (
    RULES,
    CalledFunction,
    ChatRequest,
    Function,
    GenerationRequest,
    Message,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
    model_message,
)
from ssd_serve.server.openai.response_models import Metrics


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
    name: ToolName
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
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    by_type("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
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
        ToolCall.model_construct(
            id=block.id,
            function=CalledFunction.model_construct(name=block.name, arguments=json.dumps(block.input)),
        )
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


class AnthropicTool(Lenient):
    """A function; the tools that Anthropic runs itself are not supported."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, object]
    strict: bool | None = None
    cache_control: object = None

    def tool(self) -> Tool:
        function = Function.model_construct(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool.model_construct(type="function", function=function)


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
        config, choice = self.output_config, self.tool_choice
        form = self.output_format or (None if config is None else config.format)
        if form is not None:
            schema = NamedSchema.model_construct(json_schema=form.json_schema)
            common["response_format"] = JsonOfSchema.model_construct(type="json_schema", json_schema=schema)
        goes_on = messages[-1].role == "assistant" and not messages[-1].tool_calls
        asked: dict[str, Any] = {
            **common,
            "messages": messages,
            "tools": None if self.tools is None else [each.tool() for each in self.tools],
            "tool_choice": _chosen(choice),
            "parallel_tool_calls": choice is None or not choice.disable_parallel_tool_use,
            "continue_final_message": goes_on or None,
            "reasoning_effort": None if config is None else config.effort,
            "chat_template_kwargs": _thinks(self.thinking),
            "thinking_token_budget": None if self.thinking is None else self.thinking.budget_tokens,
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

    stop_sequences: Stop | None = None
    service_tier: Ignored = None

    def chat_request(self) -> ChatRequest:
        """Return the chat request with the same meaning."""
        if self.n not in (None, 1):
            raise bad_request("n: a message is one; ask several times", "n", "not_built")
        if self.max_tokens is None:
            raise bad_request("max_tokens: field required", "max_tokens", "missing_field")
        common = {name: getattr(self, name) for name in GenerationRequest.model_fields}
        return self.chat(**{**common, "stop": self.stop_sequences or self.stop})


def _chosen(choice: AnthropicChoice | None) -> str | NamedTool | None:
    if choice is None:
        return None
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if choice.name is None:
        raise bad_request("tool_choice.name: field required", "tool_choice.name", "missing_field")
    named = NamedFunction.model_construct(name=choice.name)
    return NamedTool.model_construct(type="function", function=named)


def _thinks(thinking: Thinking | None) -> dict[str, Any] | None:
    if thinking is None or thinking.type == "adaptive":
        return None
    return {"enable_thinking": thinking.type == "enabled"}


Object = dict[str, Any]


class MessageUsage(TypedDict):
    input_tokens: Annotated[int, Field(description="without cached tokens")]
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnsweredMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: Annotated[list[Object], Field(description="blocks: thinking, text, tool_use")]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
    metrics: Metrics
    seed: int


class MessageEvent(TypedDict, total=False):
    """An event of the stream; its `type` is one of Anthropic's."""

    type: str
    message: Object
    index: int
    content_block: Object
    delta: Object
    usage: MessageUsage
    error: Object


class CountedTokens(TypedDict):
    """Response of `/v1/messages/count_tokens`."""

    input_tokens: int
