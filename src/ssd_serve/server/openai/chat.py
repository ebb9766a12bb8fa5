"""`/v1/chat/completions`: from its body to a job, and how it writes choices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fastapi import Request, Response

from ssd_serve.base.messages import Ready, ThinkingBudget
from ssd_serve.sampling.validation import engine_parameters, output_limit
from ssd_serve.sampling.grammar import GrammarPart
from ssd_serve.sampling.thinking import BEGIN, starts_in_thinking, make_thinking_budget
from ssd_serve.base.seeds import MASK64, choice_seed, random_seed
from ssd_serve.server.engine.choice import ChoiceOutput, ChoiceDelta, ChoicePlan, ChoiceEnd
from ssd_serve.server.engine.continuation import generated_tokens
from ssd_serve.server.errors import bad_request
from ssd_serve.server.http.worker_pool import Steps
from ssd_serve.server.openai.answers import Job
from ssd_serve.server.openai.completions import (
    check_prompt_logprobs,
    check_stream_options,
    job_of,
)
from ssd_serve.server.openai.endpoint import checked_run_answered
from ssd_serve.server.openai.prompts import TokenPrompt, chat_prompt
from ssd_serve.server.openai.protocol import ChatRequest, NamedTool
from ssd_serve.server.openai.replies import ResponseHead, chat_logprobs, prompt_logprobs, written_in_steps
from ssd_serve.server.openai.sampling import bad_word_tokens, given, text_rules
from ssd_serve.server.openai.structured import grammar_of
from ssd_serve.server.openai.tools.call_grammar import CallForm, forced_calls, strict_calls
from ssd_serve.server.openai.tools.formats import FORMATS, format_of
from ssd_serve.server.openai.tools.message import MessageRules, MessageWriter
from ssd_serve.server.service import Service
from ssd_serve.server.text.tokenizer import TokenTexts


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Choices as `/v1/chat/completions` writes them."""

    texts: TokenTexts
    prompt: TokenPrompt
    writers: Sequence[MessageWriter]
    """Of the choices."""
    logprobs: bool
    token_ids: bool
    prompt_logprobs: bool = False
    whole_kind: str = "chat.completion"
    chunk_kind: str = "chat.completion.chunk"

    def opening(self, choice: int) -> dict[str, object] | None:
        """The role comes first."""
        return self._delta(choice, {"role": "assistant", "content": ""}, None, None)

    def part(self, piece: ChoiceDelta) -> dict[str, object] | None:
        """One piece."""
        self.writers[piece.choice].begin_behind(piece.resumed_text)
        delta = self.writers[piece.choice].push(piece.text, last=piece.end is not None)
        if not (delta or piece.end or (piece.tokens and (self.logprobs or self.token_ids))):
            return None
        scored = self.logprobs and piece.tokens
        details = chat_logprobs(self.texts, piece.tokens, piece.logprobs) if scored else None
        entry = self._delta(piece.choice, delta, details, piece.end)
        return {**entry, "token_ids": list(piece.tokens)} if self.token_ids else entry

    def whole(self, choice: int, output: ChoiceOutput) -> Steps[dict[str, object]]:
        """A whole choice."""
        details = (yield from self._all_logprobs(output)) if self.logprobs else None
        self.writers[choice].begin_behind(output.resumed_text)
        self.writers[choice].push(output.text, last=True)
        entry: dict[str, object] = {
            "index": choice,
            "message": self.writers[choice].message(),
            **self._rest(choice, details, output.end),
        }
        if self.prompt_logprobs:
            told = yield from prompt_logprobs(self.texts, self.prompt.ids, output.prompt_logprobs)
            entry["prompt_logprobs"] = told
        return {**entry, "token_ids": list(output.tokens)} if self.token_ids else entry

    def extra(self) -> dict[str, object]:
        """The prompt's ids, once for the whole response."""
        return {"prompt_token_ids": list(self.prompt.ids)} if self.token_ids else {}

    def _delta(
        self, choice: int, delta: dict[str, object], details: dict[str, object] | None, ending: ChoiceEnd | None
    ) -> dict[str, object]:
        return {"index": choice, "delta": delta, **self._rest(choice, details, ending)}

    def _rest(
        self, choice: int, details: dict[str, object] | None, ending: ChoiceEnd | None
    ) -> dict[str, object]:
        called = ending is not None and ending.reason == "stop" and self.writers[choice].called
        return {
            "logprobs": details,
            "finish_reason": "tool_calls" if called else ending.reason if ending else None,
            "stop_reason": ending.cause if ending else None,
        }

    def _all_logprobs(self, output: ChoiceOutput) -> Steps[dict[str, object]]:
        return written_in_steps(
            len(output.tokens),
            lambda some: chat_logprobs(self.texts, output.tokens[some], output.logprobs[some]),
        )


