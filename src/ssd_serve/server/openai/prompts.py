"""Prompts of token ids from texts, ids and conversations; `/tokenize` and `/detokenize`. Knows no sampling."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from fastapi import Request, Response

from ssd_serve.base.errors import RequestError
from ssd_serve.base.messages import Ready
from ssd_serve.sampling.validation import (
    FILL_CONTEXT,
    check_prompt,
    check_vocabulary,
    context_length_error,
    encode,
)
from ssd_serve.server.errors import bad_request
from ssd_serve.server.http.worker_pool import Steps, WorkerPool
from ssd_serve.server.openai.conversation import Message, ToolCall
from ssd_serve.server.openai.message import arguments_object
from ssd_serve.server.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from ssd_serve.server.openai.unknown_fields import ignored_header
from ssd_serve.server.service import Service
from ssd_serve.server.text import TextTokenizer, token_units

_MESSAGE_UNITS = 32
"""Cost of rendering a message besides its text, in characters."""
FEW_CHARACTERS = 4
"""Most texts have more characters per token."""
PLENTY_CHARACTERS = 16
"""Almost no text has more characters per token."""
COUNTED_AT_ONCE = 1 << 16
"""Most characters of a slice for counting tokens."""
CUT_TOKENS = 16
"""Tokens that a slice of a text may have more than its part of the whole text."""
_STRINGS_PER_STEP = 64

PromptField = str | list[str] | tuple[int, ...] | list[tuple[int, ...]]
"""The four forms of a prompt in the completions API."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt for the engine. `text` is None where the client sent ids."""

    ids: tuple[int, ...]
    text: str | None


def prompt_count(prompt: PromptField) -> int:
    """Return the number of prompts in the field."""
    return len(prompt) if isinstance(prompt, list) else 1


def tokens_kept(body: GenerationRequest, ready: Ready) -> int | None:
    """Return how many of a prompt's last tokens the request keeps; None: all."""
    if body.truncate_prompt_tokens != FILL_CONTEXT:
        return body.truncate_prompt_tokens
    return max(1, ready.context - max(1, body.max_tokens or 1))


async def completion_prompts(
    service: Service, ready: Ready, body: CompletionRequest, special: bool
) -> list[TokenPrompt]:
    """Return the prompts of a completion request, in order."""
    prompt, most = body.prompt, tokens_kept(body, ready)
    items: list[str | tuple[int, ...]] = [*prompt] if isinstance(prompt, list) else [prompt]
    numbers: dict[int, int] = {}  # a tokenizer makes a new object for each token; these are shared

    def work() -> Steps[list[TokenPrompt]]:
        found: list[TokenPrompt] = []
        for item in items:
            if isinstance(item, str):
                ids = yield from text_ids(service.tokenizer, ready, item, special, "prompt", most)
                found.append(TokenPrompt(tuple(map(numbers.setdefault, ids, ids)), item))
            else:
                found.append(TokenPrompt(item if most is None else item[-most:], None))
            check_prompt(found[-1].ids, ready, "prompt")
            yield
        return found

    return await service.worker_pool.steps(sum(map(len, items)), work())


async def chat_prompt(service: Service, ready: Ready, body: ChatRequest, special: bool) -> TokenPrompt:
    """Return the prompt of a conversation."""
    text = await chat_text(service, service.template_pool, body)
    most = tokens_kept(body, ready)
    ids = await service.worker_pool.steps(
        len(text), text_ids(service.tokenizer, ready, text, special, "messages", most)
    )
    check_prompt(ids, ready, "messages")
    return TokenPrompt(tuple(ids), text)


def text_ids(
    tokenizer: TextTokenizer, ready: Ready, text: str, special: bool, param: str, most: int | None = None
) -> Steps[list[int]]:
    """Tokenize a text; keep the last `most` tokens behind the tokenizer's begin token.

    A tokenizer needs some hundred bytes of memory per character. So the tokens of a text that may exceed the
    context are first counted in slices, and the text is rejected as soon as it cannot fit.
    """
    size = min(COUNTED_AT_ONCE, ready.context * PLENTY_CHARACTERS)
    long = len(text) > max(ready.context * FEW_CHARACTERS, size)
    if most is not None:
        text = text[-PLENTY_CHARACTERS * (min(most, ready.context) + CUT_TOKENS) :] if long else text
        return _last(encode(tokenizer, text, special, param), most, encode(tokenizer, "", special, param))
    if long:
        least = 0
        for start in range(0, len(text), size):
            part = text[start : start + size]
            least += max(0, len(encode(tokenizer, part, False, param)) - CUT_TOKENS)
            if least > ready.context:
                raise context_length_error(f"at least {least}", ready.context, param)
            yield
    return encode(tokenizer, text, special, param)


def _last(ids: list[int], most: int, begin: list[int]) -> list[int]:
    """Return the last `most` ids, behind the begin ids where they fit."""
    if len(ids) <= most or len(begin) >= most or ids[: len(begin)] != begin:
        return ids[-most:]
    return begin + ids[len(begin) - most :]


def sends_tools(body: ChatRequest) -> bool:
    """Return True if the prompt describes tools."""
    return bool(body.tools) and body.tool_choice != "none"


