"""From request fields to the engine's sampling parameters, checked against the model. Knows no HTTP."""

from collections.abc import Collection
from typing import TypeVar

from ssd_serve.messages import Ready, SamplingParameters
from ssd_serve.server.errors import bad_request
from ssd_serve.server.prompts import check_vocabulary
from ssd_serve.server.protocol import GenerationRequest
from ssd_serve.server.text import TextRules

Value = TypeVar("Value")


def given(value: Value | None, default: Value) -> Value:
    """`value`, or the default where it is null."""
    return default if value is None else value


def sampling_parameters(
    request: GenerationRequest, ready: Ready, *, max_tokens: int, logprobs: int | None
) -> SamplingParameters:
    """Everything that decides the tokens besides prompt and seed."""
    min_tokens = given(request.min_tokens, 0)
    if min_tokens > max_tokens:
        raise bad_request(
            f"min_tokens: {min_tokens} is more than the {max_tokens} tokens that may be generated",
            "min_tokens",
            "invalid_value",
        )
    top_k = given(request.top_k, 0)
    bias = given(request.logit_bias, {})
    check_vocabulary(list(bias), ready, "logit_bias")
    stop_ids = given(request.stop_token_ids, [])
    check_vocabulary(stop_ids, ready, "stop_token_ids")
    return SamplingParameters(
        temperature=given(request.temperature, 1.0),
        # All of the vocabulary is no restriction.
        top_k=top_k if 0 < top_k < ready.vocabulary else 0,
        top_p=given(request.top_p, 1.0),
        min_p=given(request.min_p, 0.0),
        repetition_penalty=given(request.repetition_penalty, 1.0),
        presence_penalty=given(request.presence_penalty, 0.0),
        frequency_penalty=given(request.frequency_penalty, 0.0),
        logit_bias=bias,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        stop_token_ids=tuple(stop_ids),
        ignore_eos=given(request.ignore_eos, False),
        logprobs=logprobs,
    )


def output_limit(asked: int | None, default: int, prompt_tokens: int, ready: Ready, param: str) -> int:
    """How many tokens may be generated: as asked, if that fits, else the default or what is left."""
    left = ready.context - prompt_tokens
    if asked is None:
        return min(default, left)
    if asked > left:
        raise bad_request(
            f"{param}: {asked} output tokens and {prompt_tokens} prompt tokens are {asked + prompt_tokens}; "
            f"the model's context is {ready.context}",
            param,
            "context_length_exceeded",
        )
    return asked


def text_rules(request: GenerationRequest, eos_ids: Collection[int]) -> TextRules:
    """What the server itself does with the tokens."""
    stops = () if request.stop is None else request.stop
    ending = set(given(request.stop_token_ids, []))
    if not request.ignore_eos:
        ending.update(eos_ids)
    return TextRules(
        stops=(stops,) if isinstance(stops, str) else tuple(stops),
        include_stop=given(request.include_stop_str_in_output, False),
        min_tokens=given(request.min_tokens, 0),
        ending_tokens=frozenset(ending),
    )
