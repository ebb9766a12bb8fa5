"""`/v1/completions`: from a checked body to a task."""

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import Request, Response

from ssd_serve.base.messages import Ready
from ssd_serve.sampling.validation import output_limit
from ssd_serve.server.errors import bad_request
from ssd_serve.server.http.worker_pool import Steps
from ssd_serve.server.openai.grammar import grammar_of
from ssd_serve.server.openai.prompts import TokenPrompt, completion_prompts, prompt_count
from ssd_serve.server.openai.protocol import CompletionRequest
from ssd_serve.server.openai.serialize import CompletionSerializer
from ssd_serve.server.openai.stream import handle_generation
from ssd_serve.server.openai.tasks import (
    GenerationTask,
    check_streaming,
    given,
    plan_choices,
    response_head,
)
from ssd_serve.server.service import Service
from ssd_serve.server.text import token_units

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
        default = int(ready.sampling.get("max_tokens", DEFAULT_MAX_TOKENS))
        limits = [
            output_limit(body.max_tokens, default, len(prompt.ids), ready, "max_tokens") for prompt in prompts
        ]
        head = response_head(service, ready, body, request, "cmpl")
        plans = await plan_choices(
            service,
            ready,
            body,
            prompts,
            limits,
            head.seed,
            skip_special=skip_special,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if scored else body.prompt_logprobs,
            grammar=await grammar_of(service, body),
        )
        echoes: Sequence[tuple[str, Sequence[int]]] = [("", ())] * len(prompts)
        if body.echo:
            echoes = await self._echoes(prompts, skip_special, scored)
        scores = body.logprobs is not None
        serializer = CompletionSerializer(service.texts, body, scores, prompts, choices, echoes)
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
                stream, offsets, length = tokenizer.stream((), skip_special), list[int](), 0
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
