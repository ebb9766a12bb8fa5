"""The body of `/v1/responses`, and the chat request with the same meaning."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from ssd_serve.server.errors import bad_request
from ssd_serve.server.limits import MAX_LABELS, MAX_MESSAGES, MAX_TOOLS
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
    Lenient,
    Media,
    NotBuilt,
    RefusalPart,
    Tokens,
    by_type,
    not_built,
    text_of_parts,
    text_or_list,
)
from ssd_serve.server.openai.formats import JsonObject, NamedSchema, TextFormat
from ssd_serve.server.openai.protocol import RULES, ChatRequest, GenerationRequest, TopLogprobs

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
