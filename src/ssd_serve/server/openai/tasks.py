"""A generation request from its checked body to its end: checks, choices, engine requests, usage and privacy.

Knows no shapes of responses.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec
from fastapi import Request

from ssd_serve.base.messages import Ready, ThinkingBudget
from ssd_serve.base.seeds import MASK64, choice_seed, random_seed
from ssd_serve.sampling.validation import (
    bad_word_sequences,
    check_vocabulary,
    engine_parameters,
    stop_token_set,
)
from ssd_serve.server.access.auth import tenant_of
from ssd_serve.server.engine.choice import ChoiceEnd, ChoicePlan
from ssd_serve.server.engine.generation import GenerationStream
from ssd_serve.server.errors import ApiError, bad_request
from ssd_serve.server.http.middleware import path_within, request_id
from ssd_serve.server.http.worker_pool import Steps
from ssd_serve.server.observability.timing import FinishedRequest, log_finished
from ssd_serve.server.openai.prompts import TokenPrompt
from ssd_serve.server.openai.protocol import GenerationRequest
from ssd_serve.server.openai.serialize import ChoiceSerializer, ResponseHead, ratio
from ssd_serve.server.service import Service
from ssd_serve.server.text import StopStrings, TextRules

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


def response_head(
    service: Service, ready: Ready, body: GenerationRequest, request: Request, kind: str
) -> ResponseHead:
    """Make the head of a response; its id begins with `kind`, and its seed is random unless one is given."""
    seed = random_seed() if body.seed is None else body.seed
    name = request_id(request, body.request_id)
    return ResponseHead.now(kind, name, service.model, service.fingerprint(ready), seed)


async def plan_choices(
    service: Service,
    ready: Ready,
    body: GenerationRequest,
    prompts: Sequence[TokenPrompt],
    limits: Sequence[int],
    seed: int,
    *,
    skip_special: bool,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: str,
    thinking_budget: ThinkingBudget | None = None,
) -> list[ChoicePlan]:
    """Check the fields of a body that all APIs have against the model, and plan the choices of all prompts.

    `limits` are the most output tokens of each prompt.
    """
    choices, stop, words = given(body.n, 1), body.stop or (), body.bad_words or ()
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    rules = TextRules(
        stops=await service.worker_pool.run(4 * sum(map(len, strings)), lambda: StopStrings(strings)),
        include_stop=bool(body.include_stop_str_in_output),
        min_tokens=body.min_tokens or 0,
        stop_token_set=stop_token_set(body.stop_token_ids, body.ignore_eos, service.tokenizer.eos_token_ids),
        empty=min(limits) == 0,
    )

    def bad_words() -> Steps[tuple[tuple[int, ...], ...]]:
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            found |= dict.fromkeys(bad_word_sequences(service.tokenizer, word))
            yield
        return tuple(found)

    common = engine_parameters(
        body,
        ready,
        max_tokens=min(limits),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        bad_words=await service.worker_pool.steps(2 * sum(map(len, words)), bad_words()),
        ending=rules.stop_token_set,
        grammar=grammar,
        thinking_budget=thinking_budget,
    )
    parameters = [msgspec.structs.replace(common, max_tokens=max(1, limit)) for limit in limits]
    all_limits = [limit for limit in limits for _ in range(choices)]
    generated = iter(await _generated_tokens(service, ready, body, all_limits))
    return [
        ChoicePlan(prompt.ids, each, choice_seed(seed & MASK64, i), rules, skip_special, next(generated))
        for prompt, each in zip(prompts, parameters, strict=True)
        for i in range(choices)
    ]


async def _generated_tokens(
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


class GenerationTask:
    """A checked request of one tenant. `plans` has all choices, those of a prompt in a row."""

    def __init__(
        self,
        service: Service,
        request: Request,
        body: GenerationRequest,
        head: ResponseHead,
        plans: Sequence[ChoicePlan],
        serializer: ChoiceSerializer,
    ) -> None:
        self.service = service
        self.request = request
        self.head = head
        self.plans = plans
        self.serializer = serializer
        self.tenant = tenant_of(request)
        self.streamed = bool(body.stream)
        self.traced = body.trace
        """The response has the number of tokens of each round, and details of the first choice's rounds."""
        options = body.stream_options
        self.final_usage = options is not None and bool(options.include_usage)
        self.continuous_usage = self.final_usage and bool(options and options.continuous_usage_stats)
        self.stream_figures = options is None or options.include_speculation is not False
        """The last chunk has the figures of speculation."""
        self.obfuscated = options is not None and bool(options.include_obfuscation)
        """Chunks are padded, so that their length does not reveal their text."""
        salt = service.tenants.salt(self.tenant, body.cache_salt)
        self._options = msgspec.structs.replace(body.options(), salt=salt)
        if not (self.streamed and self.reveals_cache):
            self._options = msgspec.structs.replace(self._options, return_progress=False)
        self._choices = body.n or 1

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; a prompt counts once, however many choices it has."""
        return sum(len(self.plans[first].prompt) for first in range(0, len(self.plans), self._choices))

    def charge(self) -> None:
        """Charge the tenant for tokens to prefill. Raises 429 where its limit is used up."""
        generated = sum(len(plan.generated) for plan in self.plans)
        self.tenant.begin_prompt(self.prompt_tokens + generated)

    @asynccontextmanager
    async def run(self) -> AsyncGenerator[GenerationStream, None]:
        """Run the choices; log and trace their end for any reason."""
        stream = GenerationStream(self.service, self.plans, self._options)
        try:
            async with stream:
                yield stream
        finally:
            if stream.courses:
                path, trace = path_within(self.request.scope), getattr(self.request.state, "trace", None)
                of = (path, self.tenant.name, self.prompt_tokens)
                log_finished(FinishedRequest(*of, stream.courses, stream.request_numbers), trace)

    @property
    def reveals_cache(self) -> bool:
        """True where cache hits may be reported: only the client's own prompts can have been cached, or the
        operator allows it."""
        return bool(self._options.salt) or self.service.settings.tell_cached_tokens

    def timings(self, tokens: int, ends: Mapping[int, ChoiceEnd]) -> dict[str, object]:
        """Return times under llama.cpp's names and ours; of several choices the slowest.

        `tokens` is the number of output tokens. Null: unknown, or it would reveal other users' prompts.
        """
        figures = [end.figures for end in ends.values()]
        firsts = [end.first_token_s for end in ends.values() if end.first_token_s is not None]
        prompt_s = max((each.prompt_s for each in figures), default=0.0)
        first_s = max(firsts, default=0.0)
        decoding_s = max((end.decoding_s for end in ends.values()), default=0.0)
        known = self.reveals_cache and bool(firsts) and prompt_s > 0
        return {
            "queue_ms": _ms(max(0.0, first_s - prompt_s)) if known else None,
            "prompt_n": self.prompt_tokens,
            "prompt_ms": _ms(prompt_s) if known else None,
            "prompt_per_second": ratio(self.prompt_tokens, prompt_s) if known else None,
            "first_token_ms": _ms(first_s) if firsts else None,
            "predicted_n": tokens,
            "predicted_ms": _ms(decoding_s),
            "predicted_per_second": ratio(tokens, decoding_s),
            "draft_n": sum(each.drafted for each in figures),
            "draft_n_accepted": sum(each.accepted for each in figures),
        }

    def usage(self, tokens: int, ends: Mapping[int, ChoiceEnd]) -> dict[str, object]:
        """Return the usage object after so many output tokens. `ends` has the choices that ended, by index."""
        cached = self.cached_tokens(ends)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
            "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
        }

    def cached_tokens(self, ends: Mapping[int, ChoiceEnd]) -> int | None:
        """Return prompt tokens found in the prefix cache; None where that is not reported."""
        if not self.reveals_cache:
            return None
        firsts = [first for first in range(0, len(self.plans), self._choices) if first in ends]
        # A resumed choice may have found some of its output in the cache too.
        return sum(
            min(ends[first].figures.cached_prompt_tokens, len(self.plans[first].prompt)) for first in firsts
        )


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