async def chat_text(service: Service, rendering: WorkerPool, body: ChatRequest | TokenizeRequest) -> str:
    """Render the conversation with the model's chat template, on the threads of `rendering`.

    Raises `RequestError` for fields that contradict each other, `ApiError` where the template fails.
    """
    continues, system_prompt = bool(body.continue_final_message), service.settings.system_prompt
    if continues and body.add_generation_prompt:
        raise RequestError(
            "add_generation_prompt: begins a message, and continue_final_message goes on with one; give "
            "one of them",
            "add_generation_prompt",
        )
    entries = [_entry(message, index) for index, message in enumerate(body.messages or ())]
    if system_prompt:
        entries = _with_system_prompt(system_prompt, entries)
    variables: dict[str, object] = {}
    if isinstance(body, ChatRequest):
        if sends_tools(body):
            variables["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        if body.chat_template is not None:
            variables["chat_template"] = body.chat_template
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
            variables["enable_thinking"] = body.reasoning_effort != "none"
    variables |= body.chat_template_kwargs or {}
    generation_prompt = not continues and body.add_generation_prompt is not False

    def render() -> str:
        text = service.tokenizer.apply_chat_template(entries, generation_prompt, **variables)
        return _until_end_of(str(entries[-1]["content"]), text) if continues else text

    characters = sum(_MESSAGE_UNITS + sum(map(_length, entry.values())) for entry in entries)
    try:
        return await rendering.run(characters, render)
    except RequestError as error:
        raise bad_request(str(error), error.field or "messages") from error


def _length(value: object) -> int:
    return len(value) if isinstance(value, str) else len(msgspec.json.encode(value))


def _entry(message: Message, index: int) -> dict[str, object]:
    """Return a message as templates read it, with arguments of calls as objects."""
    entry = message.template_entry()
    if message.tool_calls:
        entry["tool_calls"] = [_call_entry(call) for call in message.tool_calls]
    if message.content is None and message.role not in ("assistant", "tool"):
        raise RequestError(f"messages.{index}.content: field required", f"messages.{index}.content")
    if message.role == "tool" and message.tool_call_id is None:
        path = f"messages.{index}.tool_call_id"
        raise RequestError(f"{path}: field required where a tool answers", path)
    return entry


def _call_entry(call: ToolCall) -> dict[str, object]:
    function = {"name": call.function.name, "arguments": arguments_object(call.function.arguments)}
    return {**call.model_dump(exclude_none=True), "function": function}


def _with_system_prompt(system_prompt: str, entries: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Put the operator's system prompt first, before the client's in one message: templates take only one."""
    first, *others = entries
    if first["role"] != "system":
        return [{"role": "system", "content": system_prompt}, *entries]
    return [{**first, "content": f"{system_prompt}\n\n{first['content']}"}, *others]


def _until_end_of(last: str, text: str) -> str:
    """Return the rendered text up to the end of the last message's content, which templates may trim."""
    trimmed = last.strip()
    place = text.rfind(trimmed) if trimmed else -1
    if place < 0:
        raise RequestError(
            "continue_final_message: the model's chat template does not write the last message as it stands; "
            "there is nothing to go on with",
            "continue_final_message",
        )
    begin = place - (len(last) - len(last.lstrip()))
    if begin >= 0 and text.startswith(last, begin):
        return text[: begin + len(last)]
    return text[: place + len(trimmed)]


@dataclass(frozen=True, slots=True)
class TokenizingEndpoints:
    """Handlers of the routes."""

    service: Service

    async def tokenize(self, request: Request) -> Response:
        ready = self.service.require_ready()
        answer = await self.service.bodies.use(
            request, TokenizeRequest, ready, lambda body: self._ids(body, ready)
        )
        return _json(answer, request)

    async def detokenize(self, request: Request) -> Response:
        ready = self.service.require_ready()
        answer = await self.service.bodies.use(
            request, DetokenizeRequest, ready, lambda body: self._text(body, ready)
        )
        return _json(answer, request)

    async def _ids(self, body: TokenizeRequest, ready: Ready) -> dict[str, object]:
        service = self.service
        service.require_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt", "invalid_value")
        text = body.prompt or ""
        if body.messages is not None:
            text = await chat_text(service, service.tokenize_pool, body)
        param = "prompt" if body.messages is None else "messages"
        special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
        ids = await service.tokenize_pool.steps(
            len(text), text_ids(service.tokenizer, ready, text, special, param)
        )
        answer: dict[str, object] = {"count": len(ids), "max_model_len": ready.context, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = await service.tokenize_pool.steps(
                token_units([len(ids)]), self._strings(ids)
            )
        return answer

    def _strings(self, ids: Sequence[int]) -> Steps[list[str]]:
        found: list[str] = []
        for place in range(0, len(ids), _STRINGS_PER_STEP):
            found += map(self.service.texts.text_of, ids[place : place + _STRINGS_PER_STEP])
            yield
        return found

    async def _text(self, body: DetokenizeRequest, ready: Ready) -> dict[str, object]:
        service = self.service
        service.require_model(body.model)
        if len(body.tokens) > ready.context:
            raise context_length_error(str(len(body.tokens)), ready.context, "tokens")
        check_vocabulary(body.tokens, ready, "tokens")
        text = await service.tokenize_pool.run(
            token_units([len(body.tokens)]),
            lambda: service.tokenizer.decode(body.tokens, skip_special_tokens=False),
        )
        return {"prompt": text}


def _json(answer: dict[str, object], request: Request) -> Response:
    headers = ignored_header(request)
    return Response(msgspec.json.encode(answer), media_type="application/json", headers=headers)
