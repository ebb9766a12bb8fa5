"""Every parameter of the table: derived predicates see it, and no path ignores it."""

from typing import Any

import pytest
import torch
from msgspec.structs import asdict, replace

from ssd_serve.base.messages import SamplingParameters, ThinkingBudget
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.sampling.batched_processors import BATCHED, edit_rows, process_rows
from ssd_serve.sampling.choice import sample
from ssd_serve.sampling.native_choice import COMPILED, NativeChoice
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.sampling.parameters import (
    PARAMETERS,
    Parameter,
    Stage,
    UnsupportedParameters,
    any_active,
    has_penalties,
    has_truncation,
    is_greedy,
    needs_counts,
    needs_overrides,
    needs_processing,
)
from ssd_serve.sampling.processors import TokenCounts, edit, process, processor_function
from ssd_serve.sampling.rows import SamplingRows
from tests.sampling.test_processors import reference

VOCABULARY = 12
PROMPT, OUTPUT, ENDS = (1, 2, 3, 4), (5, 5, 6), (0,)
OTHER: dict[str, tuple[Any, ...]] = {
    "grammar": ("any",),
    "thinking_budget": (ThinkingBudget(3, (), (7,)),),
    "allowed_token_ids": ((0, 3, 5, 7),),
    "bad_words": (((5,), (9,)), ((5, 6, 7), (6, 2))),
    "logit_bias": ({2: 3.0, 7: -100.0},),
    "min_tokens": (6,),
    "repetition_penalty": (1.5, 0.5),
    "frequency_penalty": (0.7, -0.7),
    "presence_penalty": (0.9, -0.9),
    "temperature": (0.5, 1.7),
    "min_p": (0.2, 1.0),
    "top_k": (1, 4),
    "top_p": (0.1, 0.55),
    "stop_token_ids": ((4,),),
    "ignore_eos": (True,),
    "max_tokens": (3,),
    "logprobs": (0, 4),
    "prompt_logprobs": (0, 2),
}
"""Values that are not neutral."""


def others(parameter: Parameter) -> tuple[Any, ...]:
    """Values of a parameter, neither neutral nor the ends of its range."""
    if parameter.name in OTHER:
        return OTHER[parameter.name]
    assert parameter.range is not None, f"OTHER has no value of {parameter.name}"
    low, high = parameter.range.lowest, parameter.range.highest
    return (int(low) + 1,) if parameter.range.whole else (low + 0.3 * (high - low), low + 0.6 * (high - low))


CASES = [
    pytest.param(each, value, id=f"{each.name}={value}") for each in PARAMETERS for value in others(each)
]


def given(parameter: Parameter, value: object) -> SamplingParameters:
    return replace(SamplingParameters(), **{parameter.name: value})


def tree(parameters: SamplingParameters) -> SamplingRows:
    """A first row behind three tokens of output, and a small tree of nodes."""
    counts = TokenCounts(PROMPT, OUTPUT)
    return SamplingRows(parameters, 7, 40, counts, (), 3, ENDS, None, (6, 7, 2), (-1, 0, -1), (1, 2, 1))


def logits(rows: int) -> torch.Tensor:
    return 2 * torch.randn((rows, VOCABULARY), generator=torch.Generator().manual_seed(3))


def test_parameter_table_has_every_field_with_neutral_default() -> None:
    """`max_tokens` has no neutral value: a text always ends."""
    assert {each.name: each.neutral for each in PARAMETERS} == asdict(SamplingParameters())
    assert len(PARAMETERS) == len({each.name for each in PARAMETERS})


def test_logits_parameters_have_functions_in_stage_order() -> None:
    stages = [each.stage for each in PARAMETERS]
    assert stages == sorted(stages, key=list(Stage).index)
    for each in PARAMETERS:
        assert bool(each.function) == (each.stage not in (Stage.GRAMMAR, Stage.END, Stage.REPORT))
        assert not each.function or callable(processor_function(each))


def test_neutral_parameters_need_no_processing() -> None:
    neutral = SamplingParameters()
    assert not needs_processing(neutral, 0)
    assert not needs_counts(neutral)
    assert not is_greedy(neutral)
    assert not any_active(PARAMETERS)(neutral)


