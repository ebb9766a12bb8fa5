"""What `/v1/messages` answers, as the OpenAPI document describes it."""

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from ssd_serve.server.openai.answer_models import Metrics

Told = dict[str, Any]


class MessageUsage(TypedDict):
    """Tokens of the whole request."""

    input_tokens: Annotated[int, Field(description="but for those that were cached")]
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnsweredMessage(TypedDict):
    """A message of the model."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: Annotated[list[Told], Field(description="blocks: thinking, text, tool_use")]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
    metrics: Metrics
    seed: int


class MessageEvent(TypedDict, total=False):
    """An event of its stream; Anthropic's, by `type`."""

    type: str
    message: Told
    index: int
    content_block: Told
    delta: Told
    usage: MessageUsage
    error: Told


class CountedTokens(TypedDict):
    """Answer of `/v1/messages/count_tokens`."""

    input_tokens: int
