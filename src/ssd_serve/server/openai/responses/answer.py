"""What `/v1/responses` answers, as the OpenAPI document describes it."""

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from ssd_serve.server.openai.answer_models import Metrics

Told = dict[str, Any]


class InputDetails(TypedDict):
    """Of the prompt's tokens."""

    cached_tokens: Annotated[int, Field(description="0 too where it would tell what others have asked")]


class OutputDetails(TypedDict):
    """Of the answer's tokens."""

    reasoning_tokens: Annotated[int, Field(description="about so many were thoughts")]


class ResponseUsage(TypedDict):
    """Tokens of the whole request."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(TypedDict):
    """Why it broke off."""

    reason: Literal["max_output_tokens"]


class Answered(TypedDict):
    """A response. Its request's fields are repeated."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    background: Literal[False]
    error: None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: Told
    metrics: Metrics
    model: str
    output: Annotated[list[Told], Field(description="items: reasoning, message, function_call")]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: Told
    seed: int
    store: Literal[False]
    system_fingerprint: str
    temperature: float | None
    text: Told
    tool_choice: str | Told
    tools: list[Told]
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsage


class ResponseEvent(TypedDict, total=False):
    """An event of its stream; OpenAI's, by `type`."""

    type: str
    sequence_number: int
    response: Told
    output_index: int
    content_index: int
    item_id: str
    item: Told
    part: Told
    delta: str
    text: str
    name: str
    arguments: str
    logprobs: list[Told]
    code: str | None
    message: str
    param: str | None
    error: Told
