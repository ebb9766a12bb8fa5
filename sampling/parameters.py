"""Every sampling parameter in one table: which value changes nothing, where it acts, what it needs.

Whether a row needs work is derived from the table alone, so that a parameter that stands in it is never
passed over. Knows values, not how logits are changed by them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any

from ssd_serve.messages import SamplingParameters

GREEDY_BELOW = 1e-5
"""Temperatures below this are 0, as in vLLM: dividing by them would overflow float32."""


class Stage(Enum):
    """Where a parameter acts; those that act on logits stand in the order in which they do."""

    TOKENS = "single tokens of every row"
    START = "single tokens of rows before so many output tokens"
    PENALTY = "tokens by how often they stand in the text"
    TEMPERATURE = "whole rows"
    TRUNCATION = "which tokens are left, unless the most probable one is taken"
    END = "where a text ends, no logits"
    REPORT = "what is told of a choice, no logits"


def _never(_: object) -> bool:
    return False


def _always(_: object) -> bool:
    return True


def _has_several_tokens(words: tuple[tuple[int, ...], ...]) -> bool:
    return any(len(word) > 1 for word in words)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A field of `SamplingParameters`."""

    name: str
    neutral: object
    """The value that changes nothing; of `max_tokens`, the default."""
    stage: Stage
    needs_counts: Callable[[Any], bool] = _never
    """Whether a value other than the neutral one needs `TokenCounts`."""


PARAMETERS = (
    Parameter("allowed_token_ids", None, Stage.TOKENS),
    Parameter("bad_words", (), Stage.TOKENS, _has_several_tokens),
    Parameter("logit_bias", {}, Stage.TOKENS),
    Parameter("min_tokens", 0, Stage.START),
    Parameter("repetition_penalty", 1.0, Stage.PENALTY, _always),
    Parameter("frequency_penalty", 0.0, Stage.PENALTY, _always),
    Parameter("presence_penalty", 0.0, Stage.PENALTY, _always),
    Parameter("temperature", 1.0, Stage.TEMPERATURE),
    Parameter("min_p", 0.0, Stage.TRUNCATION),
    Parameter("top_k", 0, Stage.TRUNCATION),
    Parameter("top_p", 1.0, Stage.TRUNCATION),
    Parameter("stop_token_ids", (), Stage.END),
    Parameter("ignore_eos", False, Stage.END),
    Parameter("max_tokens", 16, Stage.END),
    Parameter("logprobs", None, Stage.REPORT),
    Parameter("prompt_logprobs", None, Stage.REPORT),
)


def at(*stages: Stage) -> tuple[Parameter, ...]:
    """The parameters of these stages."""
    return tuple(each for each in PARAMETERS if each.stage in stages)


def any_on(parameters: Iterable[Parameter]) -> Callable[[SamplingParameters], bool]:
    """The question whether one of these has a value other than the neutral one."""
    values = {each.name: each.neutral for each in parameters}
    if not values:
        return _never
    read = attrgetter(*values)  # one comparison for all: rows are many
    neutral = tuple(values.values()) if len(values) > 1 else next(iter(values.values()))

    def on(given: SamplingParameters) -> bool:
        differs: bool = read(given) != neutral
        return differs

    return on


def during(parameters: Iterable[Parameter]) -> Callable[[SamplingParameters, int], bool]:
    """The question whether fewer output tokens are out than one of these says."""
    lengths = [attrgetter(each.name) for each in parameters]

    def early(given: SamplingParameters, generated: int) -> bool:
        for length in lengths:  # noqa: SIM110 - a generator takes longer than the rest, and rows are many
            if generated < length(given):
                return True
        return False

    return early


penalises = any_on(at(Stage.PENALTY))
"""Whether any penalty is on."""
_changes_tokens = any_on(at(Stage.TOKENS))
_narrows = any_on(at(Stage.TRUNCATION))
_counting = tuple((each, any_on([each])) for each in PARAMETERS if each.needs_counts is not _never)
_may_need_counts = any_on(each for each, _ in _counting)
_early = during(at(Stage.START))


def is_greedy(parameters: SamplingParameters) -> bool:
    """Whether the choice is the most probable token, without noise."""
    return parameters.temperature < GREEDY_BELOW


def needs_counts(parameters: SamplingParameters) -> bool:
    """Whether rows of this request need `TokenCounts`."""
    return _may_need_counts(parameters) and any(
        on(parameters) and each.needs_counts(getattr(parameters, each.name)) for each, on in _counting
    )


def truncates(parameters: SamplingParameters) -> bool:
    """Whether tokens may be left out."""
    return _narrows(parameters) and not is_greedy(parameters)


def needs_editing(parameters: SamplingParameters, generated: int) -> bool:
    """Whether single tokens of a row after `generated` output tokens change, other than by penalties."""
    return _changes_tokens(parameters) or _early(parameters, generated)


def needs_processing(parameters: SamplingParameters, generated: int) -> bool:
    """Whether a row after `generated` output tokens needs more than division by its temperature."""
    return penalises(parameters) or needs_editing(parameters, generated) or truncates(parameters)
