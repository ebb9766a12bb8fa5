"""Every sampling parameter in one table: what it may be, which value changes nothing, where and how it acts.

Whether a row needs work is derived from the table alone, so that a parameter that stands in it is never
passed over; so are the ranges that requests and programs are held to. Knows values and names functions, but
does not import them: the table needs no torch.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any

from ssd_serve.base.messages import SamplingParameters

GREEDY_BELOW = 1e-5
"""Temperatures below this are 0, as in vLLM: dividing by them would overflow float32."""


class Stage(Enum):
    """Where a parameter acts; those that act on logits stand in the order in which they do."""

    GRAMMAR = "which tokens of a row may come at all, by the text before it; first of all"
    TOKENS = "single tokens of every row"
    START = "single tokens of rows before so many output tokens"
    PENALTY = "tokens by how often they stand in the text"
    TEMPERATURE = "whole rows"
    TRUNCATION = "which tokens are left, unless the most probable one is taken"
    END = "where a text ends, no logits"
    REPORT = "what is told of a choice, no logits"


@dataclass(frozen=True, slots=True)
class Range:
    """Which numbers people may give; of a mapping, which values."""

    lowest: float
    highest: float
    above: bool = False
    """The lowest number itself is too low."""
    whole: bool = False
    least_positive: float = 0.0
    """Numbers between 0 and this one are too small."""


_LARGEST = 2**31 - 1
_COUNT = Range(0, _LARGEST, whole=True)
_TOP = Range(0, 20, whole=True)


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
    function: str = ""
    """What its values but the neutral one do to a row of logits: a `LogitsProcessor` of `processors.py`, or
    `module:name` of another."""
    range: Range | None = None
    needs_counts: Callable[[Any], bool] = _never
    """Whether a value other than the neutral one needs `TokenCounts`."""
    token_ids: bool = False
    """Its values are, or are given for, ids of the vocabulary."""


PARAMETERS = (
    Parameter("grammar", "", Stage.GRAMMAR),
    Parameter("thinking_budget", None, Stage.GRAMMAR),
    Parameter("allowed_token_ids", None, Stage.TOKENS, "keep_only", token_ids=True),
    Parameter("bad_words", (), Stage.TOKENS, "mask_words", needs_counts=_has_several_tokens),
    Parameter("logit_bias", {}, Stage.TOKENS, "add_bias", Range(-100, 100), token_ids=True),
    Parameter("min_tokens", 0, Stage.START, "mask_ends", _COUNT),
    Parameter("repetition_penalty", 1.0, Stage.PENALTY, "penalise_repetition", Range(0.01, 100), _always),
    Parameter("frequency_penalty", 0.0, Stage.PENALTY, "penalise_frequency", Range(-2, 2), _always),
    Parameter("presence_penalty", 0.0, Stage.PENALTY, "penalise_presence", Range(-2, 2), _always),
    # Division by a smaller temperature would overflow.
    Parameter("temperature", 1.0, Stage.TEMPERATURE, "divide", Range(0, 100, least_positive=1e-6)),
    Parameter("min_p", 0.0, Stage.TRUNCATION, "keep_min_p", Range(0, 1)),
    Parameter("top_k", 0, Stage.TRUNCATION, "keep_top_k", Range(-1, _LARGEST, whole=True)),
    Parameter("top_p", 1.0, Stage.TRUNCATION, "keep_top_p", Range(0, 1, above=True)),
    Parameter("stop_token_ids", (), Stage.END, token_ids=True),
    Parameter("ignore_eos", False, Stage.END),
    Parameter("max_tokens", 16, Stage.END, range=Range(1, _LARGEST, whole=True)),
    Parameter("logprobs", None, Stage.REPORT, range=_TOP),
    Parameter("prompt_logprobs", None, Stage.REPORT, range=_TOP),
)


def range_of(name: str) -> Range:
    """What the parameter of this name may be."""
    found = next(each.range for each in PARAMETERS if each.name == name)
    if found is None:
        raise ValueError(f"{name} is no number")
    return found


def in_stages(*stages: Stage) -> tuple[Parameter, ...]:
    """The parameters of these stages."""
    return tuple(each for each in PARAMETERS if each.stage in stages)


def any_active(parameters: Iterable[Parameter]) -> Callable[[SamplingParameters], bool]:
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


def below_length(parameters: Iterable[Parameter]) -> Callable[[SamplingParameters, int], bool]:
    """The question whether fewer output tokens are out than one of these says."""
    lengths = [attrgetter(each.name) for each in parameters]

    def early(given: SamplingParameters, generated: int) -> bool:
        for length in lengths:  # noqa: SIM110 - a generator takes longer than the rest, and rows are many
            if generated < length(given):
                return True
        return False

    return early


class UnsupportedParameters:
    """What a fast path is not asked: the parameters that change logits and that it does not know."""

    def __init__(self, known: Collection[str]) -> None:
        def others(*stages: Stage) -> list[Parameter]:
            return [each for each in in_stages(*stages) if each.name not in known]

        edits, starts = others(Stage.TOKENS, Stage.PENALTY), others(Stage.START)
        rest = others(Stage.TEMPERATURE, Stage.TRUNCATION)
        self.none = not (edits or starts or rest)
        """It knows all that there are."""
        self._edits, self._early, self._rest = any_active(edits), below_length(starts), any_active(rest)

    def needs_edit(self, parameters: SamplingParameters, generated: int) -> bool:
        """Whether a row after `generated` output tokens must be edited and penalised by somebody else."""
        return self._edits(parameters) or self._early(parameters, generated)

    def needs_process(self, parameters: SamplingParameters) -> bool:
        """Whether a row must be processed by somebody else: only noise and argmax are left."""
        return self._rest(parameters)


has_penalties = any_active(in_stages(Stage.PENALTY))
"""Whether any penalty is on."""
_changes_tokens = any_active(in_stages(Stage.TOKENS))
_narrows = any_active(in_stages(Stage.TRUNCATION))
_counting = tuple((each, any_active([each])) for each in PARAMETERS if each.needs_counts is not _never)
_may_need_counts = any_active(each for each, _ in _counting)
_early = below_length(in_stages(Stage.START))


def is_greedy(parameters: SamplingParameters) -> bool:
    """Whether the choice is the most probable token, without noise."""
    return parameters.temperature < GREEDY_BELOW


def needs_counts(parameters: SamplingParameters) -> bool:
    """Whether rows of this request need `TokenCounts`."""
    return _may_need_counts(parameters) and any(
        on(parameters) and each.needs_counts(getattr(parameters, each.name)) for each, on in _counting
    )


def has_truncation(parameters: SamplingParameters) -> bool:
    """Whether tokens may be left out."""
    return _narrows(parameters) and not is_greedy(parameters)


def needs_overrides(parameters: SamplingParameters, generated: int) -> bool:
    """Whether single tokens of a row after `generated` output tokens change, other than by penalties."""
    return _changes_tokens(parameters) or _early(parameters, generated)


def needs_processing(parameters: SamplingParameters, generated: int) -> bool:
    """Whether a row after `generated` output tokens needs more than division by its temperature."""
    return has_penalties(parameters) or needs_overrides(parameters, generated) or has_truncation(parameters)
