"""`/v1/completions`: from a checked body to a task."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from fastapi import Request, Response

from ssd_serve.base.messages import Ready
from ssd_serve.base.seeds import MASK64, choice_seed, random_seed
from ssd_serve.sampling.validation import engine_parameters, output_limit
from ssd_serve.server.engine.choice import ChoicePlan
from ssd_serve.server.errors import bad_request
from ssd_serve.server.http.middleware import request_id
from ssd_serve.server.http.worker_pool import Steps
from ssd_serve.server.openai.checks import (
    bad_word_tokens,
    check_streaming,
    generated_tokens,
    given,
    text_rules,
)
from ssd_serve.server.openai.grammar import grammar_of
from ssd_serve.server.openai.prompts import TokenPrompt, completion_prompts, prompt_count
from ssd_serve.server.openai.protocol import CompletionRequest
from ssd_serve.server.openai.serialize import CompletionSerializer, ResponseHead
from ssd_serve.server.openai.stream import handle_generation
from ssd_serve.server.openai.tasks import GenerationTask
from ssd_serve.server.service import Service
from ssd_serve.server.text.tokenizer import token_units

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions."""
_DECODED_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class CompletionsEndpoint:
    """Handler of the route."""

    service: Service

    async def handle(self, request: Request) -> Response:
        return await handle_generation(self.service, request, CompletionRequest, self.task)

    async def task(self, body: CompletionRequest, ready: Ready, request: Request) -> GenerationTask:
        """Check the body against the model, and plan its choices."""
        service = self.service
        service.require_model(body.model)
        scored = bool(body.echo) and body.logprobs is not None
        choices = given(body.n, 1)
        _check(body, scored, choices)
        service.require_room(prompt_count(body.prompt) * choices)
        prompts = await completion_prompts(service, ready, body, given(body.add_special_tokens, True))
        skip_special = given(body.skip_special_tokens, True)
        seed = random_seed() if body.seed is None else body.seed
        rules = await text_rules(service, body)
        default = int(ready.sampling.get("max_tokens", DEFAULT_MAX_TOKENS))
        limits = [
            output_limit(body.max_tokens, default, len(prompt.ids), ready, "max_tokens") for prompt in prompts
        ]
        common = engine_parameters(
            body,
            ready,
            max_tokens=min(limits),
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if scored else body.prompt_logprobs,
            bad_words=await bad_word_tokens(service, body.bad_words),
            ending=rules.stop_token_set,
            grammar=await grammar_of(service, body),
        )
        parameters = [msgspec.structs.replace(common, max_tokens=limit) for limit in limits]
        all_limits = [limit for limit in limits for _ in range(choices)]
        generated = iter(await generated_tokens(service, ready, body, all_limits))
        plans = [
            ChoicePlan(prompt.ids, each, choice_seed(seed & MASK64, i), rules, skip_special, next(generated))
            for prompt, each in zip(prompts, parameters, strict=True)
            for i in range(choices)
        ]
        echoes: Sequence[tuple[str, Sequence[int]]] = [("", ())] * len(prompts)
        serializer = CompletionSerializer(
            service.texts,
            prompts,
            choices,
            await self._echoes(prompts, skip_special, scored) if body.echo else echoes,
            logprobs=body.logprobs is not None,
            token_ids=bool(body.return_token_ids),
            prompt_logprobs=body.prompt_logprobs is not None,
        )
        name = request_id(request, body.request_id)
        head = ResponseHead.now("cmpl", name, service.model, service.fingerprint(ready), seed)
        return GenerationTask(service, request, body, head, plans, serializer)

    async def _echoes(
        self, prompts: Sequence[TokenPrompt], skip_special: bool, scored: bool
    ) -> list[tuple[str, Sequence[int]]]:
        """Return each prompt's text and, where it is scored, the offsets of its tokens."""
        tokenizer = self.service.tokenizer

        def work() -> Steps[list[tuple[str, Sequence[int]]]]:
            found: list[tuple[str, Sequence[int]]] = []
            for prompt in prompts:
                text = prompt.text
                if text is None:
                    text = tokenizer.decode(prompt.ids, skip_special_tokens=skip_special)
                stream, offsets, length = tokenizer.detokenizer((), skip_special), list[int](), 0
                for token in prompt.ids if scored else ():
                    offsets.append(length)
                    length += len(stream.push(token))
                    if len(offsets) % _DECODED_AT_ONCE == 0:
                        yield
                found.append((text, offsets))
                yield
            return found

        return await self.service.worker_pool.steps(
            token_units(len(prompt.ids) for prompt in prompts), work()
        )


def _check(body: CompletionRequest, scored: bool, choices: int) -> None:
    """Raise 400 for fields that do not go together. `scored`: the echoed prompt has log-probabilities."""
    check_streaming(body)
    if scored and body.stream:
        raise bad_request("echo: with logprobs it cannot be streamed", "echo", "not_built")
    if scored and body.prompt_logprobs is not None:
        raise bad_request(
            "prompt_logprobs: echo with logprobs tells them", "prompt_logprobs", "invalid_value"
        )
    if body.echo and body.generated_token_ids:
        raise bad_request("echo: not where an answer goes on", "echo", "invalid_value")
    if body.best_of is not None and body.best_of != choices:
        raise bad_request(
            "best_of: only as many as n; choosing among more is not built", "best_of", "not_built"
        )
