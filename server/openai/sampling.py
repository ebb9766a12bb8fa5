"""From request fields to the engine's sampling parameters, checked against the model. Knows no HTTP."""

from collections.abc import Collection, Sequence
from typing import TypeVar

from ssd_serve.messages import Ready, SamplingParameters
from ssd_serve.server.errors import bad_request
from ssd_serve.server.http.off_loop import Steps
from ssd_serve.server.openai.prompts import check_vocabulary, encode
from ssd_serve.server.openai.protocol import GenerationRequest
from ssd_serve.server.service import Service
from ssd_serve.server.text.output import TextRules
from ssd_serve.server.text.stops import StopStrings

Value = TypeVar("Value")


def given(value: Value | None, default: Value) -> Value:
    """`value`, or the default where it is null."""
    return default if value is None else value


BadWords = tuple[tuple[int, ...], ...]


async def bad_word_tokens(service: Service, words: Sequence[str] | None) -> BadWords:
    """The token sequences of bad words, as at the beginning of a text and as after a space.

    A sequence that ends with another one of the same word would ban nothing more, and is left out.
    """

    def work() -> Steps[BadWords]:
        found: dict[tuple[int, ...], None] = {}
        for word in words or ():
            text = word.lstrip()
            first = tuple(encode(service.tokenizer, text, False, "bad_words")) if text else ()
            if not first:
                raise bad_request(
                    "bad_words: a word has no tokens; leave it out", "bad_words", "invalid_value"
                )
            spaced = tuple(encode(service.tokenizer, " " + text, False, "bad_words"))
            found[first] = None
            if spaced[-len(first) :] != first:
                found[spaced] = None
            yield
        return tuple(found)

    return await service.off_loop.steps(2 * sum(map(len, words or ())), work())


def sampling_parameters(
    request: GenerationRequest,
    ready: Ready,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    bad_words: BadWords = (),
    ending: Collection[int] = (),
) -> SamplingParameters:
    """Everything that decides the tokens besides prompt and seed; `ending` are the ids that end a text."""
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
    allowed = request.allowed_token_ids
    if allowed is not None:
        check_vocabulary(allowed, ready, "allowed_token_ids")
        masked = {word[0] for word in bad_words if len(word) == 1} | (set(ending) if min_tokens else set())
        if masked.issuperset(allowed):
            raise bad_request(
                "allowed_token_ids: bad_words and min_tokens leave none of them",
                "allowed_token_ids",
                "invalid_value",
            )
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
        allowed_token_ids=None if allowed is None else tuple(allowed),
        bad_words=bad_words,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        stop_token_ids=tuple(stop_ids),
        ignore_eos=given(request.ignore_eos, False),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
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


async def text_rules(service: Service, request: GenerationRequest) -> TextRules:
    """What the server itself does with the tokens."""
    given_stops = () if request.stop is None else request.stop
    stops = (given_stops,) if isinstance(given_stops, str) else tuple(given_stops)
    ending = set(given(request.stop_token_ids, []))
    if not request.ignore_eos:
        ending.update(service.tokenizer.eos_ids)
    return TextRules(
        stops=await service.off_loop.run(4 * sum(map(len, stops)), lambda: StopStrings(stops)),
        include_stop=given(request.include_stop_str_in_output, False),
        min_tokens=given(request.min_tokens, 0),
        ending_tokens=frozenset(ending),
    )
