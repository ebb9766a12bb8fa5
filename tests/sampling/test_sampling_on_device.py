"""Sampling, noise and ranking on a pretended GPU equal those on the CPU."""

import numpy as np
import pytest
import torch

from ssd_serve.base.messages import SamplingParameters
from ssd_serve.sampling.choice import sample
from ssd_serve.sampling.noise import log_exponential, random_words, random_words_torch
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.sampling.processors import TokenCounts
from ssd_serve.sampling.ranking import draft_scores, rank_scores
from ssd_serve.sampling.rows import SamplingRows
from tests.pretended_device import DEVICE, pretended_device

VOCABULARY = 301
KINDS = {
    "greedy": SamplingParameters(temperature=0.0),
    "plain": SamplingParameters(temperature=1.0),
    "temperature": SamplingParameters(temperature=0.7),
    "top-k": SamplingParameters(temperature=1.5, top_k=5),
    "top-p": SamplingParameters(temperature=1.0, top_p=0.8),
    "min-p": SamplingParameters(temperature=0.9, min_p=0.02),
    "penalties": SamplingParameters(
        temperature=0.7, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.25
    ),
    "logprobs": SamplingParameters(temperature=0.8, logprobs=3),
    "greedy logprobs": SamplingParameters(temperature=0.0, logprobs=0),
    "bias": SamplingParameters(temperature=1.0, logit_bias={3: 4.0, 1000: 1.0}),
    "min-tokens": SamplingParameters(temperature=1.0, min_tokens=9, stop_token_ids=(7, 8)),
    "bad words": SamplingParameters(temperature=1.0, bad_words=((5, 6), (7,))),
    "allowed": SamplingParameters(temperature=1.0, allowed_token_ids=(1, 2, 300, 4000)),
}


def rows_of(parameters: SamplingParameters, seed: int) -> SamplingRows:
    counts = TokenCounts((3, 5, 8), (5, 5, 9))
    return SamplingRows(
        parameters, seed, 40, counts, generated=3, tokens=(4, 6, 7), parents=(-1, 0, -1), depths=(1, 2, 1)
    )


def logits_of(rows: int) -> torch.Tensor:
    return 3 * torch.randn((rows, VOCABULARY), generator=torch.Generator().manual_seed(rows))


def test_device_choices_and_logprobs_equal_cpu() -> None:
    requests = [rows_of(each, seed) for seed, each in enumerate(KINDS.values())]
    logits = logits_of(4 * len(requests))
    expected = sample(logits, requests, NoiseRows(VOCABULARY, 64))
    with pretended_device():
        found = sample(logits.to(DEVICE), requests, NoiseRows(VOCABULARY, 64, DEVICE))
    assert found.choices == expected.choices
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.chosen == pytest.approx(theirs.chosen, abs=1e-5)
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_device_sampling_reads_back_once() -> None:
    kinds = [each for each in KINDS.values() if each.logprobs is None]
    requests = [rows_of(each, seed) for seed, each in enumerate(kinds)]
    with pretended_device() as reads:
        logits = logits_of(4 * len(requests)).to(DEVICE)
        noise = NoiseRows(VOCABULARY, 64, DEVICE)
        reads.clear()
        sample(logits, requests, noise)
        assert reads == ["_to_copy"]


def test_device_noise_has_equal_words() -> None:
    seeds, positions = [(1 << 64) - 1, 0, 12345], [7, 0, 1 << 20]
    expected = log_exponential(seeds, positions, VOCABULARY)
    with pretended_device() as reads:
        words = random_words_torch(seeds, positions, VOCABULARY, DEVICE)
        noise = NoiseRows(VOCABULARY, 2, DEVICE)  # fewer than requested: in parts
        reads.clear()
        rows = noise.rows([*seeds, None], [*positions, 1])
        assert reads == []
        assert {words.device, noise.table.device, rows.device} == {torch.device(DEVICE)}
        assert words.tolist() == random_words(seeds, positions, VOCABULARY).tolist()
        np.testing.assert_allclose(rows[:3].cpu().numpy(), expected, rtol=2e-7, atol=1e-7)
        assert not rows[3].cpu().any()


@pytest.mark.parametrize("many", [False, True])
def test_device_ranking_reads_back_once(many: bool) -> None:
    logits = logits_of(4)
    temperatures = torch.tensor([0.7, 0.0, 1.0, 1.3])
    scales = torch.tensor([0.5, 1.0, 0.8, 1.2]) if many else 0.7
    seeds, positions = [1, None, 2, 3], [5, 5, 6, 7]

    def ranking(device: str, reads: list[str]) -> tuple[np.ndarray, ...]:
        noise = NoiseRows(VOCABULARY, 64, device)
        reads.clear()
        rows = noise.rows(seeds, positions)
        scores = draft_scores(logits.to(device), temperatures.to(device) if many else 0.7, rows)
        assert scores.device == torch.device(device)
        return rank_scores(scores, scales, 5)

    expected = ranking("cpu", [])
    with pretended_device() as reads:
        found = ranking(DEVICE, reads)
        assert reads == ["_to_copy"]
    assert np.array_equal(found[0], expected[0])
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_device_ranking_of_masked_tokens() -> None:
    scores = logits_of(2)
    scores[:, ::2] = -torch.inf
    expected = rank_scores(scores, 1.0, 4)
    with pretended_device():
        found = rank_scores(scores.to(DEVICE), 1.0, 4)
    assert np.array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.expected_score, expected.expected_score, rtol=1e-5)
