"""The body of `/v1/responses`, and the chat request that asks for the same."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, ConfigDict, Discriminator, Field, Tag

from ssd_serve.server.errors import bad_request
from ssd_serve.server.limits import MAX_LABELS, MAX_TOOLS
from ssd_serve.server.openai.fields import Lenient, NotBuilt, Tokens, ToolName, by_type, not_built
from ssd_serve.server.openai.output_formats import (
    JsonObject,
    JsonOfSchema,
    NamedSchema,
    ResponseFormat,
    Schema,
    TextFormat,
)
from ssd_serve.server.openai.protocol import (
    RULES,
    ChatRequest,
    Function,
    GenerationRequest,
    Message,
    NamedFunction,
    NamedTool,
    Tool,
    TopLogprobs,
)
from ssd_serve.server.openai.responses.items import Items, messages_of

_LOGPROBS = "message.output_text.logprobs"


class FlatTool(Lenient):
    """A function; other tools would have to run here."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        """As chat completions have it."""
        function = Function.model_construct(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )
        return Tool.model_construct(type="function", function=function)


class FlatChoice(Lenient):
    """The function that must be called."""

    type: Literal["function"]
    name: ToolName


class FlatSchema(Lenient):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: Schema = Field(validation_alias=AliasChoices("schema"))
    strict: bool | None = None


class TextSettings(Lenient):
    """How the answer is written."""

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
    """How the model thinks."""

    effort: Annotated[str, Field(pattern="^[a-z]{1,16}$")] | None = None
    summary: Annotated[object, Field(description="thoughts are told as they are")] = None
    generate_summary: object = None


def _choice_of(value: object) -> str:
    return "<word>" if isinstance(value, str) else "<function>"


class ResponsesRequest(GenerationRequest):
    """Body of `/v1/responses`. Nothing is kept: a client sends the whole conversation."""

    model_config = ConfigDict(json_schema_extra={"dependentSchemas": RULES})

    input: Items
    instructions: str | None = Field(None, description="what the model is told first")
    max_output_tokens: Tokens | None = None
    tools: list[FlatTool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("<word>")]
            | Annotated[FlatChoice, Tag("<function>")],
            Discriminator(_choice_of),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    include: list[str] | None = Field(
        None, max_length=MAX_LABELS, description=f"{_LOGPROBS} is told; others are not there to be told"
    )
    top_logprobs: TopLogprobs | None = None
    store: bool | None = Field(None, description="accepted; nothing is kept")

    background: Annotated[object, not_built(False)] = None
    conversation: NotBuilt = None
    max_tool_calls: NotBuilt = None
    previous_response_id: NotBuilt = None
    prompt: NotBuilt = None
    service_tier: Annotated[object, not_built("auto", "default")] = None
    truncation: Annotated[object, not_built("disabled")] = None

    def chat(self) -> ChatRequest:
        """The chat request that asks for the same. Raises `ApiError` for what only that API has."""
        if self.n not in (None, 1):
            raise bad_request("n: a response is one; ask several times", "n", "not_built")
        common = {name: getattr(self, name) for name in GenerationRequest.model_fields}
        told = self.instructions
        system = [Message.model_construct(role="system", content=told)] if told else []
        messages = [*system, *messages_of(self.input)]
        if not messages:
            raise bad_request("input: says nothing", "input", "invalid_value")
        most = self.max_output_tokens
        asked: dict[str, Any] = {
            **common,
            "messages": messages,
            "max_tokens": self.max_tokens if most is None else most,
            "tools": None if self.tools is None else [each.tool() for each in self.tools],
            "tool_choice": self._tool_choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "response_format": self._format(),
            "logprobs": _LOGPROBS in (self.include or ()) or bool(self.top_logprobs),
            "top_logprobs": self.top_logprobs,
        }
        return ChatRequest.model_construct(**asked)

    def echo(self) -> Mapping[str, object]:
        """What an answer repeats."""
        asked = None if self.text is None else self.text.format
        form: dict[str, object] = {"type": "text"} if asked is None else asked.model_dump()
        if "json_schema" in form:
            form["schema"] = form.pop("json_schema")
        effort = None if self.reasoning is None else self.reasoning.effort
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
            "reasoning": {"effort": effort, "summary": None},
        }

    def _tool_choice(self) -> str | NamedTool | None:
        if not isinstance(self.tool_choice, FlatChoice):
            return self.tool_choice
        named = NamedFunction.model_construct(name=self.tool_choice.name)
        return NamedTool.model_construct(type="function", function=named)

    def _format(self) -> ResponseFormat | None:
        form = self.text.format if self.text is not None else None
        if not isinstance(form, FlatSchema):
            return form or self.response_format
        schema = NamedSchema.model_construct(name=form.name, json_schema=form.json_schema)
        return JsonOfSchema.model_construct(type="json_schema", json_schema=schema)
