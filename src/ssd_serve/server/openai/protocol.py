"""The request bodies of the OpenAI-compatible API.

Every field of the OpenAI API is listed: supported, ignored by definition, or refused as unsupported. Checks
that need the model (vocabulary, context) are elsewhere.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, ConfigDict, Field

from ssd_serve.base.messages import FixedShape, RequestOptions
from ssd_serve.sampling.validation import Choices, Seed, Temperature, range_field, with_number_fields
from ssd_serve.server.limits import MAX_GRAMMAR_CHARACTERS, MAX_MESSAGES, MAX_TOKEN_IDS, MAX_TOOLS
from ssd_serve.server.openai.conversation import Message, Tool, ToolChoice
from ssd_serve.server.openai.fields import (
    AllowedTokenIds,
    BadWords,
    CacheSalt,
    Label,
    Labels,
    Lenient,
    LogitBias,
    NotBuilt,
    Prompt,
    RequestName,
    SomeTokenIds,
    SpeculationOptions,
    Stop,
    StopTokenIds,
    TemplateVariables,
    TokenIds,
    Tokens,
    Truncation,
    not_built,
    only_where,
)
from ssd_serve.server.openai.formats import ResponseFormat, Schema, StructuredOutputs

TopLogprobs = Annotated[int, range_field("logprobs")]


class StreamOptions(Lenient):
    """Contents of a stream besides the text."""

    include_usage: bool | None = Field(None, description="a last chunk with the usage of the whole request")
    continuous_usage_stats: bool | None = Field(
        None, description="with include_usage: every chunk has the usage so far"
    )
    include_speculation: bool | None = Field(
        None, description="false: the last chunk has no speculation figures"
    )
    include_obfuscation: bool | None = Field(
        None, description="pad every chunk with random characters, to hide the length of its text; null: no"
    )


def _named(*names: str, description: str) -> Any:
    """Return a field with aliases of other servers; the first name is ours."""
    return Field(None, validation_alias=AliasChoices(*names), description=description)


_STREAMED = {"properties": {"stream": {"const": True}}, "required": ["stream"]}
_SEEDED = {"properties": {"seed": {"type": "integer"}}, "required": ["seed"]}
_FRESH: dict[str, object] = {"properties": {"generated_token_ids": {"enum": [None, []]}}}
RULES = {
    **only_where("stream_options", [None], _STREAMED),
    **only_where("generated_token_ids", [None, []], _SEEDED),
}
"""Rules of the OpenAPI document for fields that depend on each other; they are checked where used."""
_SCORED_OR_STREAMED = [
    {"properties": {"logprobs": {"enum": [None]}}},
    {"properties": {"stream": {"enum": [None, False]}}},
]


@with_number_fields
class GenerationRequest(Lenient):
    """Fields of all generation requests. Null means the default; aliases of fields are llama.cpp's."""

    long_lists: ClassVar[Mapping[str, int]] = {"generated_token_ids": 0}

    model: str | None = Field(None, description="the served model's id, which is also the default")
    stream: bool | None = Field(None, description="send the output as server-sent events, as it is generated")
    stream_options: StreamOptions | None = Field(None, description="contents of the stream")
    n: Choices | None = Field(None, description="choices for each prompt")
    seed: Seed | None = Field(None, description="null: random, and reported in the response")

    temperature: Temperature | None = Field(None, description="0: always the most probable token")
    top_k: Annotated[int, range_field("top_k")] | None = Field(None, description="0 or -1: off")
    top_p: Annotated[float, range_field("top_p")] | None = Field(
        None, description="sample among the most probable tokens that have this probability together"
    )
    min_p: Annotated[float, range_field("min_p")] | None = Field(
        None, description="sample among tokens with at least this share of the best token's probability"
    )
    repetition_penalty: Annotated[float, range_field("repetition_penalty")] | None = _named(
        "repetition_penalty",
        "repeat_penalty",
        description="divides positive logits of tokens of prompt and output, and multiplies negative ones",
    )
    presence_penalty: Annotated[float, range_field("presence_penalty")] | None = Field(
        None, description="is subtracted from the logits of tokens of the output"
    )
    frequency_penalty: Annotated[float, range_field("frequency_penalty")] | None = Field(
        None, description="is subtracted from a token's logit for each time that the output has it"
    )
    logit_bias: LogitBias | None = Field(None, description="is added to the logits, by token id")
    allowed_token_ids: AllowedTokenIds | None = Field(
        None, description="the only tokens that may be generated"
    )
    bad_words: BadWords | None = Field(None, description="texts that the output must not contain")

    min_tokens: Annotated[int, range_field("min_tokens")] | None = Field(
        None, description="output tokens before the output may end"
    )
    max_tokens: Tokens | None = _named(
        "max_tokens", "n_predict", description="most output tokens; -1: as many as fit; 0: none"
    )
    stop: Stop | None = Field(None, description="texts that end the output, which does not contain them")
    stop_token_ids: StopTokenIds | None = Field(None, description="tokens that end the output")
    include_stop_str_in_output: bool | None = Field(None, description="the output contains the stop text")
    ignore_eos: bool | None = Field(None, description="go on behind the model's end of text")

    response_format: ResponseFormat | None = Field(None, description="format of the output")
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's field of output formats")
    json_schema: Schema | None = Field(None, description="the output is JSON that matches this schema")
    grammar: Annotated[str, Field(max_length=MAX_GRAMMAR_CHARACTERS)] | None = Field(
        None, description="grammar of the output, in GBNF or llguidance's Lark"
    )

    generated_token_ids: list[SomeTokenIds] | None = Field(
        None,
        fail_fast=True,
        description="`token_ids` of each choice of an earlier response to this request, with the same seed, that broke "
        "off: the output continues behind them",
    )
    skip_special_tokens: bool | None = Field(
        None, description="leave special tokens out of the text; null: yes"
    )
    return_token_ids: bool | None = _named(
        "return_token_ids", "return_tokens", description="report the ids of prompt and output"
    )
    add_special_tokens: bool | None = Field(
        None, description="let the tokenizer add its begin token to a text"
    )

    request_id: RequestName | None = Field(
        None, description="id of the request, unless the header X-Request-Id has one"
    )
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(
        None, description="lower numbers are scheduled first (0)"
    )
    truncate_prompt_tokens: Truncation | None = Field(
        None,
        description="keep only so many of the prompt's last tokens; -1: as many as fit with the output",
    )
    prompt_logprobs: TopLogprobs | None = Field(
        None, description="report log-probabilities of each prompt token, and of so many other tokens"
    )
    speculation: SpeculationOptions | None = Field(None, description="limits of speculation")
    return_progress: bool | None = Field(
        None,
        description="streams of choices have `prompt_progress` after each chunk of the prompt but the last, where "
        "the number of cached tokens may be reported",
    )
    cache_salt: CacheSalt | None = Field(
        None,
        description="a secret: requests share the prefix cache only with requests of the same salt",
    )
    user: Label = None
    safety_identifier: Label = None
    metadata: Labels = None
    prompt_cache_key: Label = None

    guided_choice: NotBuilt = None
    guided_grammar: NotBuilt = None
    guided_json: NotBuilt = None
    guided_regex: NotBuilt = None
    kv_transfer_params: NotBuilt = None
    repetition_detection: NotBuilt = None
    vllm_xargs: NotBuilt = None
    length_penalty: Annotated[object, not_built(1, 1.0)] = None
    spaces_between_special_tokens: Annotated[object, not_built(True)] = None
    return_tokens_as_token_ids: Annotated[object, not_built(False)] = None
    use_beam_search: Annotated[object, not_built(False)] = None
    dry_multiplier: Annotated[object, not_built(0, 0.0)] = None
    dynatemp_range: Annotated[object, not_built(0, 0.0)] = None
    epsilon_cutoff: Annotated[object, not_built(0, 0.0)] = None
    eta_cutoff: Annotated[object, not_built(0, 0.0)] = None
    mirostat: Annotated[object, not_built(0)] = None
    tfs_z: Annotated[object, not_built(1, 1.0)] = None
    top_n_sigma: Annotated[object, not_built(-1, -1.0)] = None
    typical_p: Annotated[object, not_built(1, 1.0)] = None
    xtc_probability: Annotated[object, not_built(0, 0.0)] = None

    @property
    def max_nodes(self) -> int | None:
        """Most draft tokens of a round: the limit of `speculation`, 0 where its mode is off."""
        return None if self.speculation is None else self.speculation.most_nodes

    @property
    def shape(self) -> FixedShape | None:
        """Fixed shape of the draft tokens: that of `speculation`."""
        return None if self.speculation is None else self.speculation.fixed_shape

    @property
    def trace(self) -> bool:
        """True if details of each round are reported."""
        return self.speculation is not None and bool(self.speculation.trace)

    def as_chat(self, **fields: Any) -> "ChatRequest":
        """Return a chat request with the fields of all generation requests, and these."""
        common = {name: getattr(self, name) for name in GenerationRequest.model_fields}
        return ChatRequest.model_construct(**{**common, **fields})

    def options(self) -> RequestOptions:
        """Collect the attributes that are options of the engine; null means the default."""
        given = {name: getattr(self, name, None) for name in RequestOptions.__struct_fields__}
        return RequestOptions(**{name: value for name, value in given.items() if value is not None})


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`."""

    model_config = ConfigDict(
        json_schema_extra={
            "dependentSchemas": {
                **RULES,
                **only_where("echo", [None, False], {**_FRESH, "anyOf": _SCORED_OR_STREAMED}),
            }
        }
    )
    long_lists: ClassVar[Mapping[str, int]] = {"prompt": 1, "generated_token_ids": 0}

    prompt: Prompt = Field(description="a text, token ids, or a list of either")
    echo: bool | None = Field(None, description="begin the text with the prompt")
    logprobs: TopLogprobs | None = Field(None, description="how many of the most probable tokens to report")

    best_of: int | None = Field(
        None, ge=1, description="only as many as n: choosing among more is not supported"
    )

    messages: NotBuilt = None
    prompt_embeds: NotBuilt = None
    thinking_token_budget: NotBuilt = None
    suffix: Annotated[object, not_built("")] = None


class ChatRequest(GenerationRequest):
    """Body of `/v1/chat/completions`."""

    model_config = ConfigDict(
        json_schema_extra={
            "dependentSchemas": {
                **RULES,
                **only_where(
                    "top_logprobs",
                    [None, 0],
                    {"properties": {"logprobs": {"const": True}}, "required": ["logprobs"]},
                ),
            }
        }
    )
    messages: list[Message] = Field(
        min_length=1, max_length=MAX_MESSAGES, fail_fast=True, description="the conversation"
    )
    max_completion_tokens: Tokens | None = Field(None, description="newer name of max_tokens")
    logprobs: bool | None = Field(None, description="report log-probabilities of the output's tokens")
    top_logprobs: TopLogprobs | None = Field(None, description="and of so many most probable tokens")
    add_generation_prompt: bool | None = Field(
        None, description="the prompt ends with the beginning of an assistant's message; null: yes"
    )
    chat_template: str | None = Field(
        None, max_length=MAX_GRAMMAR_CHARACTERS, description="name of one of the model's chat templates"
    )
    chat_template_kwargs: TemplateVariables | None = Field(None, description="variables of the chat template")
    continue_final_message: bool | None = Field(None, description="the output continues the last message")
    tools: list[Tool] | None = Field(
        None, max_length=MAX_TOOLS, fail_fast=True, description="functions that the model may call"
    )
    tool_choice: ToolChoice | None = Field(
        None, description="auto: the model may call tools; required: it must; or the tool that it must call"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")
    reasoning_effort: Annotated[str, Field(pattern="^[a-z]{1,16}$")] | None = Field(
        None, description="for the model's chat template; any value but none sets enable_thinking"
    )
    include_reasoning: bool | None = Field(None, description="false: reasoning is left out")
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_TOKEN_IDS)] | None = Field(
        None,
        validation_alias=AliasChoices("thinking_token_budget", "thinking_budget", "reasoning_budget"),
        description="most thinking tokens; then the answer begins",
    )

    audio: NotBuilt = None
    documents: NotBuilt = None
    media_io_kwargs: NotBuilt = None
    mm_processor_kwargs: NotBuilt = None
    moderation: NotBuilt = None
    prediction: NotBuilt = None
    prompt: NotBuilt = None
    prompt_cache_options: NotBuilt = None
    prompt_cache_retention: NotBuilt = None
    verbosity: NotBuilt = None
    web_search_options: NotBuilt = None
    best_of: Annotated[object, not_built(1)] = None
    echo: Annotated[object, not_built(False)] = None
    function_call: Annotated[object, not_built("none")] = None
    functions: Annotated[object, not_built([])] = None
    modalities: Annotated[object, not_built(["text"])] = None
    service_tier: Annotated[object, not_built("auto", "default")] = None
    store: Annotated[object, not_built(False)] = None


class TokenizeRequest(Lenient):
    """Body of `/tokenize`: a text or a conversation."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"properties": {one: {"not": {"type": "null"}}, other: {"type": "null"}}, "required": [one]}
                for one, other in (("prompt", "messages"), ("messages", "prompt"))
            ]
        }
    )

    model: str | None = Field(None, description="the served model's id, which is also the default")
    prompt: str | None = Field(None, description="a text")
    messages: list[Message] | None = Field(
        None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True, description="or a conversation"
    )
    add_special_tokens: bool | None = Field(None, description="as in completions; for a conversation: no")
    add_generation_prompt: bool | None = Field(None, description="as in chats")
    chat_template_kwargs: TemplateVariables | None = Field(None, description="as in chats")
    continue_final_message: bool | None = Field(None, description="as in chats")
    return_token_strs: bool | None = Field(None, description="report the texts of the tokens, too")


class DetokenizeRequest(Lenient):
    """Body of `/detokenize`."""

    long_lists: ClassVar[Mapping[str, int]] = {"tokens": 1}

    model: str | None = Field(None, description="the served model's id, which is also the default")
    tokens: TokenIds = Field(description="token ids")
