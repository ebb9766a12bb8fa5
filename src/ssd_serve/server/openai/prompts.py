"""From what people send to prompts of token ids that fit the model. Knows no sampling and no HTTP."""

from collections.abc import Iterable
from dataclasses import dataclass

from ssd_serve.base.errors import RequestError
from ssd_serve.base.messages import Ready
from ssd_serve.sampling.validation import FILL_CONTEXT, check_prompt, encode, context_length_error
from ssd_serve.server.errors import bad_request
from ssd_serve.server.http.worker_pool import WorkerPool, Steps
from ssd_serve.server.openai.conversation import TemplateInput
from ssd_serve.server.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest
from ssd_serve.server.service import Service
from ssd_serve.server.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt for the engine. `text` is what was sent; None when ids were."""

    ids: tuple[int, ...]
    text: str | None


FEW_CHARACTERS = 4
"""Most texts have more characters a token."""

PLENTY_CHARACTERS = 16
"""Almost none has more."""

COUNTED_AT_ONCE = 1 << 16
"""Characters, at most."""

CUT_TOKENS = 16
"""A text that is cut may have a few tokens more there than the whole has."""

TOKEN_UNITS = 8
"""Decoding a token takes about as long as tokenising so many characters."""

PromptField = str | list[str] | tuple[int, ...] | list[tuple[int, ...]]
"""The four forms of a prompt in the completions API."""


def token_units(counts: Iterable[int]) -> int:
    """How much work it is to decode so many tokens, in characters."""
    return TOKEN_UNITS * sum(counts)


def prompt_count(prompt: PromptField) -> int:
    """How many prompts the field holds."""
    return len(prompt) if isinstance(prompt, list) else 1


def tokens_kept(body: GenerationRequest, ready: Ready) -> int | None:
    """How many of a prompt's last tokens the request keeps; None: all."""
    if body.truncate_prompt_tokens != FILL_CONTEXT:
        return body.truncate_prompt_tokens
    return max(1, ready.context - max(1, body.max_tokens or 1))


async def completion_prompts(
    service: Service, ready: Ready, body: CompletionRequest, special: bool
) -> list[TokenPrompt]:
    """The prompts of a completion request, in order; a single prompt gives one."""
    prompt, most = body.prompt, tokens_kept(body, ready)
    items: list[str | tuple[int, ...]] = [*prompt] if isinstance(prompt, list) else [prompt]
    numbers: dict[int, int] = {}  # a tokenizer makes a new object for each token: they are shared

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
    """The prompt of a conversation."""
    text = await chat_text(service, service.template_pool, TemplateInput.of(body, service.settings.system_prompt))
    most = tokens_kept(body, ready)
    ids = await service.worker_pool.steps(
        len(text), text_ids(service.tokenizer, ready, text, special, "messages", most)
    )
    check_prompt(ids, ready, "messages")
    return TokenPrompt(tuple(ids), text)


def text_ids(
    tokenizer: TextTokenizer, ready: Ready, text: str, special: bool, param: str, most: int | None = None
) -> Steps[list[int]]:
    """Tokenise a text, but no more of a hopelessly long one than it takes to see that; keep the last `most`
    of its tokens, behind the tokenizer's begin token.

    A tokenizer takes some hundred bytes for each character. So what may not fit is first counted in slices.
    """
    size = min(COUNTED_AT_ONCE, ready.context * PLENTY_CHARACTERS)
    long = len(text) > max(ready.context * FEW_CHARACTERS, size)
    if most is not None:
        text = text[-PLENTY_CHARACTERS * (min(most, ready.context) + CUT_TOKENS) :] if long else text
        return _last(encode(tokenizer, text, special, param), most, encode(tokenizer, "", special, param))
    if long:
        least = 0
        for place in range(0, len(text), size):
            piece = text[place : place + size]
            least += max(0, len(encode(tokenizer, piece, False, param)) - CUT_TOKENS)
            if least > ready.context:
                raise context_length_error(f"at least {least}", ready.context, param)
            yield
    return encode(tokenizer, text, special, param)


def _last(ids: list[int], most: int, begin: list[int]) -> list[int]:
    """The last `most` ids, the first of them still those of a beginning where there is room for it."""
    if len(ids) <= most or len(begin) >= most or ids[: len(begin)] != begin:
        return ids[-most:]
    return begin + ids[len(begin) - most :]


async def chat_text(service: Service, rendering: WorkerPool, conversation: TemplateInput) -> str:
    """The conversation as the model's chat template writes it, rendered on these threads."""
    try:
        return await rendering.run(conversation.units, lambda: conversation.text(service.tokenizer))
    except RequestError as error:
        raise bad_request(str(error), error.field or "messages") from error
