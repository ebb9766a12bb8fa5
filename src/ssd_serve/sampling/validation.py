"""Validation of sampling parameters, the same for HTTP requests and Python programs.

Pydantic types hold the ranges of the table; the functions check what needs the model's vocabulary and
context. Failures are `RequestError`s that name the field. No torch, no HTTP.
"""

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model
from pydantic_core import PydanticCustomError

from ssd_serve.base.errors import ContextLengthError, RequestError
from ssd_serve.base.messages import Ready, SamplingParameters, ThinkingBudget
from ssd_serve.sampling.parameters import PARAMETERS, Stage, in_stages, range_of

FILL_CONTEXT = -1
"""A value of `max_tokens`: as many as the context allows."""

_CONFLICTS_WITH_GRAMMAR = ("min_tokens", "allowed_token_ids", "bad_words", "ignore_eos")
"""Parameters that could leave no allowed token if the output must match a grammar."""

_CONFLICTS_WITH_BUDGET = ("allowed_token_ids", "bad_words")
"""Parameters that could forbid the end mark of the thoughts."""

TokenSequences = tuple[tuple[int, ...], ...]
"""Token sequences that the output must not contain."""


class Encoder(Protocol):
    """A tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


def encode(tokenizer: Encoder, text: str, special: bool, field: str) -> list[int]:
    """Token ids of a field's text; `special`: with the tokenizer's begin token. Raises `RequestError` on a
    lone surrogate."""
    try:
        return tokenizer.encode(text, add_special_tokens=special)
    except (UnicodeEncodeError, TypeError):  # which of them depends on the tokenizer
        # JSON and Python can carry half of a surrogate pair, which no encoding of text can.
        if not any("\ud800" <= character <= "\udfff" for character in text):
            raise
        raise RequestError(f"{field}: holds a lone surrogate, which is not a character", field) from None


def context_length_error(tokens: str, context: int, field: str) -> ContextLengthError:
    message = f"{field}: {tokens} tokens; prompt and output together may have {context}"
    return ContextLengthError(message, field)


def vocabulary_error(token: int, vocabulary: int, field: str) -> RequestError:
    return RequestError(f"{field}: token id {token} is outside the vocabulary of {vocabulary}", field)


def check_vocabulary(ids: Collection[int], ready: Ready, field: str) -> None:
    """Raise `RequestError` unless all ids are in the vocabulary."""
    largest, smallest = max(ids, default=0), min(ids, default=0)
    if largest >= ready.vocabulary or smallest < 0:
        raise vocabulary_error(smallest if smallest < 0 else largest, ready.vocabulary, field)


def check_prompt(ids: Sequence[int], ready: Ready, field: str) -> None:
    """Raise unless the prompt has tokens, all in the vocabulary, and fits the context with at least one
    more."""
    if not ids:
        raise RequestError(f"{field}: no tokens; the model needs at least one", field)
    check_vocabulary(ids, ready, field)
    if len(ids) >= ready.context:
        raise context_length_error(str(len(ids)), ready.context, field)


def output_limit(requested: int | None, default: int, prompt_tokens: int, ready: Ready, field: str) -> int:
    """Number of tokens to generate: `requested` (-1: as many as fit), or the smaller of the default and what
    fits. Raises `ContextLengthError`."""
    left = ready.context - prompt_tokens
    if requested is None or requested == FILL_CONTEXT:
        return left if requested else min(default, left)
    if requested > left:
        raise ContextLengthError(
            f"{field}: {requested} output tokens and {prompt_tokens} prompt tokens are "
            f"{requested + prompt_tokens}; the model's context is {ready.context}",
            field,
        )
    return requested


def bad_word_sequences(tokenizer: Encoder, word: str) -> TokenSequences:
    """Token sequences of a bad word at the start of a text and after a space. A sequence that ends with the
    other is left out, as it would ban nothing more."""
    text = word.lstrip()
    first = tuple(encode(tokenizer, text, False, "bad_words")) if text else ()
    if not first:
        raise RequestError("bad_words: a word has no tokens; leave it out", "bad_words")
    spaced = tuple(encode(tokenizer, " " + text, False, "bad_words"))
    return (first,) if spaced[-len(first) :] == first else (first, spaced)


def stop_token_set(
    stop_token_ids: Collection[int] | None, ignore_eos: bool | None, eos: Collection[int]
) -> frozenset[int]:
    return frozenset(stop_token_ids or ()) | frozenset(() if ignore_eos else eos)


def engine_parameters(
    request: object,
    ready: Ready,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    bad_words: TokenSequences = (),
    ending: Collection[int] = (),
    grammar: str = "",
    thinking_budget: ThinkingBudget | None = None,
) -> SamplingParameters:
    """Engine parameters of a request: everything that decides its tokens besides prompt and seed.

    `request` has the other parameters of the table as attributes; None means the model's default, or that of
    the table. `ending` are the stop token ids.
    """
    own: dict[str, Any] = {
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "bad_words": bad_words,
        "grammar": grammar,
        "thinking_budget": thinking_budget,
    }
    requested: dict[str, Any] = {name: value for name, value in ready.sampling.items() if name not in own}
    for each in PARAMETERS:
        if each.name not in own and getattr(request, each.name) is not None:
            requested[each.name] = getattr(request, each.name)
    for name in [each.name for each in PARAMETERS if each.token_ids and each.name in requested]:
        check_vocabulary(requested[name], ready, name)
        if not isinstance(requested[name], dict):
            requested[name] = tuple(requested[name])
    if not 0 < requested.get("top_k", 0) < ready.vocabulary:
        requested["top_k"] = 0  # all of the vocabulary is no restriction
    for name in _CONFLICTS_WITH_GRAMMAR if grammar else _CONFLICTS_WITH_BUDGET if thinking_budget else ():
        if getattr(request, name):
            raise RequestError(
                f"{name}: could leave no token where the output must match something; give one of them", name
            )
    engine = SamplingParameters(**requested, **own)
    _check_together(engine, ending)
    return engine


def _check_together(parameters: SamplingParameters, ending: Collection[int]) -> None:
    shortest, most, allowed = parameters.min_tokens, parameters.max_tokens, parameters.allowed_token_ids
    if shortest > most:
        raise RequestError(
            f"min_tokens: {shortest} is more than the {most} tokens that may be generated", "min_tokens"
        )
    masked = {word[0] for word in parameters.bad_words if len(word) == 1} | set(ending if shortest else ())
    if allowed is not None and masked.issuperset(allowed):
        raise RequestError(
            "allowed_token_ids: bad_words and min_tokens leave none of them", "allowed_token_ids"
        )


Model = TypeVar("Model", bound=BaseModel)


def range_field(name: str) -> Any:
    """Pydantic constraint for the range of a parameter, for use in `Annotated`."""
    allowed = range_of(name)
    if allowed.above:
        return Field(gt=allowed.lowest, le=allowed.highest)
    return Field(ge=allowed.lowest, le=allowed.highest)


_LEAST = range_of("temperature").least_positive


def _temperature(value: float) -> float:
    if 0 < value < _LEAST:
        raise PydanticCustomError("temperature", "Input should be 0 or at least {least}", {"least": _LEAST})
    return value


Temperature = Annotated[
    float,
    range_field("temperature"),
    Field(json_schema_extra={"anyOf": [{"const": 0}, {"minimum": _LEAST}]}),
    AfterValidator(_temperature),
]
Choices = Annotated[int, Field(ge=1, le=1024)]
"""Number of completions for each prompt."""
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
"""64 bits, signed or unsigned."""


def with_number_fields(model: type[Model]) -> type[Model]:
    """Add a field for every numeric logits parameter that the model does not declare itself. None means the
    default."""
    added: dict[str, Any] = {}
    for each in in_stages(Stage.START, Stage.PENALTY, Stage.TEMPERATURE, Stage.TRUNCATION):
        if each.name not in model.model_fields and each.range is not None:
            number = int if each.range.whole else float
            added[each.name] = (Annotated[number | None, range_field(each.name)], None)
    return (
        create_model(model.__name__, __base__=model, __module__=model.__module__, **added) if added else model
    )


class GenerationConfig(BaseModel):
    """Keys of the file that are parameters here; null means that the file leaves them open."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False, populate_by_name=True)

    do_sample: bool | None = None
    temperature: Temperature | None = None
    top_k: Annotated[int, range_field("top_k")] | None = None
    top_p: Annotated[float, range_field("top_p")] | None = None
    min_p: Annotated[float, range_field("min_p")] | None = None
    repetition_penalty: Annotated[float, range_field("repetition_penalty")] | None = None
    max_tokens: Annotated[int, range_field("max_tokens")] | None = Field(default=None, alias="max_new_tokens")
