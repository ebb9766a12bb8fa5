"""The drafter's scores and their ranking, by torch and by the compiled kernel."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_serve.base.messages import SamplingParameters
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.sampling.choice import sample
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.sampling.ranking import NativeRanking, SamplingKeys, draft_scores, rank_children, rank_scores
from ssd_serve.sampling.rows import SamplingRows
from tests.examples import examples

TEMPERATURES = (0.0, 0.3, 1.0, 1.7)
SCALES = (0.2, 0.7, 1.0, 5.0)


def test_draft_scores_of_equal_logits_predict_the_choice() -> None:
    logits = torch.randn(40, 512, generator=torch.Generator().manual_seed(5)) * 3
    temperatures = [0.0, 0.7, 1.0, 1.5] * 10
    rows = [SamplingRows(SamplingParameters(temperature=t), 8, i) for i, t in enumerate(temperatures)]
    noise = NoiseRows(512, 64)
    seeds = [None if t == 0 else 8 for t in temperatures]
    scores = draft_scores(logits, torch.tensor(temperatures), noise.rows(seeds, list(range(40))))
    best = rank_scores(scores, 1.0, 1).tokens[:, 0].tolist()
    assert best == sample(logits, rows, noise).choices
    assert torch.equal(draft_scores(logits, 0.0, None), logits)


def test_ranking_returns_the_calibrated_softmax() -> None:
    scores = torch.randn(5, 300, generator=torch.Generator().manual_seed(6)) * 3
    scores[2, 10:] = -torch.inf
    for scales in (0.7, torch.tensor([0.5, 0.7, 1.0, 1.5, 2.0])):
        tokens, log_probs, top, expected = rank_scores(scores, scales, 4)
        assert tokens.dtype == np.int32
        assert log_probs.dtype == np.float32
        assert tokens.shape == log_probs.shape == top.shape == (5, 4)
        scale = torch.as_tensor(scales).reshape(-1, 1).to(torch.float64)
        reference = torch.log_softmax(scores.to(torch.float64) / scale, 1)
        values, ids = reference.topk(4, dim=1)
        assert np.array_equal(tokens, ids.numpy())
        np.testing.assert_allclose(log_probs, values.numpy(), atol=1e-4)
        np.testing.assert_allclose(top, scores.gather(1, ids).numpy(), rtol=1e-5)
        mean = (reference.exp() * scores.to(torch.float64).clamp(min=-1e30)).sum(1)
        np.testing.assert_allclose(expected, mean.numpy(), atol=1e-4)


def keys_of(rows: int, seed: int) -> SamplingKeys:
    rng = np.random.default_rng(seed)
    temperatures: list[float] = rng.choice(TEMPERATURES, rows).tolist()
    seeds = [int(rng.integers(3)) if temperature else None for temperature in temperatures]
    return SamplingKeys(seeds, rng.integers(0, 4, rows).tolist(), temperatures)


@pytest.mark.parametrize("vocabulary", [1, 16, 17, 4096])
@pytest.mark.parametrize("spread", [0.5, 4.0, 30.0])
def test_native_ranking_equals_torch(native: NativeLibrary, vocabulary: int, spread: float) -> None:
    """Tokens and scores to the bit; sums are taken in another order."""
    rows, fan_out = 9, min(16, vocabulary)
    logits = spread * torch.randn((rows, vocabulary), generator=torch.Generator().manual_seed(vocabulary))
    keys, noise = keys_of(rows, vocabulary), NoiseRows(vocabulary, 64)
    scales = [SCALES[row % 4] for row in range(rows)]
    expected = rank_children(logits, keys, noise, scales, fan_out)
    found = rank_children(logits, keys, noise, scales, fan_out, NativeRanking(native))
    assert np.array_equal(found.tokens, expected.tokens)
    plain = draft_scores(logits, torch.tensor(keys.temperatures), noise.rows(*keys[:2]))
    assert np.array_equal(found.scores, plain.gather(1, torch.from_numpy(found.tokens).long()).numpy())
    np.testing.assert_allclose(found.log_probs, expected.log_probs, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(found.expected_score, expected.expected_score, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("count", [1, 31, 33, 500])
def test_ranking_of_some_tokens_equals_that_of_all(native: NativeLibrary, count: int) -> None:
    rows, vocabulary, fan_out = 7, 1000, min(6, count)
    proposed = np.sort(np.random.default_rng(count).choice(vocabulary, count, replace=False)).astype(np.int32)
    logits = 4 * torch.randn((rows, count), generator=torch.Generator().manual_seed(count))
    whole = torch.full((rows, vocabulary), -torch.inf)
    whole[:, torch.from_numpy(proposed).long()] = logits
    keys, ranking, scales = keys_of(rows, count), NativeRanking(native), [0.5 + row for row in range(rows)]
    found = ranking.rank_proposed(logits, keys, scales, fan_out, proposed)
    expected = rank_children(whole, keys, NoiseRows(vocabulary, 64, native=native), scales, fan_out, ranking)
    assert np.array_equal(found.tokens, expected.tokens)
    assert np.array_equal(found.scores, expected.scores)
    np.testing.assert_allclose(found.log_probs, expected.log_probs, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(found.expected_score, expected.expected_score, rtol=2e-5, atol=2e-5)
    with pytest.raises(ValueError, match="are not those of"):
        ranking.rank_proposed(logits, keys, scales, fan_out, proposed[1:])


@given(st.integers(0, 10_000), st.integers(1, 70), st.integers(1, 20), st.integers(1, 5))
@settings(max_examples=examples(150), deadline=None)
def test_ranking_ties_go_to_the_lowest_tokens(
    native: NativeLibrary, seed: int, vocabulary: int, fan_out: int, rows: int
) -> None:
    rng, fan_out = np.random.default_rng(seed), min(fan_out, vocabulary)
    values = rng.integers(-4, 5, (rows, vocabulary)) / 2
    strange = rng.random((rows, vocabulary))
    values[strange < 0.1], values[strange > 0.8] = math.nan, -math.inf
    logits = torch.from_numpy(values).float()
    keys, scales = SamplingKeys([None] * rows, [0] * rows, [0.0] * rows), [0.5] * rows
    ranking = NativeRanking(native)
    found = rank_children(logits, keys, NoiseRows(vocabulary, 2), scales, fan_out, ranking)
    for row, ranks in zip(np.nan_to_num(values, nan=-math.inf, neginf=-math.inf), found.tokens, strict=True):
        assert ranks.tolist() == np.lexsort((np.arange(vocabulary), -row))[:fan_out].tolist()
    assert np.isfinite(found.log_probs).all()
    assert np.isfinite(found.expected_score).all()


def test_native_ranking_is_independent_of_batch_and_threads(native: NativeLibrary) -> None:
    logits = 3 * torch.randn((12, 1000), generator=torch.Generator().manual_seed(1))
    keys, noise, ranking = keys_of(12, 1), NoiseRows(1000, 64), NativeRanking(native)
    scales, threads = [1.3] * 12, torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = rank_children(logits, keys, noise, scales, 8, ranking)
    finally:
        torch.set_num_threads(threads)
    for row in range(12):
        one = SamplingKeys([keys.seeds[row]], [keys.positions[row]], [keys.temperatures[row]])
        alone = rank_children(logits[row : row + 1], one, noise, scales[:1], 8, ranking)
        assert all(np.array_equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


def test_ranking_more_rows_than_the_noise_cache_holds(native: NativeLibrary) -> None:
    logits = torch.randn((6, 50), generator=torch.Generator().manual_seed(2))
    keys, scales = SamplingKeys([1] * 6, list(range(6)), [1.0] * 6), [1.0] * 6
    few, many = NoiseRows(50, 2), NoiseRows(50, 64)
    found = rank_children(logits, keys, few, scales, 4, NativeRanking(native))
    assert np.array_equal(found.tokens, rank_children(logits, keys, many, scales, 4).tokens)


def test_ranking_refuses_impossible_fan_out(native: NativeLibrary) -> None:
    keys = SamplingKeys([None], [0], [0.0])
    for fan_out, vocabulary in ((9, 8), (0, 8), (4, 9)):
        with pytest.raises(ValueError, match="cannot rank"):
            rank_children(
                torch.zeros(1, 8), keys, NoiseRows(vocabulary, 2), [1.0], fan_out, NativeRanking(native)
            )
