"""Statistics of the noise. Seeds are fixed, so every test either always passes or always fails.

Bounds are such that a right generator passes about 9,999 of 10,000 choices of seeds.
"""

import math

import numpy as np
import numpy.typing as npt
import pytest

from ssd_serve.sampling.noise import log_exponential, log_exponential_of_words, random_words

DRAWS = 100_000
PROBABILITIES = np.array([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005])
Floats = npt.NDArray[np.floating]


def chi_square_bound(freedom: int) -> float:
    """About the 0.9999 quantile (Wilson and Hilferty's approximation)."""
    spread = 2.0 / (9.0 * freedom)
    return freedom * (1.0 - spread + 3.719 * math.sqrt(spread)) ** 3


def chi_square(observed: Floats, expected: Floats) -> float:
    return float((((observed - expected) ** 2) / expected).sum())


def draws(seeds: list[int], positions: list[int]) -> npt.NDArray[np.int64]:
    """Choices among 8 tokens: int64 [draws]."""
    scores = np.log(PROBABILITIES) - log_exponential(seeds, positions, 8)
    choices: npt.NDArray[np.int64] = scores.argmax(axis=1)
    return choices


@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_choices_follow_the_softmax_along_seeds_and_positions(along: str) -> None:
    many, one = list(range(DRAWS)), [12345] * DRAWS
    choices = draws(one, many) if along == "positions" else draws(many, one)
    counts = np.bincount(choices, minlength=8).astype(np.float64)
    assert chi_square(counts, PROBABILITIES * DRAWS) < chi_square_bound(7)


def test_choices_at_adjacent_positions_are_independent() -> None:
    positions = list(range(DRAWS))
    by_seed = [draws([seed] * DRAWS, positions) for seed in (40, 41)]
    joint = np.outer(PROBABILITIES, PROBABILITIES).ravel()
    for first, second in ((by_seed[0][:-1], by_seed[0][1:]), (by_seed[0], by_seed[1])):
        counts = np.bincount(first * 8 + second, minlength=64).astype(np.float64)
        assert chi_square(counts, joint * len(first)) < chi_square_bound(63)


def bins(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    return (words >> np.uint32(28)).astype(np.int64)


def test_neighbouring_words_are_independent() -> None:
    """Same token at the next position, the next seed and the next stream; the next token of the same row."""
    rows, width = 800, 125
    here = random_words([9] * rows, list(range(rows)), width)
    others = {
        "position": random_words([9] * rows, list(range(1, rows + 1)), width),
        "seed": random_words([10] * rows, list(range(rows)), width),
        "upper seed": random_words([9 + 2**32] * rows, list(range(rows)), width),
        "stream": random_words([9] * rows, list(range(rows)), width, stream=1),
        "token": random_words([9] * rows, list(range(rows)), width + 1)[:, 1:],
        "block": random_words([9] * rows, list(range(rows)), width + 4)[:, 4:],
    }
    for name, there in others.items():
        pairs = (bins(here) * 16 + bins(there)).ravel()
        counts = np.bincount(pairs, minlength=256).astype(np.float64)
        assert chi_square(counts, np.full(256, len(pairs) / 256)) < chi_square_bound(255), name


@pytest.mark.parametrize("probability", [1e-5, 1e-7, 1e-8, 2e-9])
def test_improbable_token_has_its_probability(probability: float) -> None:
    """Exact, not sampled: over all equally likely words, how probably does the token beat all others?

    The others' race ends at an exponential time of rate 1 - p; the token wins if E / p comes before that.
    """
    words = np.arange(min(2**32, int(40 * probability * 2**32) + 4000), dtype=np.uint32)
    times = np.exp(log_exponential_of_words(words).astype(np.float64)) / probability
    wins = float(np.exp(-(1.0 - probability) * times).sum()) / 2**32
    # At 2e-9 a token has only 8 words to win with; the midpoint rule leaves 0.06 % there.
    assert wins == pytest.approx(probability, rel=1e-3)


@pytest.mark.slow
def test_improbable_tokens_of_a_large_vocabulary_have_their_probability() -> None:
    """128,256 tokens, all but 16 below 1e-7, 0.0122 together; counts pooled over 2,400 rows."""
    vocabulary, head, rows = 128_256, 16, 2_400
    tail = np.linspace(0.9e-7, 1e-7, vocabulary - head, endpoint=False)
    probabilities = np.concatenate((np.full(head, (1.0 - tail.sum()) / head), tail))
    logits = np.log(probabilities).astype(np.float32)
    winners = np.empty(rows, dtype=np.int64)
    first_times = np.empty(rows)
    for start in range(0, rows, 4):
        noise = log_exponential([77] * 4, list(range(start, start + 4)), vocabulary)
        scores = logits - noise
        winners[start : start + 4] = scores.argmax(axis=1)
        first_times[start : start + 4] = np.exp(-scores[:, head:].max(axis=1).astype(np.float64))
    wins = int((winners >= head).sum())
    expected = rows * float(tail.sum())
    assert abs(wins - expected) < 3.9 * math.sqrt(expected)
    # The whole race of the tail, in every row: its end is exponential with rate tail.sum().
    scaled = np.sort(1.0 - np.exp(-first_times * tail.sum()))
    distance = np.abs(scaled - (np.arange(rows) + 0.5) / rows).max() + 0.5 / rows
    assert distance * math.sqrt(rows) < 2.23  # Kolmogorov-Smirnov, 0.9999
