"""`/v1/chat/completions`: from a checked body to a task."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fastapi import Request, Response

from ssd_serve.base.messages import Ready, ThinkingBudget
from ssd_serve.models.text import default_tools
from ssd_serve.models.text.chat import takes_tools
from ssd_serve.sampling.grammar import GrammarPart
from ssd_serve.sampling.thinking import BEGIN, make_thinking_budget, starts_in_thinking
from ssd_serve.sampling.validation import output_limit
from ssd_serve.server.errors import bad_request
from ssd_serve.server.openai.conversation import NamedTool
from ssd_serve.server.openai.grammar import CallForm, forced_calls, grammar_of, strict_calls
from ssd_serve.server.openai.message import MessageRules, MessageWriter
from ssd_serve.server.openai.output_readers import FORMATS, format_of
from ssd_serve.server.openai.prompts import TokenPrompt, chat_prompt, sends_tools
from ssd_serve.server.openai.protocol import ChatRequest
from ssd_serve.server.openai.serialize import ChatSerializer
from ssd_serve.server.openai.stream import handle_generation
from ssd_serve.server.openai.tasks import (
    GenerationTask,
    check_streaming,
    given,
    plan_choices,
    response_head,
)
from ssd_serve.server.service import Service


@dataclass(frozen=True, slots=True)
class ChatEndpoint:
    """Handler of the route."""

    service: Service

    async def handle(self, request: Request) -> Response:
        return await handle_generation(self.service, request, ChatRequest, self.task)

    async def task(self, body: ChatRequest, ready: Ready, request: Request) -> GenerationTask:
        """Check the body against the model, and plan its choices."""
        service = self.service
        service.require_model(body.model)
        check_streaming(body)
        choices = given(body.n, 1)
        service.require_room(choices)
        # Chat templates write the begin token themselves.
        prompt = await chat_prompt(service, ready, body, given(body.add_special_tokens, False))
        rules = message_rules(service, body, prompt)
        calls = call_rules(service, body, rules)
        grammar = await grammar_of(service, body, rules.thinking, calls)
        if grammar and rules.format is not None and calls is None:
            raise bad_request(
                "tools: none can be called where the output must match something; tool_choice none, or "
                "leave that out",
                "tools",
                "not_built",
            )
        logprobs = requested_logprobs(body)
        head = response_head(service, ready, body, request, "chatcmpl")
        # Call markers may be special tokens.
        skip_special = given(body.skip_special_tokens, rules.format is None)
        plans = await plan_choices(
            service,
            ready,
            body,
            [prompt],
            [chat_output_limit(body, len(prompt.ids), ready)],
            head.seed,
            skip_special=skip_special,
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs,
            grammar=grammar,
            thinking_budget=thinking_budget(service, body, rules.thinking),
        )
        writers = [MessageWriter(rules, f"{head.identifier} {head.seed} {i}") for i in range(choices)]
        serializer = ChatSerializer(service.texts, body, logprobs is not None, prompt, writers, skip_special)
        return GenerationTask(service, request, body, head, plans, serializer)


def template_of(service: Service, body: ChatRequest) -> str:
    """Return the source of the chat template of a conversation."""
    return service.tokenizer.chat_template(body.chat_template, sends_tools(body))


def message_rules(service: Service, body: ChatRequest, prompt: TokenPrompt) -> MessageRules:
    """Return what to look for in the output. Raises 400 for tools where the call format is unknown."""
    template, settings = template_of(service, body), service.settings
    thinks = settings.reasoning_parser == "think" or (
        settings.reasoning_parser == "auto" and BEGIN in template
    )
    thinking = starts_in_thinking(prompt.text or "") if thinks else None
    include = given(body.include_reasoning, True)
    if not body.tools or body.tool_choice == "none":
        return MessageRules(thinking=thinking, include_thinking=include)
    form = format_of(template) if settings.tool_parser == "auto" else settings.tool_parser
    if form != "none" and not takes_tools(template):
        form = default_tools.FORMAT  # the prompt describes it
    if form not in FORMATS:
        raise bad_request(
            "tools: how this model would call them is not known; its operator can say it with "
            "SSD_TOOL_PARSER",
            "tools",
            "not_built",
        )
    names = frozenset(tool.function.name for tool in body.tools)
    return MessageRules(form, names, given(body.parallel_tool_calls, True), thinking, include)


def thinking_budget(service: Service, body: ChatRequest, thinking: bool | None) -> ThinkingBudget | None:
    """Return the limit of thinking tokens; None where there is none, or the model does not think."""
    if thinking is None or body.thinking_token_budget is None:
        return None
    encode = partial(service.tokenizer.encode, add_special_tokens=False)
    return make_thinking_budget(body.thinking_token_budget, thinking, encode)


def call_rules(
    service: Service, body: ChatRequest, message: MessageRules
) -> Callable[[], Sequence[GrammarPart]] | None:
    """Return a function that makes the grammar of tool calls; None where calls are not constrained.

    Raises 400 where a call is required without a tool.
    """
    choice, tools = body.tool_choice, body.tools or []
    forced, parallel = choice == "required", message.parallel
    if forced and body.parallel_tool_calls is None:
        # A model without tools in its template repeats a call that it must make, until its output is cut.
        parallel = takes_tools(template_of(service, body))
    if isinstance(choice, NamedTool):
        forced, parallel = True, False
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    if forced and not tools:
        raise bad_request("tool_choice: tools have none to call", "tool_choice", "invalid_value")
    if message.format is None or not (forced or any(tool.function.strict for tool in tools)):
        return None
    tokenizer, make = service.tokenizer, forced_calls if forced else strict_calls
    encode = partial(tokenizer.encode, add_special_tokens=False)
    form = CallForm.of(message.format, template_of(service, body), encode)
    return partial(make, form, [tool.function for tool in tools], parallel)


def requested_logprobs(body: ChatRequest) -> int | None:
    """Return how many alternatives to report with each token; None for no log-probabilities."""
    if body.logprobs:
        return given(body.top_logprobs, 0)
    if body.top_logprobs:
        raise bad_request("top_logprobs: only allowed with logprobs: true", "top_logprobs", "invalid_value")
    return None


def chat_output_limit(body: ChatRequest, prompt_tokens: int, ready: Ready) -> int:
    """Return the most output tokens: `max_completion_tokens` or its older name `max_tokens`, or else the
    model's default or as many as fit."""
    newer, older = body.max_completion_tokens, body.max_tokens
    if newer is not None and older is not None and newer != older:
        raise bad_request(
            "max_tokens: differs from max_completion_tokens; give one of them", "max_tokens", "invalid_value"
        )
    param = "max_tokens" if newer is None else "max_completion_tokens"
    default = int(ready.sampling.get("max_tokens", ready.context))
    return output_limit(older if newer is None else newer, default, prompt_tokens, ready, param)
