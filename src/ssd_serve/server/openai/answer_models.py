"""What the server answers, as the OpenAPI document describes it.

Only described: the endpoints build plain dictionaries, because pieces of a stream are many. Tests hold every
answer against these, in both directions: nothing is sent that is not here.
"""

from typing import Annotated, Literal

from pydantic import Field

# pydantic wants this one before Python 3.12, and `NotRequired` is not in `typing` before 3.11.
from typing_extensions import NotRequired, TypedDict


class ErrorDetail(TypedDict):
    """What went wrong."""

    message: str
    type: str
    param: Annotated[str | None, Field(description="the field at fault")]
    code: str | None


class Error(TypedDict):
    """Every answer that is not a success, and the last event of a stream that broke off."""

    type: Literal["error"]
    error: ErrorDetail


class Tokens(TypedDict):
    """Answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class Text(TypedDict):
    """Answer of `/detokenize`."""

    prompt: str


class CachedTokens(TypedDict):
    """Where the prompt's tokens came from."""

    cached_tokens: Annotated[int, Field(ge=0)]


class Usage(TypedDict):
    """Tokens of the whole request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Annotated[
        CachedTokens | None, Field(description="null where it would tell what others have asked")
    ]


class SourceTokens(TypedDict):
    """Of the tokens that a draft source had proposed: how many were verified, and how many accepted."""

    num_draft_tokens: int
    num_accepted_draft_tokens: int


class Speculation(TypedDict):
    """How speculation went; null: there was nothing to divide by, or the engine was replaced meanwhile."""

    num_spec_steps: int
    num_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float | None
    num_draft_tokens: int | None
    draft_acceptance_rate: float | None
    acceptance_histogram: Annotated[
        list[int] | None, Field(description="rounds by how many drafted tokens they accepted: 0, 1, …")
    ]
    acceptance_by_depth: Annotated[
        list[float] | None,
        Field(
            description="of the rounds that verified a token at depth 1, 2, …, the share that accepted one"
        ),
    ]
    sources: Annotated[
        dict[str, SourceTokens] | None,
        Field(description="by draft source; a token that several had proposed counts for each of them"),
    ]
    cache_hits: int | None
    cache_misses: int | None
    cache_hit_rate: float | None
    mean_ready_depth: float | None
    mean_ready_nodes: float | None
    preemptions: int | None


class Metrics(TypedDict):
    """Figures of one request."""

    speculative_decoding: Speculation


FinishReason = Literal["stop", "length", "tool_calls"]


class RequestTimings(TypedDict):
    """Where the time went, by llama.cpp's names and ours; of several choices the slowest."""

    queue_ms: Annotated[
        float | None, Field(description="null: not known, or it would tell what others have asked")
    ]
    prompt_n: int
    prompt_ms: float | None
    prompt_per_second: float | None
    first_token_ms: Annotated[float | None, Field(description="null: no token came")]
    predicted_n: int
    predicted_ms: Annotated[float, Field(description="from the first tokens to the last")]
    predicted_per_second: float | None
    draft_n: Annotated[int, Field(description="guesses that were verified")]
    draft_n_accepted: int


class Ended(TypedDict):
    """How a choice ended; null while it goes on."""

    finish_reason: FinishReason | None
    stop_reason: Annotated[str | int | None, Field(description="the stop string or the token id that came")]
    rounds: NotRequired[Annotated[list[int], Field(description="tokens of each round, where it is traced")]]


class Head(TypedDict):
    """What every object of one answer begins with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Chunk(Head):
    """What every chunk of a stream may have; only the first one tells the seed."""

    seed: NotRequired[int]
    usage: NotRequired[Usage | None]
    metrics: NotRequired[Metrics]
    timings: NotRequired[RequestTimings]
    obfuscation: NotRequired[Annotated[str, Field(description="padding that was asked for")]]


class CompletionLogprobs(TypedDict):
    """A prompt's first token has no probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(TypedDict):
    """A token at a place of the prompt."""

    logprob: float
    rank: Annotated[
        int | None, Field(description="among the most probable ones; null: not one of those told")
    ]
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None],
    Field(description="by token id, where they were asked for; the first token has none"),
]


class CompletionChoice(Ended):
    """A choice, or a piece of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: NotRequired[PromptLogprobs]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class Completion(Head):
    """Answer of `/v1/completions`."""

    object: Literal["text_completion"]
    seed: int
    choices: list[CompletionChoice]
    usage: Usage
    metrics: Metrics
    timings: RequestTimings


class CompletionChunk(Chunk):
    """A chunk of its stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TokenLogprob(TypedDict):
    """A token and its probability; `bytes` is null for pieces of characters."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenLogprob(TokenLogprob):
    """The token that came, and the most probable ones."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """A token after the other."""

    content: list[ChosenLogprob]
    refusal: None


class CallFunction(TypedDict):
    """Which tool is called with what. A later piece of a stream has more of the arguments alone."""

    name: NotRequired[str]
    arguments: str


class AnswerCall(TypedDict):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CallFunction


class CallDelta(TypedDict):
    """A piece of a call; the first one tells its id and its name."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CallFunction


class AnswerMessage(TypedDict):
    """The assistant's message."""

    role: Literal["assistant"]
    content: Annotated[str | None, Field(description="null where tools are called without a word")]
    reasoning_content: NotRequired[Annotated[str, Field(description="what the model thought")]]
    tool_calls: NotRequired[list[AnswerCall]]
    refusal: None


class ChatChoice(Ended):
    """A choice."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    prompt_logprobs: NotRequired[PromptLogprobs]
    token_ids: NotRequired[list[int]]


class ChatCompletion(Head):
    """Answer of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    seed: int
    choices: list[ChatChoice]
    usage: Usage
    metrics: Metrics
    timings: RequestTimings
    prompt_token_ids: NotRequired[list[int]]


class Delta(TypedDict):
    """What a chunk adds to the message."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CallDelta]]


class ChunkChoice(Ended):
    """A piece of a choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    token_ids: NotRequired[list[int]]


class ChatChunk(Chunk):
    """A chunk of its stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    prompt_token_ids: NotRequired[list[int]]
