"""Table of all sampling parameters: range, neutral value, stage and function of each.

Whether a row needs work is derived from the table alone, so that no parameter in it can be overlooked. The
ranges that requests are checked against come from it too. Functions are named but not imported: the table
needs no torch.
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
    """Stage at which a parameter acts; stages that act on logits stand in order of application."""

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
    """Allowed numbers; for a mapping, allowed values."""

    lowest: float
    highest: float
    above: bool = False
    """The lower bound is exclusive."""
    whole: bool = False
    least_positive: float = 0.0
    """Numbers between 0 and this one are rejected."""


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
    """Value without effect; of `max_tokens`, the default."""
    stage: Stage
    function: str = ""
    """Name of the `LogitsProcessor` for values other than the neutral one: in `processors.py`, or
    `module:name`."""
    range: Range | None = None
    needs_counts: Callable[[Any], bool] = _never
    """Return True for a non-neutral value that needs `TokenCounts`."""
    token_ids: bool = False
    """Values, or keys of the mapping, are token ids."""


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
    """Allowed range of a numeric parameter. Raises `ValueError` for others."""
    found = next(each.range for each in PARAMETERS if each.name == name)
    if found is None:
        raise ValueError(f"{name} is no number")
    return found


def in_stages(*stages: Stage) -> tuple[Parameter, ...]:
    return tuple(each for each in PARAMETERS if each.stage in stages)


def any_active(parameters: Iterable[Parameter]) -> Callable[[SamplingParameters], bool]:
    """Make a function that is true if one of these parameters has a value other than the neutral one."""
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
    """Make a function that is true if fewer tokens have been generated than one of these parameters
    requires."""
    lengths = [attrgetter(each.name) for each in parameters]

    def early(given: SamplingParameters, generated: int) -> bool:
        for length in lengths:  # noqa: SIM110 - a generator takes longer than the rest, and rows are many
            if generated < length(given):
                return True
        return False

    return early


_PENALTIES = "repetition_penalty", "frequency_penalty", "presence_penalty"
COMPILED = frozenset({*_PENALTIES, "temperature", "min_p", "top_k", "top_p"})
"""Parameters that the compiled kernel applies."""
BATCHED = COMPILED | {"allowed_token_ids", "bad_words", "logit_bias", "min_tokens"}
"""Parameters that `batched_processors` applies."""


class UnsupportedParameters:
    """Parameters that change logits and that a fast path does not apply."""

    def __init__(self, known: Collection[str]) -> None:
        def others(*stages: Stage) -> list[Parameter]:
            return [each for each in in_stages(*stages) if each.name not in known]

        edits, starts = others(Stage.TOKENS, Stage.PENALTY), others(Stage.START)
        rest = others(Stage.TEMPERATURE, Stage.TRUNCATION)
        self.none = not (edits or starts or rest)
        """The fast path applies every parameter."""
        self._edits, self._early, self._rest = any_active(edits), below_length(starts), any_active(rest)

    def needs_edit(self, parameters: SamplingParameters, generated: int) -> bool:
        """True if a row after `generated` output tokens needs the reference's edits and penalties."""
        return self._edits(parameters) or self._early(parameters, generated)

    def needs_process(self, parameters: SamplingParameters) -> bool:
        """True if the reference must process the row: only noise and argmax are left to the fast path."""
        return self._rest(parameters)


has_penalties = any_active(in_stages(Stage.PENALTY))
_changes_tokens = any_active(in_stages(Stage.TOKENS))
_narrows = any_active(in_stages(Stage.TRUNCATION))
_counting = tuple((each, any_active([each])) for each in PARAMETERS if each.needs_counts is not _never)
_may_need_counts = any_active(each for each, _ in _counting)
_early = below_length(in_stages(Stage.START))


def is_greedy(parameters: SamplingParameters) -> bool:
    """True if the most probable token is chosen, without noise."""
    return parameters.temperature < GREEDY_BELOW


def needs_counts(parameters: SamplingParameters) -> bool:
    """True if rows of this request need `TokenCounts`."""
    return _may_need_counts(parameters) and any(
        on(parameters) and each.needs_counts(getattr(parameters, each.name)) for each, on in _counting
    )


def has_truncation(parameters: SamplingParameters) -> bool:
    """True if top-k, top-p or min-p removes tokens."""
    return _narrows(parameters) and not is_greedy(parameters)


def needs_overrides(parameters: SamplingParameters, generated: int) -> bool:
    """True if logits of single tokens change after `generated` output tokens, other than by penalties."""
    return _changes_tokens(parameters) or _early(parameters, generated)


def needs_processing(parameters: SamplingParameters, generated: int) -> bool:
    """True if a row after `generated` output tokens needs more than division by its temperature."""
    return has_penalties(parameters) or needs_overrides(parameters, generated) or has_truncation(parameters)
