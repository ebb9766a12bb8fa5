"""`/v1/completions`: from its body to a job, and how it writes choices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from fastapi import Request, Response

from ssd_serve.sampling.validation import engine_parameters, output_limit
from ssd_serve.base.seeds import MASK64, choice_seed, random_seed
from ssd_serve.server.engine.choice import ChoiceOutput, ChoiceDelta, ChoicePlan, ChoiceEnd
from ssd_serve.server.engine.continuation import generated_tokens
from ssd_serve.server.errors import bad_request
from ssd_serve.server.http.worker_pool import Steps
from ssd_serve.server.openai.answers import AnswerShape, Job
from ssd_serve.server.openai.endpoint import checked_run_answered
from ssd_serve.server.openai.prompts import TokenPrompt, completion_prompts, prompt_count, token_units
from ssd_serve.server.openai.protocol import CompletionRequest, GenerationRequest, StreamOptions
from ssd_serve.server.openai.replies import (
    ResponseHead,
    completion_logprobs,
    prompt_logprobs,
    written_in_steps,
)
from ssd_serve.server.openai.sampling import bad_word_tokens, given, text_rules
from ssd_serve.server.openai.structured import grammar_of
from ssd_serve.server.service import Service
from ssd_serve.server.text.tokenizer import TokenTexts

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions."""
_DECODED_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Echo:
    """What of a prompt stands before its output. `offsets` are where its tokens begin, if they are told."""

    text: str = ""
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """Choices as `/v1/completions` writes them."""

    texts: TokenTexts
    prompts: Sequence[TokenPrompt]
    choices: int
    echoes: Sequence[Echo]
    """Of each prompt."""
    logprobs: bool
    token_ids: bool
    prompt_logprobs: bool = False
    whole_kind: str = "text_completion"
    chunk_kind: str = "text_completion"

    def opening(self, choice: int) -> dict[str, object] | None:
        """The echoed prompt, or an empty text that only opens the stream."""
        prompt = choice // self.choices
        text = self.echoes[prompt].text
        if choice > 0 and not text and not self.token_ids:
            return None
        return {**self._entry(choice, text, None, None), **self._prompt_ids(prompt)}

    def part(self, piece: ChoiceDelta) -> dict[str, object] | None:
        """One piece."""
        if not (piece.text or piece.end or (piece.tokens and (self.logprobs or self.token_ids))):
            return None
        details = self._logprobs(piece.choice, piece) if self.logprobs and piece.tokens else None
        entry = self._entry(piece.choice, piece.text, details, piece.end)
        return {**entry, "token_ids": list(piece.tokens)} if self.token_ids else entry

    def whole(self, choice: int, output: ChoiceOutput) -> Steps[dict[str, object]]:
        """A whole choice."""
        prompt = choice // self.choices
        details = (yield from self._all_logprobs(prompt, output)) if self.logprobs else None
        entry = self._entry(choice, self.echoes[prompt].text + output.text, details, output.end)
        if self.prompt_logprobs:
            ids = self.prompts[prompt].ids
            entry["prompt_logprobs"] = yield from prompt_logprobs(self.texts, ids, output.prompt_logprobs)
        return (
            {**entry, "token_ids": list(output.tokens), **self._prompt_ids(prompt)}
            if self.token_ids
            else entry
        )

    def extra(self) -> dict[str, object]:
        """Nothing more."""
        return {}

    def _entry(
        self, choice: int, text: str, details: dict[str, object] | None, ending: ChoiceEnd | None
    ) -> dict[str, object]:
        return {
            "index": choice,
            "text": text,
            "logprobs": details,
            "finish_reason": ending.reason if ending else None,
            "stop_reason": ending.cause if ending else None,
        }

    def _logprobs(self, choice: int, piece: ChoiceDelta) -> dict[str, object]:
        before = len(self.echoes[choice // self.choices].text)
        offsets = [before + offset for offset in piece.offsets]
        return completion_logprobs(self.texts, piece.tokens, piece.logprobs, offsets)

    def _all_logprobs(self, prompt: int, output: ChoiceOutput) -> Steps[dict[str, object]]:
        """Of the output, and before it of the prompt where that is told."""
        echo = self.echoes[prompt]
        told = bool(echo.offsets)
        tokens = [*(self.prompts[prompt].ids if told else ()), *output.tokens]
        entries = [*((None, *output.prompt_logprobs) if told else ()), *output.logprobs]
        offsets = [*echo.offsets, *(len(echo.text) + offset for offset in output.offsets)]
        return written_in_steps(
            len(tokens),
            lambda some: completion_logprobs(self.texts, tokens[some], entries[some], offsets[some]),
        )

    def _prompt_ids(self, prompt: int) -> dict[str, object]:
        return {"prompt_token_ids": list(self.prompts[prompt].ids)} if self.token_ids else {}


@dataclass(frozen=True, slots=True)
class CompletionsEndpoint:
    """Handles the route."""

    service: Service

    async def handle(self, request: Request) -> Response:
        """Check, run, answer."""
        return await checked_run_answered(self.service, request, CompletionRequest, self.job)

    async def job(self, body: CompletionRequest, name: str) -> Job:
        """Check the body against the model and plan its choices."""
        service = self.service
        service.require_model(body.model)
        ready = service.require_ready()
        check_stream_options(body)
        scored = bool(body.echo) and body.logprobs is not None
        if scored and body.stream:
            raise bad_request("echo: with logprobs it cannot be streamed", "echo", "not_built")
        if scored and body.prompt_logprobs is not None:
            raise bad_request(
                "prompt_logprobs: echo with logprobs tells them", "prompt_logprobs", "invalid_value"
            )
        check_prompt_logprobs(body)
        if body.echo and body.generated_token_ids:
            raise bad_request("echo: not where an answer goes on", "echo", "invalid_value")
        choices = given(body.n, 1)
        if body.best_of is not None and body.best_of != choices:
            raise bad_request(
                "best_of: only as many as n; choosing among more is not built", "best_of", "not_built"
            )
        service.require_room(prompt_count(body.prompt) * choices)
        prompts = await completion_prompts(service, ready, body, given(body.add_special_tokens, True))
        skip_special = given(body.skip_special_tokens, True)
        seed = random_seed() if body.seed is None else body.seed
        rules = await text_rules(service, body)
        banned = await bad_word_tokens(service, body.bad_words)
        usual = int(ready.sampling.get("max_tokens", DEFAULT_MAX_TOKENS))
        limits = [
            output_limit(body.max_tokens, usual, len(prompt.ids), ready, "max_tokens") for prompt in prompts
        ]
        common = engine_parameters(
            body,
            ready,
            max_tokens=min(limits),
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if scored else body.prompt_logprobs,
            bad_words=banned,
            ending=rules.stop_token_set,
            grammar=await grammar_of(service, body),
        )
        asked = [msgspec.structs.replace(common, max_tokens=limit) for limit in limits]
        had = iter(
            await generated_tokens(service, ready, body, [each for each in limits for _ in range(choices)])
        )
        plans = [
            ChoicePlan(prompt.ids, parameters, choice_seed(seed & MASK64, i), rules, skip_special, next(had))
            for prompt, parameters in zip(prompts, asked, strict=True)
            for i in range(choices)
        ]
        shape = CompletionShape(
            texts=service.texts,
            prompts=prompts,
            choices=choices,
            echoes=await self._echoes(prompts, skip_special, scored)
            if body.echo
            else [Echo()] * len(prompts),
            logprobs=body.logprobs is not None,
            token_ids=given(body.return_token_ids, False),
            prompt_logprobs=body.prompt_logprobs is not None,
        )
        head = ResponseHead.now("cmpl", name, service.model, service.fingerprint(ready), seed)
        return job_of(body, head, plans, shape)

    async def _echoes(self, prompts: Sequence[TokenPrompt], skip_special: bool, scored: bool) -> list[Echo]:
        tokenizer = self.service.tokenizer

        def work() -> Steps[list[Echo]]:
            found: list[Echo] = []
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
                found.append(Echo(text, tuple(offsets)))
                yield
            return found

        return await self.service.worker_pool.steps(token_units(len(prompt.ids) for prompt in prompts), work())


def check_stream_options(body: GenerationRequest) -> None:
    """400 for stream options of a request that does not stream."""
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options: only allowed with stream: true", "stream_options", "invalid_value")


def check_prompt_logprobs(body: GenerationRequest) -> None:
    """400 for figures of a prompt that a stream would have to tell."""
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs: cannot be streamed", "prompt_logprobs", "not_built")


def job_of(
    body: GenerationRequest, head: ResponseHead, plans: Sequence[ChoicePlan], shape: AnswerShape
) -> Job:
    """A checked request with what all of them have in common."""
    options, guessing = body.stream_options, body.speculation
    padded = options is not None and bool(options.include_obfuscation)
    return Job(
        head,
        plans,
        given(body.n, 1),
        shape,
        given(body.stream, False),
        _usage_wanted(options),
        body.cache_salt,
        padded,
        body.options(),
        guessing is not None and bool(guessing.trace),
        options is None or options.include_speculation is not False,
    )


def _usage_wanted(options: StreamOptions | None) -> Literal["never", "last", "always"]:
    """Which chunks of a stream tell the usage."""
    if options is None or not options.include_usage:
        return "never"
    return "always" if options.continuous_usage_stats else "last"
