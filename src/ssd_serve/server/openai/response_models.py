"""Types of responses for the OpenAPI document.

The endpoints build plain dictionaries, for speed. Tests hold every response against these types, and every
field that is sent is declared here.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

# pydantic wants this one before Python 3.12, and `NotRequired` is not in `typing` before 3.11.
from typing_extensions import NotRequired, TypedDict


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: Annotated[str | None, Field(description="the field at fault")]
    code: str | None


class Error(TypedDict):
    """The body of every response but a success, and the last event of a stream that failed."""

    type: Literal["error"]
    error: ErrorDetail


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class Text(TypedDict):
    prompt: str


class CachedTokens(TypedDict):
    cached_tokens: Annotated[int, Field(ge=0)]


class Usage(TypedDict):
    """Tokens of the whole request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Annotated[
        CachedTokens | None, Field(description="null where it would reveal other users' prompts")
    ]


class SourceTokens(TypedDict):
    """Verified and accepted tokens of one draft source."""

    num_draft_tokens: int
    num_accepted_draft_tokens: int


class Speculation(TypedDict):
    """Speculation figures; null: a division by zero, or the engine was replaced meanwhile."""

    num_spec_steps: int
    num_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float | None
    num_draft_tokens: int | None
    draft_acceptance_rate: float | None
    acceptance_histogram: Annotated[
        list[int] | None, Field(description="number of rounds by accepted draft tokens: 0, 1, …")
    ]
    acceptance_by_depth: Annotated[
        list[float] | None,
        Field(description="share of the rounds with a token at depth 1, 2, … that accepted one"),
    ]
    sources: Annotated[
        dict[str, SourceTokens] | None,
        Field(description="by draft source; a token of several sources counts for each"),
    ]
    cache_hits: int | None
    cache_misses: int | None
    cache_hit_rate: float | None
    mean_ready_depth: float | None
    mean_ready_nodes: float | None
    preemptions: int | None


class Metrics(TypedDict):
    speculative_decoding: Speculation


FinishReason = Literal["stop", "length", "tool_calls"]


class RequestTimings(TypedDict):
    """Times under llama.cpp's names and ours; of several choices the slowest."""

    queue_ms: Annotated[
        float | None, Field(description="null: unknown, or it would reveal other users' prompts")
    ]
    prompt_n: int
    prompt_ms: float | None
    prompt_per_second: float | None
    first_token_ms: Annotated[float | None, Field(description="null: no token came")]
    predicted_n: int
    predicted_ms: Annotated[float, Field(description="from the first tokens to the last")]
    predicted_per_second: float | None
    draft_n: Annotated[int, Field(description="verified draft tokens")]
    draft_n_accepted: int


class TraceNode(TypedDict):
    """A verified draft token."""

    token: Annotated[int | None, Field(description="null: it may come from other users' texts")]
    text: str | None
    parent: Annotated[int, Field(description="index of the node above; -1: the last token of the text")]
    depth: int
    sources: Annotated[list[str], Field(description="draft sources that proposed it")]
    logprob: Annotated[
        float | None, Field(description="the draft's estimate that the target chooses it; null: unknown")
    ]
    rank: Annotated[int | None, Field(description="0: the likeliest of its siblings; null: unknown")]


class TraceToken(TypedDict):
    token: int
    text: str


class TraceGrowth(TypedDict):
    """Expanded nodes of a draft source that arrived at the target."""

    at_ms: float
    source: str
    expansions: int


class TraceRound(TypedDict):
    """A round of the target; times count from the request's arrival at the target."""

    start_ms: float
    end_ms: float
    forward_start_ms: float
    forward_ms: float
    waited_ms: Annotated[float, Field(description="waiting for draft tokens")]
    context: Annotated[int, Field(description="tokens before those of the round")]
    nodes: list[TraceNode]
    nodes_left_out: int
    accepted: Annotated[list[int], Field(description="indices of the accepted nodes, in order")]
    bonus: Annotated[TraceToken, Field(description="the target's token after the accepted ones")]
    growth: list[TraceGrowth]
    cut: Annotated[bool, Field(description="later rounds are not traced, and this one without nodes")]


class Ended(TypedDict):
    """The end of a choice; null before it."""

    finish_reason: FinishReason | None
    stop_reason: Annotated[str | int | None, Field(description="the stop string or the stop token id")]
    rounds: NotRequired[
        Annotated[list[int], Field(description="number of tokens of each round, where traced")]
    ]
    trace: NotRequired[
        Annotated[list[TraceRound], Field(description="rounds of the first choice, where traced")]
    ]


class Head(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str


class Whole(Head):
    """Fields of every whole response of completions and chat completions."""

    seed: int
    usage: Usage
    metrics: Metrics
    timings: RequestTimings


class PromptProgress(TypedDict):
    processed: Annotated[int, Field(description="prompt tokens so far, with those of the prefix cache")]
    total: int
    cache: Annotated[int, Field(description="tokens found in the prefix cache")]
    time_ms: Annotated[int, Field(description="since the request left the queue")]


class Chunk(Head):
    """Fields of every chunk; only the first chunk has the seed."""

    seed: NotRequired[int]
    usage: NotRequired[Usage | None]
    metrics: NotRequired[Metrics]
    timings: NotRequired[RequestTimings]
    prompt_progress: NotRequired[PromptProgress]
    obfuscation: NotRequired[Annotated[str, Field(description="random padding, where requested")]]


class CompletionLogprobs(TypedDict):
    """Log-probabilities of tokens; a prompt's first token has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(TypedDict):
    """A token at a position of the prompt."""

    logprob: float
    rank: Annotated[
        int | None, Field(description="rank among the most probable tokens; null: not among those reported")
    ]
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None],
    Field(description="by token id, where requested; the first token has none"),
]


class CompletionChoice(Ended):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: NotRequired[PromptLogprobs]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class Completion(Whole):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionChunk(Chunk):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TokenLogprob(TypedDict):
    """A token and its log-probability; `bytes` is null for parts of characters."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenLogprob(TokenLogprob):
    """The chosen token, and the most probable tokens."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChosenLogprob]
    refusal: None


class CallFunction(TypedDict):
    """The called tool and its arguments. Later chunks have only more of the arguments."""

    name: NotRequired[str]
    arguments: str


class AnswerCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CallFunction


class CallDelta(TypedDict):
    """A part of a call; the first part has its id and its name."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CallFunction


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: Annotated[str | None, Field(description="null where tools are called without text")]
    reasoning_content: NotRequired[Annotated[str, Field(description="reasoning of the model")]]
    tool_calls: NotRequired[list[AnswerCall]]
    refusal: None


class ChatChoice(Ended):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    prompt_logprobs: NotRequired[PromptLogprobs]
    token_ids: NotRequired[list[int]]


class ChatCompletion(Whole):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: NotRequired[list[int]]


class Delta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CallDelta]]


class ChunkChoice(Ended):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    token_ids: NotRequired[list[int]]


class ChatChunk(Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    prompt_token_ids: NotRequired[list[int]]


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
