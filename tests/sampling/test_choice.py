"""The choice of tokens against a slow reference, alone and in batches."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_serve.base.messages import SamplingParameters
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.sampling.choice import (
    lowest_argmax,
    lowest_argmax_on_device,
    rows_logprobs,
    sample,
    token_logprobs,
)
from ssd_serve.sampling.native_choice import NativeChoice
from ssd_serve.sampling.noise import log_exponential
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.sampling.processors import RowContext, TokenCounts, process
from ssd_serve.sampling.rows import SamplingRows
from tests.examples import examples
from tests.sampling.test_native_choice import REAL, VOCABULARY, awkward_logits, requests


def reference_choice(logits: torch.Tensor, row: SamplingRows) -> int:
    """Token by token: strictly better ones win, so that the lowest id keeps a tie."""
    values = process(logits, row.parameters, row.before).tolist()
    if row.parameters.temperature > 0:
        noise = log_exponential([row.seed], [row.position], len(values))[0]
        values = [float(np.float32(value) - one) for value, one in zip(values, noise, strict=True)]
    best = 0
    for token, value in enumerate(values):
        if value > values[best]:
            best = token
    return best


@given(st.lists(requests(), min_size=1, max_size=4), st.integers(0, 1000))
@settings(max_examples=examples(100))
def test_choice_is_independent_of_the_batch_and_equals_the_reference(
    trees: list[SamplingRows], seed: int
) -> None:
    rows = [row for tree in trees for row in tree.split()]
    logits = awkward_logits(len(rows), VOCABULARY, seed).nan_to_num(-5.0)
    noise = NoiseRows(VOCABULARY, capacity=4)
    together = sample(logits, rows, noise)
    assert sample(logits, trees, noise).choices == together.choices
    for index, row in enumerate(rows):
        alone = sample(logits[index : index + 1], [row], noise)
        assert alone.choices == [together.choices[index]] == [reference_choice(logits[index], row)]
        assert repr(alone.logprobs) == repr([together.logprobs[index]])


@pytest.mark.parametrize("vocabulary", [1000, 4099])
def test_choice_is_independent_of_the_batch_at_real_vocabulary_sizes(vocabulary: int) -> None:
    logits = torch.randn(24, vocabulary, generator=torch.Generator().manual_seed(3)) * 4
    rows = [SamplingRows(REAL[i % 8], i // 8, i, TokenCounts([1], [2, 3]), (4,), 3, (0,)) for i in range(24)]
    noise = NoiseRows(vocabulary, capacity=64)
    together = sample(logits, rows, noise)
    alone = [sample(logits[i : i + 1], [row], noise).choices[0] for i, row in enumerate(rows)]
    assert together.choices == alone


@pytest.mark.parametrize("parameters", [SamplingParameters(temperature=0.7), SamplingParameters(top_k=6)])
def test_samples_follow_the_processed_distribution(parameters: SamplingParameters) -> None:
    number = 5000
    logits = torch.tensor([2.0, 1.5, 1.0, 1.0, 0.5, 0.0, 0.0, -1.0])
    rows = [SamplingRows(parameters, 99, position) for position in range(number)]
    choices = sample(logits.expand(number, 8), rows, NoiseRows(8, capacity=512)).choices
    expected = torch.softmax(process(logits, parameters, RowContext()), 0).numpy() * number
    counts = np.bincount(choices, minlength=8)
    possible = expected > 0
    assert not counts[~possible].any()
    distance = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert distance < 31.0  # 0.9999 of chi-square with 7 degrees of freedom is 29.9


@pytest.mark.parametrize("on_device", [False, True])
def test_argmax_ties_go_to_the_lowest_id_and_nan_is_never_chosen(on_device: bool) -> None:
    def argmax(scores: torch.Tensor) -> list[int]:
        return lowest_argmax_on_device(scores).tolist() if on_device else lowest_argmax(scores)

    for width in (1, 3, 64, 1000):
        scores = torch.zeros(4, width)
        scores[1, width // 2 :] = 1.0
        scores[2, -1] = 1.0
        scores[3] = -torch.inf
        assert argmax(scores) == [0, width // 2, width - 1, 0]
    nan = math.nan
    scores = torch.tensor([[nan, 1.0, 2.0], [0.0, nan, -1.0], [nan, nan, nan], [1.0, 2.0, 3.0]])
    assert argmax(scores) == [2, 0, 0, 2]


def test_sampling_does_not_modify_logits() -> None:
    logits = torch.randn(8, VOCABULARY, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    for temperature in (0.0, 1.0):
        parameters = SamplingParameters(temperature=temperature, logit_bias={1: 2.0})
        rows = [SamplingRows(parameters, 1, index) for index in range(8)]
        sample(logits, rows, NoiseRows(VOCABULARY, 8))
        assert torch.equal(logits, before)


def test_min_tokens_counts_the_depth_of_tree_rows(native: NativeLibrary) -> None:
    parameters = SamplingParameters(temperature=0.0, min_tokens=4)
    tree = SamplingRows(
        parameters, 1, 9, generated=2, eos=(3,), tokens=(5, 6, 7), parents=(-1, 0, 1), depths=(1, 2, 3)
    )
    logits = torch.zeros(4, 8)
    logits[:, 3], logits[:, 6] = 2.0, 1.0
    for choice in (None, NativeChoice(native)):
        assert sample(logits, [tree], NoiseRows(8, 4), choice).choices == [6, 6, 3, 3]


def test_logprobs_exclude_noise() -> None:
    row = torch.tensor([0.0, 1.0, 1.0, -torch.inf, 2.0])
    total = math.log(1 + 2 * math.e + math.e**2)
    result = token_logprobs(row, 0, 3)
    assert result.chosen == pytest.approx(-total)
    assert [token for token, _ in result.top] == [4, 1, 2]
    assert [value for _, value in result.top] == pytest.approx([2 - total, 1 - total, 1 - total], abs=1e-6)
    none = token_logprobs(row, 1, 0)
    assert none.chosen == pytest.approx(1 - total, abs=1e-6)
    assert none.top == ()
    assert [token for token, _ in token_logprobs(row, 0, 50).top] == [4, 1, 2, 0]


def test_prompt_logprobs_use_unprocessed_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]] * 2)
    parameters = SamplingParameters(temperature=0.0, logprobs=2)
    rows = [SamplingRows(parameters, 1, 5, known=3), SamplingRows(parameters, 1, 6)]
    found = sample(logits, rows, NoiseRows(4, capacity=2)).logprobs
    expected = torch.log_softmax(logits[0], 0).tolist()
    assert [None if each is None else each.chosen for each in found] == pytest.approx(
        [expected[3], expected[1]]
    )
    assert found[0] is not None
    assert [token for token, _ in found[0].top] == [1, 2]
    assert [value for _, value in found[0].top] == pytest.approx(expected[1:3])


@given(
    st.lists(
        st.tuples(st.integers(0, VOCABULARY - 1), st.integers(0, VOCABULARY + 3)), min_size=1, max_size=6
    ),
    st.integers(0, 1000),
)
def test_batched_logprobs_equal_single_rows(cases: list[tuple[int, int]], seed: int) -> None:
    logits = awkward_logits(len(cases), VOCABULARY, seed)
    choices, tops = [choice for choice, _ in cases], [top for _, top in cases]
    found = rows_logprobs(logits, choices, tops)
    expected = [token_logprobs(row, choice, top) for row, (choice, top) in zip(logits, cases, strict=True)]
    assert repr(found) == repr(expected)
