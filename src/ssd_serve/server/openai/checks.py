"""Checks of request fields that need the model, the tokenizer or other fields. Knows no HTTP."""

from collections.abc import Sequence
from typing import TypeVar

from ssd_serve.base.messages import Ready
from ssd_serve.sampling.validation import (
    TokenSequences,
    bad_word_sequences,
    check_vocabulary,
    stop_token_set,
)
from ssd_serve.server.errors import ApiError, bad_request
from ssd_serve.server.http.worker_pool import Steps
from ssd_serve.server.openai.protocol import GenerationRequest
from ssd_serve.server.service import Service
from ssd_serve.server.text.output import TextRules
from ssd_serve.server.text.stops import StopStrings

Value = TypeVar("Value")
_GENERATED = "generated_token_ids"


def given(value: Value | None, default: Value) -> Value:
    """Return `value`, or the default where it is null."""
    return default if value is None else value


def check_streaming(body: GenerationRequest) -> None:
    """Raise 400 for stream options without a stream, and for prompt log-probabilities in a stream."""
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options: only allowed with stream: true", "stream_options", "invalid_value")
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs: cannot be streamed", "prompt_logprobs", "not_built")


async def bad_word_tokens(service: Service, words: Sequence[str] | None) -> TokenSequences:
    """Return the token sequences of all bad words, each once."""

    def work() -> Steps[TokenSequences]:
        found: dict[tuple[int, ...], None] = {}
        for word in words or ():
            found |= dict.fromkeys(bad_word_sequences(service.tokenizer, word))
            yield
        return tuple(found)

    return await service.worker_pool.steps(2 * sum(map(len, words or ())), work())


async def text_rules(service: Service, body: GenerationRequest) -> TextRules:
    """Return the rules for the text that the server applies to tokens."""
    stop = body.stop or ()
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    return TextRules(
        stops=await service.worker_pool.run(4 * sum(map(len, strings)), lambda: StopStrings(strings)),
        include_stop=bool(body.include_stop_str_in_output),
        min_tokens=body.min_tokens or 0,
        stop_token_set=stop_token_set(body.stop_token_ids, body.ignore_eos, service.tokenizer.eos_ids),
    )


async def generated_tokens(
    service: Service, ready: Ready, body: GenerationRequest, limits: Sequence[int]
) -> Sequence[tuple[int, ...]]:
    """Return the output of an earlier response for each choice, over all prompts; empty for a new request.

    Shared noise lets a choice continue: a token follows from the seed and its position. `limits` are the
    most tokens of each choice.
    """
    generated = body.generated_token_ids
    if not generated:
        return [()] * len(limits)
    if body.seed is None:
        raise _wrong('needs the seed of the answer that they come from; its first chunk tells it ("seed")')
    if len(generated) != len(limits):
        raise _wrong(f"has {len(generated)} lists; the request has {len(limits)} choices, and each needs one")
    for ids, limit in zip(generated, limits, strict=True):
        if len(ids) > limit:
            raise _wrong(f"{len(ids)} tokens are more than the {limit} that the answer may have")

    def check() -> Steps[None]:
        for ids in generated:
            check_vocabulary(ids, ready, _GENERATED)
            yield

    await service.worker_pool.steps(sum(map(len, generated)), check())
    return generated


def _wrong(message: str) -> ApiError:
    return bad_request(f"{_GENERATED}: {message}", _GENERATED, "invalid_value")
