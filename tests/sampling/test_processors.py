"""Logits processors against a slow reference that follows the documented definitions word for word."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ssd_serve.base.messages import SamplingParameters
from ssd_serve.sampling.parameters import needs_counts
from ssd_serve.sampling.processors import RowContext, TokenCounts, keep_top_k, keep_top_p, process
from tests.examples import examples

VOCABULARY = 12
NOWHERE = RowContext()
TOKENS = st.integers(0, VOCABULARY - 1)
# Multiples of 1/2 make equal logits common.
LOGITS = st.lists(st.integers(-12, 12).map(lambda n: n / 2), min_size=VOCABULARY, max_size=VOCABULARY)


class NearBoundaryError(Exception):
    """Rounding could decide whether a token stays: no case for a comparison."""


def reference(
    logits: Sequence[float],
    parameters: SamplingParameters,
    prompt: Sequence[int],
    output: Sequence[int],
    eos: Sequence[int],
) -> list[float]:
    row = list(logits)
    for token in range(len(row)):
        if parameters.allowed_token_ids is not None and token not in parameters.allowed_token_ids:
            row[token] = -math.inf
        if any((*output, token)[-len(word) :] == word for word in parameters.bad_words):
            row[token] = -math.inf
    for token, bias in parameters.logit_bias.items():
        row[token] += bias
    if len(output) < parameters.min_tokens:
        for token in (*eos, *parameters.stop_token_ids):
            row[token] = -math.inf
    for token in range(len(row)):
        if token in prompt or token in output:
            penalty = parameters.repetition_penalty
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        row[token] -= parameters.frequency_penalty * list(output).count(token)
        row[token] -= parameters.presence_penalty * (token in output)
    if parameters.temperature == 0:
        return row
    row = [value / parameters.temperature for value in row]
    if parameters.min_p > 0:
        bar = max(row) + math.log(parameters.min_p)
        if any(abs(value - bar) < 1e-4 for value in row) and parameters.min_p < 1:
            raise NearBoundaryError
        row = [value if value >= bar else -math.inf for value in row]
    if parameters.top_k > 0:
        kept = sorted(range(len(row)), key=lambda token: (-row[token], token))[: parameters.top_k]
        row = [value if token in kept else -math.inf for token, value in enumerate(row)]
    return reference_top_p(row, parameters.top_p) if parameters.top_p < 1 else row


def reference_top_p(row: Sequence[float], top_p: float) -> list[float]:
    weights = [math.exp(value - max(row)) for value in row]
    total, before = sum(weights), 0.0
    result = [-math.inf] * len(row)
    for token in sorted(range(len(row)), key=lambda token: (-row[token], token)):
        if abs(before - top_p) < 1e-5:
            raise NearBoundaryError
        if before < top_p:
            result[token] = row[token]
        before += weights[token] / total
    return result


PARAMETERS = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 3, 11, 12, 50]),
    top_p=st.sampled_from([1.0, 0.97, 0.6, 0.1]),
    min_p=st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.25, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.5, -0.25]),
    frequency_penalty=st.sampled_from([0.0, 0.375, -0.125]),
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([-100.0, -1.0, 2.5]), max_size=3),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.lists(TOKENS, max_size=2).map(tuple),
    allowed_token_ids=st.none() | st.lists(TOKENS, min_size=1, max_size=9).map(tuple),
    bad_words=st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=5).map(tuple),
)


@given(LOGITS, PARAMETERS, st.lists(TOKENS, max_size=6), st.lists(TOKENS, max_size=6), st.integers(0, 6))
@settings(max_examples=examples(400))
def test_processing_equals_the_reference(
    logits: list[float], parameters: SamplingParameters, prompt: list[int], output: list[int], split: int
) -> None:
    """Wherever the output is cut into a counted part and the row's path."""
    split = min(split, len(output))
    try:
        expected = reference(logits, parameters, prompt, output, eos=[0])
    except NearBoundaryError:
        assume(False)
        raise
    given_row = torch.tensor(logits)
    counts, ends = TokenCounts(prompt, output[:split]), (0, *parameters.stop_token_ids)
    row = process(given_row, parameters, RowContext(counts, output[split:], len(output), ends))
    np.testing.assert_allclose(row.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert given_row.tolist() == logits, "the given logits must not change"


@given(st.lists(TOKENS, max_size=8), st.lists(st.lists(TOKENS, max_size=5), max_size=5), st.lists(TOKENS))
def test_incremental_token_counts_equal_rebuilt_counts(
    prompt: list[int], rounds: list[list[int]], path: list[int]
) -> None:
    grown = TokenCounts(prompt)
    output: list[int] = []
    for round_tokens in rounds:
        grown.extend(round_tokens)
        output += round_tokens
    before = [array.tolist() for array in grown.with_path(())]
    tokens, counts = grown.with_path(path)
    assert len(set(tokens.tolist())) == len(tokens)
    assert dict(zip(tokens.tolist(), counts.tolist(), strict=True)) == {
        token: (output + path).count(token) for token in {*prompt, *output, *path}
    }
    assert [array.tolist() for array in grown.with_path(())] == before, "a path must leave no trace"


def test_token_counts_grow_beyond_initial_capacity() -> None:
    counts = TokenCounts([1, 2], range(1000))
    tokens, times = counts.with_path([999, 5000])
    assert len(tokens) == 1001
    assert times[tokens.tolist().index(999)] == 2
    assert times[tokens.tolist().index(5000)] == 1


def test_top_k_keeps_exactly_k_and_lowest_ids() -> None:
    row = keep_top_k(torch.tensor([1.0, 2.0, 1.0, 1.0, 3.0, 1.0]), 4, NOWHERE)
    assert torch.isfinite(row).tolist() == [True, True, True, False, True, False]


def test_top_p_keeps_lowest_ids_and_at_least_one_token() -> None:
    row = torch.zeros(8)
    assert torch.isfinite(keep_top_p(row, 0.5, NOWHERE)).tolist() == [True] * 4 + [False] * 4
    many = torch.isfinite(keep_top_p(torch.zeros(8192), 0.5, NOWHERE))
    assert many.sum() == 4096
    assert bool(many[:4096].all())
    assert torch.isfinite(keep_top_p(row, 0.0, NOWHERE)).tolist() == [True] + [False] * 7
    assert torch.isfinite(keep_top_p(torch.full((8,), -torch.inf), 0.5, NOWHERE)).tolist() == [False] * 8


def test_top_p_of_a_large_vocabulary_is_the_smallest_set() -> None:
    row = torch.randn(50_000, generator=torch.Generator().manual_seed(1)) * 3
    for top_p in (0.3, 0.9, 0.999):
        kept = torch.isfinite(keep_top_p(row, top_p, NOWHERE))
        probabilities = torch.softmax(row.to(torch.float64), 0)
        mass = float(probabilities[kept].sum())
        assert mass >= top_p - 1e-6
        assert mass - float(probabilities[kept].min()) < top_p + 1e-6
        assert float(probabilities[kept].min()) >= float(probabilities[~kept].max())


def test_nan_logit_counts_as_masked() -> None:
    row = process(torch.tensor([math.nan, 1.0, 0.0]), SamplingParameters(top_k=2), NOWHERE)
    assert row.tolist() == [-math.inf, 1.0, 0.0]


def test_token_ids_outside_the_vocabulary_are_ignored() -> None:
    parameters = SamplingParameters(logit_bias={99: 5.0, -1: 3.0}, min_tokens=2, stop_token_ids=(77, 1))
    row = process(torch.zeros(3), parameters, RowContext(ends=(50, *parameters.stop_token_ids)))
    assert row.tolist() == [0.0, -math.inf, 0.0]


def test_penalties_without_token_counts_are_an_error() -> None:
    with pytest.raises(ValueError, match="counts"):
        process(torch.zeros(3), SamplingParameters(presence_penalty=1.0), NOWHERE)


FEW = st.integers(0, 2)  # few tokens: bad words are often begun


@given(
    st.lists(st.lists(FEW, min_size=1, max_size=4).map(tuple), min_size=1, max_size=4),
    st.lists(FEW, max_size=8),
    st.lists(FEW, max_size=8),
    st.integers(0, 8),
)
@settings(max_examples=examples(300))
def test_bad_words_mask_only_their_last_token(
    words: list[tuple[int, ...]], prompt: list[int], output: list[int], split: int
) -> None:
    parameters = SamplingParameters(temperature=0.0, bad_words=tuple(words))
    split = min(split, len(output))
    counts = TokenCounts(prompt, output[:split])
    row = process(torch.zeros(3), parameters, RowContext(counts, output[split:], len(output)))
    completed = [any((*output, token)[-len(word) :] == word for word in words) for token in range(3)]
    assert torch.isinf(row).tolist() == completed


def test_bad_word_begun_in_the_prompt_may_be_completed() -> None:
    parameters = SamplingParameters(temperature=0.0, bad_words=((1, 2),))
    assert process(torch.zeros(3), parameters, RowContext(TokenCounts([1]))).tolist() == [0.0, 0.0, 0.0]
    masked = process(torch.zeros(3), parameters, RowContext(TokenCounts([0], [1]), (), 1))
    assert masked.tolist() == [0.0, 0.0, -math.inf]


def test_single_token_bad_words_need_no_token_counts() -> None:
    parameters = SamplingParameters(temperature=0.0, bad_words=((1,), (9,), ()), allowed_token_ids=(0, 1, 7))
    assert not needs_counts(parameters)
    assert process(torch.zeros(3), parameters, NOWHERE).tolist() == [0.0, -math.inf, -math.inf]
    with pytest.raises(ValueError, match="counts"):
        process(torch.zeros(3), SamplingParameters(bad_words=((1, 2),)), NOWHERE)
