"""Every parameter of the table: predicates see it, and every path applies it."""

from typing import Any

import pytest
import torch
from msgspec.structs import asdict, replace

from ssd_serve.base.messages import SamplingParameters, ThinkingBudget
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.sampling.batched_processors import edit_rows, process_rows
from ssd_serve.sampling.choice import sample
from ssd_serve.sampling.native_choice import NativeChoice
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.sampling.parameters import (
    BATCHED,
    COMPILED,
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
from ssd_serve.sampling.processors import TokenCounts, edit, process, processor_functions
from ssd_serve.sampling.rows import SamplingRows
from tests.sampling.test_processors import reference

VOCABULARY = 12
PROMPT, OUTPUT, ENDS = (1, 2, 3, 4), (5, 5, 6), (0,)
ACTIVE: dict[str, tuple[Any, ...]] = {
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
"""Values other than the neutral one."""


def active_values(parameter: Parameter) -> tuple[Any, ...]:
    """Values of a parameter, neither neutral nor the ends of its range."""
    if parameter.name in ACTIVE:
        return ACTIVE[parameter.name]
    assert parameter.range is not None, f"ACTIVE has no value of {parameter.name}"
    low, high = parameter.range.lowest, parameter.range.highest
    return (int(low) + 1,) if parameter.range.whole else (low + 0.3 * (high - low), low + 0.6 * (high - low))


CASES = [
    (each, replace(SamplingParameters(), **{each.name: value}))
    for each in PARAMETERS
    for value in active_values(each)
]
each_case = pytest.mark.parametrize(
    ("parameter", "parameters"),
    [pytest.param(*case, id=f"{case[0].name}={getattr(case[1], case[0].name)}") for case in CASES],
)


def tree(parameters: SamplingParameters, seed: int = 7) -> SamplingRows:
    """A first row after three output tokens, and a small tree of nodes."""
    counts = TokenCounts(PROMPT, OUTPUT)
    return SamplingRows(parameters, seed, 40, counts, (), 3, ENDS, None, (6, 7, 2), (-1, 0, -1), (1, 2, 1))


def logits(rows: int) -> torch.Tensor:
    return 2 * torch.randn((rows, VOCABULARY), generator=torch.Generator().manual_seed(3))


def test_parameter_table_has_every_field_with_neutral_default() -> None:
    assert {each.name: each.neutral for each in PARAMETERS} == asdict(SamplingParameters())
    assert {each.name for each in PARAMETERS} > BATCHED > COMPILED
    stages = [each.stage for each in PARAMETERS]
    assert stages == sorted(stages, key=list(Stage).index)
    for each in PARAMETERS:
        assert bool(each.function) == (each.stage not in (Stage.GRAMMAR, Stage.END, Stage.REPORT))
        assert not each.function or processor_functions(each.stage)


def test_neutral_parameters_need_no_processing() -> None:
    neutral = SamplingParameters()
    assert not needs_processing(neutral, 0)
    assert not needs_counts(neutral)
    assert not is_greedy(neutral)
    assert not any_active(PARAMETERS)(neutral)


@each_case
def test_predicates_see_every_parameter(parameter: Parameter, parameters: SamplingParameters) -> None:
    stage = parameter.stage
    edited = stage in (Stage.TOKENS, Stage.START, Stage.PENALTY)
    assert any_active([parameter])(parameters)
    assert needs_overrides(parameters, 3) == (stage in (Stage.TOKENS, Stage.START))
    assert has_penalties(parameters) == (stage == Stage.PENALTY)
    assert has_truncation(parameters) == (stage == Stage.TRUNCATION)
    assert needs_processing(parameters, 3) == (edited or stage == Stage.TRUNCATION)
    long_words = any(len(word) > 1 for word in parameters.bad_words)
    assert needs_counts(parameters) == (stage == Stage.PENALTY or long_words)
    greedy = replace(parameters, temperature=0.0)
    assert is_greedy(greedy)
    assert not has_truncation(greedy)
    assert needs_processing(greedy, 3) == edited


def test_min_tokens_applies_only_to_the_first_tokens() -> None:
    parameters = SamplingParameters(min_tokens=6)
    active = [needs_overrides(parameters, generated) for generated in (0, 5, 6, 7)]
    assert active == [True, True, False, False]


@each_case
def test_batched_parameter_equals_the_reference(parameter: Parameter, parameters: SamplingParameters) -> None:
    rows = tree(parameters).split()
    before = logits(len(rows))
    found = process_rows(before, rows)
    for line, row, processed in zip(before.tolist(), rows, found, strict=True):
        expected = torch.tensor(reference(line, row.parameters, PROMPT, (*OUTPUT, *row.path), ENDS))
        torch.testing.assert_close(processed, expected, rtol=1e-5, atol=1e-5)
    changes_logits = parameter.stage not in (Stage.GRAMMAR, Stage.END, Stage.REPORT)
    assert torch.equal(found, before) != changes_logits


@pytest.mark.parametrize("unsupported", [None, *sorted(BATCHED)])
def test_unsupported_parameter_falls_back_to_the_reference(unsupported: str | None) -> None:
    rest = UnsupportedParameters(BATCHED - {unsupported})
    assert not (unsupported and rest.none)
    for _, parameters in CASES:
        rows = [*tree(SamplingParameters()).split(), *tree(parameters).split()]
        before = logits(len(rows))
        for together, alone in ((process_rows, process), (edit_rows, edit)):
            expected = [
                alone(line, row.parameters, row.before) for line, row in zip(before, rows, strict=True)
            ]
            assert torch.equal(together(before, rows, rest), torch.stack(expected))


@pytest.mark.parametrize("unsupported", [None, *sorted(COMPILED)])
def test_native_choice_leaves_unlisted_parameters_to_torch(
    native: NativeLibrary, unsupported: str | None
) -> None:
    choice = NativeChoice(native, COMPILED - {unsupported})
    noise = NoiseRows(VOCABULARY, 64, native=native)
    truncated = SamplingParameters(temperature=0.8, top_k=9, repetition_penalty=1.2, logprobs=2)
    bases = SamplingParameters(), SamplingParameters(temperature=0.0), truncated
    for parameter, parameters in CASES:
        changed = {parameter.name: getattr(parameters, parameter.name)}
        requests = [tree(replace(base, **changed), seed) for base in bases for seed in range(8)]
        before = logits(sum(each.rows for each in requests))
        assert sample(before, requests, noise, choice) == sample(before, requests, noise), parameter.name
