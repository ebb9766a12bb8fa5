"""From what people send to prompts of token ids that fit the model. Knows no sampling and no HTTP."""

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import TemplateError

from ssd_serve.errors import RequestError
from ssd_serve.messages import Ready
from ssd_serve.server.errors import ApiError, bad_request
from ssd_serve.server.protocol import ChatTemplateOptions, Message
from ssd_serve.server.service import Service


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt for the engine. `text` is what was sent; None when ids were."""

    ids: tuple[int, ...]
    text: str | None


PLENTY_CHARACTERS = 16
"""More characters a token than almost any text has."""

CUT_TOKENS = 16
"""A text that is cut may have a few tokens more there than the whole has."""

PromptField = str | list[str] | list[int] | list[list[int]]
"""The four forms of a prompt in the completions API."""


def prompt_count(prompt: PromptField) -> int:
    """How many prompts the field holds."""
    return 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)


async def completion_prompts(
    service: Service, ready: Ready, prompt: PromptField, special: bool
) -> list[TokenPrompt]:
    """The prompts of a completion request, in order; a single prompt gives one."""
    found: list[TokenPrompt] = []
    for item in _separate(prompt):
        if isinstance(item, str):
            found.append(await _text_prompt(service, ready, item, special, "prompt"))
        else:
            found.append(TokenPrompt(tuple(item), None))
    for one in found:
        check_prompt(one.ids, ready, "prompt")
    return found


def _separate(prompt: PromptField) -> list[str | list[int]]:
    items: list[str | list[int]] = []
    ids: list[int] = []
    for item in [prompt] if isinstance(prompt, str) else prompt:
        if isinstance(item, int):
            ids.append(item)
        else:
            items.append(item)
    return [*items, ids] if ids else items


async def chat_prompt(
    service: Service,
    ready: Ready,
    messages: Sequence[Message],
    options: ChatTemplateOptions | None,
    add_generation_prompt: bool,
    special: bool,
) -> TokenPrompt:
    """The prompt of a conversation."""
    text = await chat_text(service, messages, options, add_generation_prompt)
    prompt = await _text_prompt(service, ready, text, special, "messages")
    check_prompt(prompt.ids, ready, "messages")
    return prompt


async def _text_prompt(service: Service, ready: Ready, text: str, special: bool, param: str) -> TokenPrompt:
    """Tokenise a prompt, but no more of a hopelessly long one than it takes to see that."""
    enough = ready.context * PLENTY_CHARACTERS
    while len(text) > enough:
        least = len(await encode(service, text[:enough], special, param)) - CUT_TOKENS
        if least > ready.context:
            raise too_long(f"at least {least}", ready, param)
        enough *= 2
    return TokenPrompt(tuple(await encode(service, text, special, param)), text)


async def encode(service: Service, text: str, special: bool, param: str) -> list[int]:
    """Tokenise, off the event loop when the text is long; `param` names the field in errors."""
    try:
        return await service.off_loop.run(
            len(text), lambda: service.tokenizer.encode(text, add_special_tokens=special)
        )
    except UnicodeEncodeError:
        # JSON can carry half of a surrogate pair, which no encoding of text can.
        raise bad_request(f"{param}: holds a lone surrogate, which is not a character", param) from None


async def chat_text(
    service: Service,
    messages: Sequence[Message],
    options: ChatTemplateOptions | None,
    add_generation_prompt: bool,
) -> str:
    """Render the conversation with the model's chat template."""
    entries = [message.template_entry() for message in messages]
    variables: dict[str, object] = options.model_dump(exclude_none=True) if options else {}

    def render() -> str:
        return service.tokenizer.apply_chat_template(
            entries, add_generation_prompt=add_generation_prompt, **variables
        )

    try:
        return await service.off_loop.run(sum(len(entry["content"]) for entry in entries), render)
    except RequestError as error:
        raise bad_request(str(error), error.field or "messages") from error
    except TemplateError as error:
        raise bad_request(f"the model's chat template refuses these messages: {error}", "messages") from error


def check_prompt(ids: Sequence[int], ready: Ready, param: str) -> None:
    """400 unless the prompt has tokens, all in the vocabulary, and leaves room for one more."""
    if not ids:
        raise bad_request(f"{param}: no tokens; the model needs at least one", param, "invalid_value")
    check_vocabulary(ids, ready, param)
    if len(ids) >= ready.context:
        raise too_long(str(len(ids)), ready, param)


def too_long(tokens: str, ready: Ready, param: str) -> ApiError:
    """400: the prompt does not fit the context."""
    return bad_request(
        f"{param}: {tokens} tokens; prompt and output together may have {ready.context}",
        param,
        "context_length_exceeded",
    )


def check_vocabulary(ids: Sequence[int], ready: Ready, param: str) -> None:
    """400 unless all ids are tokens of the model."""
    largest = max(ids, default=0)
    if largest >= ready.vocabulary:
        raise bad_request(
            f"{param}: token id {largest} is outside the vocabulary of {ready.vocabulary}",
            param,
            "invalid_value",
        )
