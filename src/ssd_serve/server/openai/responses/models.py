"""The body of `/v1/responses`: its input items, and the chat request with the same meaning."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, AliasChoices, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from ssd_serve.server.errors import bad_request
from ssd_serve.server.limits import MAX_LABELS, MAX_MESSAGES, MAX_TOOLS
from ssd_serve.server.openai.fields import (
    JsonObject,
    JsonOfSchema,
    Lenient,
    NamedSchema,
    NotBuilt,
    ResponseFormat,
    Schema,
    TextFormat,
    Tokens,
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
    TopLogprobs,
    model_message,
)
from ssd_serve.server.openai.response_models import Metrics

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


Texts = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[InputText], Field(fail_fast=True, max_length=1024), Tag("<list>")],
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
    answer = _ModelMessage()
    for item in items:
        if isinstance(item, Reasoning):
            answer.thoughts += [part.text for part in item.content or item.summary or ()]
        elif isinstance(item, FunctionCall):
            function = CalledFunction.model_construct(name=item.name, arguments=item.arguments)
            answer.calls.append(ToolCall.model_construct(id=item.call_id, function=function))
        elif isinstance(item, InputMessage) and item.role == "assistant":
            found += answer.take() if answer.calls else ()
            answer.words.append(text_of(item.content))
        else:
            found += answer.take()
            found.append(_other(item))
    return [*found, *answer.take()]


def text_of(texts: str | list[InputText]) -> str:
    return texts if isinstance(texts, str) else "".join(part.text for part in texts)


def _other(item: InputMessage | FunctionCallOutput) -> Message:
    if isinstance(item, FunctionCallOutput):
        return Message.model_construct(role="tool", content=text_of(item.output), tool_call_id=item.call_id)
    return Message.model_construct(role=item.role, content=text_of(item.content))


class _ModelMessage:
    """A message of the model, from successive items."""

    def __init__(self) -> None:
        self.thoughts: list[str] = []
        self.words: list[str] = []
        self.calls: list[ToolCall] = []

    def take(self) -> list[Message]:
        """Return the message unless it is empty, and begin the next one."""
        if not (self.thoughts or self.words or self.calls):
            return []
        message = model_message("".join(self.words), "".join(self.thoughts), self.calls)
        self.thoughts, self.words, self.calls = [], [], []
        return [message]


class FlatTool(Lenient):
    """A function; the tools that OpenAI runs itself are not supported."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
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

    input: Items
    instructions: str | None = Field(None, description="the system prompt")
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
        None, max_length=MAX_LABELS, description=f"{_LOGPROBS} is supported; other values are ignored"
    )
    top_logprobs: TopLogprobs | None = None
    store: bool | None = Field(None, description="accepted; nothing is stored")

    background: Annotated[object, not_built(False)] = None
    conversation: NotBuilt = None
    max_tool_calls: NotBuilt = None
    previous_response_id: NotBuilt = None
    prompt: NotBuilt = None
    service_tier: Annotated[object, not_built("auto", "default")] = None
    truncation: Annotated[object, not_built("disabled")] = None

    def chat(self) -> ChatRequest:
        """Return the chat request with the same meaning. Raises `ApiError` for what only this API has."""
        if self.n not in (None, 1):
            raise bad_request("n: a response is one; ask several times", "n", "not_built")
        common = {name: getattr(self, name) for name in GenerationRequest.model_fields}
        text = self.instructions
        system = [Message.model_construct(role="system", content=text)] if text else []
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
        """Return the fields that a response repeats."""
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


Object = dict[str, Any]


class InputDetails(TypedDict):
    cached_tokens: Annotated[int, Field(description="0 also where it would reveal other users' prompts")]


class OutputDetails(TypedDict):
    reasoning_tokens: Annotated[int, Field(description="approximate number of reasoning tokens")]


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(TypedDict):
    reason: Literal["max_output_tokens"]


class Answered(TypedDict):
    """A response, with the fields of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    background: Literal[False]
    error: None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: Object
    metrics: Metrics
    model: str
    output: Annotated[list[Object], Field(description="items: reasoning, message, function_call")]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: Object
    seed: int
    store: Literal[False]
    system_fingerprint: str
    temperature: float | None
    text: Object
    tool_choice: str | Object
    tools: list[Object]
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsage


class ResponseEvent(TypedDict, total=False):
    """An event of the stream; its `type` is one of OpenAI's."""

    type: str
    sequence_number: int
    response: Object
    output_index: int
    content_index: int
    item_id: str
    item: Object
    part: Object
    delta: str
    text: str
    name: str
    arguments: str
    logprobs: list[Object]
    code: str | None
    message: str
    param: str | None
    error: Object
