"""The bodies of `/v1/messages`, and the chat request that asks for the same."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, ConfigDict, Field

from ssd_serve.server.anthropic.blocks import AnthropicMessages, Texts, messages_of
from ssd_serve.server.errors import bad_request
from ssd_serve.server.limits import MAX_TOKEN_IDS, MAX_TOOLS
from ssd_serve.server.openai.fields import Ignored, Lenient, NotBuilt, Stop, ToolName, not_built
from ssd_serve.server.openai.output_formats import JsonOfSchema, NamedSchema, Schema
from ssd_serve.server.openai.protocol import (
    RULES,
    ChatRequest,
    Function,
    GenerationRequest,
    NamedFunction,
    NamedTool,
    Tool,
)


class AnthropicTool(Lenient):
    """A function; tools of other types would have to run here."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, object]
    strict: bool | None = None
    cache_control: object = None

    def tool(self) -> Tool:
        """As chat completions have it."""
        function = Function.model_construct(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool.model_construct(type="function", function=function)


class AnthropicChoice(Lenient):
    """Whether tools are called, or which."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Lenient):
    """Whether the model thinks first, for its chat template (`enable_thinking`)."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_IDS)] | None = Field(
        None, description="most tokens of thoughts, where they are enabled"
    )
    display: object = None


class OutputSchema(Lenient):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: Schema = Field(validation_alias=AliasChoices("schema"))


class OutputConfig(Lenient):
    """How the answer is made."""

    effort: Annotated[str, Field(pattern="^[a-z]{1,16}$")] | None = None
    format: OutputSchema | None = None


class AskedConversation(Lenient):
    """What both paths are asked of."""

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
        """The chat request that asks for the same, with what they have in `common`. Raises `ApiError` for
        what only that API has."""
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
        """The chat request that asks for the same."""
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