@pytest.mark.parametrize(("parameter", "value"), CASES)
def test_derived_predicates_see_every_parameter(parameter: Parameter, value: object) -> None:
    parameters, stage = given(parameter, value), parameter.stage
    assert any_active([parameter])(parameters)
    assert needs_overrides(parameters, 3) == (stage in (Stage.TOKENS, Stage.START))
    assert has_penalties(parameters) == (stage == Stage.PENALTY)
    assert has_truncation(parameters) == (stage == Stage.TRUNCATION)
    processed = stage in (Stage.TOKENS, Stage.START, Stage.PENALTY, Stage.TRUNCATION)
    assert needs_processing(parameters, 3) == processed
    several = parameter.name == "bad_words" and value == ((5, 6, 7), (6, 2))
    assert needs_counts(parameters) == (stage == Stage.PENALTY or several)


@pytest.mark.parametrize(("parameter", "value"), CASES)
def test_greedy_rows_need_no_truncation(parameter: Parameter, value: object) -> None:
    greedy = replace(given(parameter, value), temperature=0.0)
    assert is_greedy(greedy)
    assert not has_truncation(greedy)
    edited = parameter.stage in (Stage.TOKENS, Stage.START, Stage.PENALTY)
    assert needs_processing(greedy, 3) == edited


def test_min_tokens_applies_only_to_the_first_tokens() -> None:
    parameters = SamplingParameters(min_tokens=6)
    assert [needs_overrides(parameters, generated) for generated in (0, 5, 6, 7)] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(("parameter", "value"), CASES)
def test_batched_parameter_equals_the_reference(parameter: Parameter, value: object) -> None:
    """And what acts on logits changes them."""
    rows = tree(given(parameter, value)).split()
    before = logits(len(rows))
    found = process_rows(before, rows)
    for line, row, processed in zip(before.tolist(), rows, found, strict=True):
        expected = torch.tensor(reference(line, row.parameters, PROMPT, (*OUTPUT, *row.path), ENDS))
        torch.testing.assert_close(processed, expected, rtol=1e-5, atol=1e-5)
    acts = parameter.stage not in (Stage.GRAMMAR, Stage.END, Stage.REPORT)
    assert torch.equal(found, before) != acts


@pytest.mark.parametrize("unsupported", [None, *sorted(BATCHED)])
@pytest.mark.parametrize(("parameter", "value"), CASES)
def test_unsupported_parameter_falls_back_to_the_reference(
    parameter: Parameter, value: object, unsupported: str | None
) -> None:
    rows = [*tree(SamplingParameters()).split(), *tree(given(parameter, value)).split()]
    rest, before = UnsupportedParameters(BATCHED - {unsupported}), logits(len(rows))
    assert not (unsupported and rest.none)
    for together, alone in ((process_rows, process), (edit_rows, edit)):
        expected = [alone(line, *row.processor_arguments) for line, row in zip(before, rows, strict=True)]
        assert torch.equal(together(before, rows, rest), torch.stack(expected))


@pytest.mark.parametrize("unsupported", [None, *sorted(COMPILED)])
@pytest.mark.parametrize(("parameter", "value"), CASES)
def test_native_choice_leaves_unlisted_parameters_to_torch(
    native: NativeLibrary, parameter: Parameter, value: object, unsupported: str | None
) -> None:
    """Whichever of its parameters it did not know: the same tokens and log-probabilities."""
    choice = NativeChoice(native, COMPILED - {unsupported})
    noise = NoiseRows(VOCABULARY, 64, native=native)
    seasoned = SamplingParameters(temperature=0.8, top_k=9, repetition_penalty=1.2, logprobs=2)
    asked = [
        tree(replace(base, **{parameter.name: value}))._replace(seed=seed)
        for base in (SamplingParameters(), SamplingParameters(temperature=0.0), seasoned)
        for seed in range(8)
    ]
    before = logits(sum(each.rows for each in asked))
    assert sample(before, asked, noise, choice) == sample(before, asked, noise)


@pytest.mark.parametrize("unsupported", [None, *sorted(COMPILED)])
@pytest.mark.parametrize(("parameter", "value"), CASES)
def test_unsupported_parameters_of_a_fast_path(
    parameter: Parameter, value: object, unsupported: str | None
) -> None:
    rest, rows = UnsupportedParameters(COMPILED - {unsupported}), tree(given(parameter, value))
    unknown, stage = parameter.name not in COMPILED - {unsupported}, parameter.stage
    assert rest.needs_edit(rows.parameters, rows.generated) == (
        unknown and stage in (Stage.TOKENS, Stage.START, Stage.PENALTY)
    )
    assert rest.needs_process(rows.parameters) == (unknown and stage in (Stage.TEMPERATURE, Stage.TRUNCATION))


def test_native_choice_lists_only_known_parameters() -> None:
    assert {each.name for each in PARAMETERS} > BATCHED > COMPILED
