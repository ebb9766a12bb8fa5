"""Messages, tools and calls of conversations: what requests hold, and what other APIs and answers are turned into."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from ssd_serve.server.limits import MAX_TOOLS
from ssd_serve.server.openai.fields import Content, Lenient, NotBuilt, ToolName, not_built, text_of_parts
from ssd_serve.server.openai.formats import JsonOfSchema, NamedSchema


class CalledFunction(Lenient):
    """The called function, and the JSON text of its arguments."""

    name: str
    arguments: str


class ToolCall(Lenient):
    """A call of an earlier response."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class NamedFunction(Lenient):
    name: ToolName


class FunctionFields(NamedFunction):
    """Fields of a function in every API."""

    description: str | None = None
    strict: bool | None = Field(None, description="calls always match the parameters")


class Function(FunctionFields):
    """A function for the model. `parameters` is a JSON schema."""

    parameters: dict[str, object] | None = None


class NamedTool(Lenient):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


def _choice_of(value: object) -> str:
    return "<tool>" if isinstance(value, dict | NamedTool) else "<word>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")] | Annotated[NamedTool, Tag("<tool>")],
    Discriminator(_choice_of),
]


class Tool(Lenient):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class Message(Lenient):
    """A message of a conversation. Other fields are for the model's chat template."""

    passes_on: ClassVar[bool] = True

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = Field(None, description="null only of assistants and tools: an empty text")
    name: str | None = Field(None, max_length=256)

    tool_call_id: str | None = Field(None, description="of a tool's message: the call that it answers")
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)

    audio: NotBuilt = None
    function_call: NotBuilt = None
    refusal: str | None = Field(None, description="text of an assistant that has no content")
    annotations: Annotated[object, not_built([])] = None

    def template_entry(self) -> dict[str, object]:
        """Return the message for chat templates: content as one string, and the client's other fields."""
        content = self.content or self.refusal or ""
        text = content if isinstance(content, str) else text_of_parts(content)
        role = "system" if self.role == "developer" else self.role
        entry: dict[str, object] = {**(self.model_extra or {}), "role": role, "content": text}
        if self.name is not None:
            entry["name"] = self.name
        if self.tool_call_id is not None:
            entry["tool_call_id"] = self.tool_call_id
        return entry


def model_message(text: str, thinking: str, calls: Sequence[ToolCall]) -> Message:
    """Return a message of the model, with its reasoning for chat templates."""
    fields: dict[str, Any] = {"role": "assistant", "content": text, "tool_calls": list(calls) or None}
    if thinking:
        fields["reasoning_content"] = thinking
    return Message.model_construct(**fields)


def tool_call(identifier: str, name: str, arguments: str) -> ToolCall:
    """Return a call of an earlier response; its arguments are JSON text."""
    function = CalledFunction.model_construct(name=name, arguments=arguments)
    return ToolCall.model_construct(id=identifier, function=function)


def function_tool(function: FunctionFields, parameters: dict[str, object] | None) -> Tool:
    """Return the tool with the name, the description and the strictness of a function of another API."""
    return Tool.model_construct(
        type="function",
        function=Function.model_construct(
            name=function.name,
            description=function.description,
            parameters=parameters,
            strict=function.strict,
        ),
    )


def named_tool(name: str) -> NamedTool:
    """Return the choice of one tool."""
    return NamedTool.model_construct(type="function", function=NamedFunction.model_construct(name=name))


def json_format(schema: dict[str, object]) -> JsonOfSchema:
    """Return the format of JSON that matches a schema."""
    return JsonOfSchema.model_construct(
        type="json_schema", json_schema=NamedSchema.model_construct(json_schema=schema)
    )