@dataclass(frozen=True, slots=True)
class ChatEndpoint:
    """Handles the route."""

    service: Service

    async def handle(self, request: Request) -> Response:
        """Check, run, answer."""
        return await checked_run_answered(self.service, request, ChatRequest, self.job)

    async def job(self, body: ChatRequest, name: str) -> Job:
        """Check the body against the model and plan its choices."""
        service = self.service
        service.require_model(body.model)
        ready = service.require_ready()
        check_stream_options(body)
        check_prompt_logprobs(body)
        choices = given(body.n, 1)
        service.require_room(choices)
        # Chat templates write the begin token themselves.
        prompt = await chat_prompt(service, ready, body, given(body.add_special_tokens, False))
        message = message_rules(service, body, prompt)
        calls = call_rules(service, body, message)
        grammar = await grammar_of(service, body, message.thinking, calls)
        if grammar and message.format is not None and calls is None:
            raise bad_request(
                "tools: none can be called where the output must match something; tool_choice none, or "
                "leave that out",
                "tools",
                "not_built",
            )
        logprobs = requested_logprobs(body)
        rules = await text_rules(service, body)
        parameters = engine_parameters(
            body,
            ready,
            max_tokens=chat_output_limit(body, len(prompt.ids), ready),
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs,
            bad_words=await bad_word_tokens(service, body.bad_words),
            ending=rules.stop_token_set,
            grammar=grammar,
            thinking_budget=thinking_budget(service, body, message.thinking),
        )
        seed = random_seed() if body.seed is None else body.seed
        # Marks of calls may be special tokens.
        skip_special = given(body.skip_special_tokens, message.format is None)
        had = await generated_tokens(service, ready, body, [parameters.max_tokens] * choices)
        plans = [
            ChoicePlan(prompt.ids, parameters, choice_seed(seed & MASK64, i), rules, skip_special, had[i])
            for i in range(choices)
        ]
        scored = body.prompt_logprobs is not None
        tokens_told = given(body.return_token_ids, False)
        head = ResponseHead.now("chatcmpl", name, service.model, service.fingerprint(ready), seed)
        writers = [MessageWriter(message, f"{head.identifier} {seed} {i}") for i in range(choices)]
        shape = ChatShape(service.texts, prompt, writers, logprobs is not None, tokens_told, scored)
        return job_of(body, head, plans, shape)


def message_rules(service: Service, body: ChatRequest, prompt: TokenPrompt) -> MessageRules:
    """What is looked for in the answers. 400 for tools of a model that is not known to call any."""
    template, settings = service.tokenizer.chat_template, service.settings
    thinks = settings.reasoning_parser == "think" or (
        settings.reasoning_parser == "auto" and BEGIN in template
    )
    thinking = starts_in_thinking(prompt.text or "") if thinks else None
    keeps = given(body.include_reasoning, True)
    if not body.tools or body.tool_choice == "none":
        rules = MessageRules(thinking=thinking, tells_thoughts=keeps)
    else:
        known = format_of(template) if settings.tool_parser == "auto" else settings.tool_parser
        if known not in FORMATS:
            raise bad_request(
                "tools: how this model would call them is not known; its operator can say it with "
                "SSD_TOOL_PARSER",
                "tools",
                "not_built",
            )
        names = frozenset(tool.function.name for tool in body.tools)
        rules = MessageRules(known, names, given(body.parallel_tool_calls, True), thinking, keeps)
    return rules


def thinking_budget(service: Service, body: ChatRequest, thinking: bool | None) -> ThinkingBudget | None:
    """How long this model may think; None where it does not, or as long as it likes."""
    if thinking is None or body.thinking_token_budget is None:
        return None
    encode = partial(service.tokenizer.encode, add_special_tokens=False)
    return make_thinking_budget(body.thinking_token_budget, thinking, encode)


def call_rules(
    service: Service, body: ChatRequest, message: MessageRules
) -> Callable[[], Sequence[GrammarPart]] | None:
    """Makes what calls must be, where some must come, or must match the schemas of strict tools. 400 where
    there is nothing to call."""
    choice, tools = body.tool_choice, body.tools or []
    forced, parallel = choice == "required", message.parallel
    if isinstance(choice, NamedTool):
        forced, parallel = True, False
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    if forced and not tools:
        raise bad_request("tool_choice: tools have none to call", "tool_choice", "invalid_value")
    if message.format is None or not (forced or any(tool.function.strict for tool in tools)):
        return None
    tokenizer, made = service.tokenizer, forced_calls if forced else strict_calls
    encode = partial(tokenizer.encode, add_special_tokens=False)
    form = CallForm.of(message.format, tokenizer.chat_template, encode)
    return partial(made, form, [tool.function for tool in tools], parallel)


def requested_logprobs(body: ChatRequest) -> int | None:
    """How many alternatives to report with each token; None for no log-probabilities."""
    if not body.logprobs:
        if body.top_logprobs:
            raise bad_request(
                "top_logprobs: only allowed with logprobs: true", "top_logprobs", "invalid_value"
            )
        return None
    return given(body.top_logprobs, 0)


def chat_output_limit(body: ChatRequest, prompt_tokens: int, ready: Ready) -> int:
    """`max_completion_tokens` and `max_tokens` are two names of one field. Without them, as many as the model
    asks for, or as fit."""
    newer, older = body.max_completion_tokens, body.max_tokens
    if newer is not None and older is not None and newer != older:
        raise bad_request(
            "max_tokens: differs from max_completion_tokens; give one of them", "max_tokens", "invalid_value"
        )
    param = "max_tokens" if newer is None else "max_completion_tokens"
    asked = older if newer is None else newer
    usual = int(ready.sampling.get("max_tokens", ready.context))
    return output_limit(asked, usual, prompt_tokens, ready, param)
