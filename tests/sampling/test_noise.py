"""Shared noise: known vectors, equal words in numpy, torch and C, distribution of choices, cache of rows."""

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.sampling.noise import (
    Float32Array,
    log_exponential,
    log_exponential_of_words,
    log_exponential_torch,
    philox,
    random_words,
    random_words_torch,
)
from ssd_serve.sampling.noise_rows import NativeNoise, NoiseRows
from tests.examples import examples

WORD_64 = st.integers(min_value=0, max_value=2**64 - 1)
WORD_32 = st.integers(min_value=0, max_value=2**32 - 1)


def reference_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as the paper writes it, one block, in plain integers."""
    x, (k0, k1) = list(counter), key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * x[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * x[2], 2**32)
        x = [high1 ^ x[1] ^ k0, low1, high0 ^ x[3] ^ k1, low0]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return x


def reference_word(seed: int, position: int, token: int) -> int:
    return reference_philox([position, token // 4, 0, 0], [seed % 2**32, seed >> 32])[token % 4]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_matches_random123_vectors(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox(
        np.array(counter, dtype=np.uint64).reshape(4, 1, 1), np.array(key, dtype=np.uint64).reshape(2, 1, 1)
    )
    assert words.ravel().tolist() == expected
    assert reference_philox(counter, key) == expected


@given(WORD_64, WORD_32, st.integers(1, 40))
@settings(max_examples=examples(50))
def test_philox_words_match_the_definition(seed: int, position: int, vocabulary: int) -> None:
    expected = [reference_word(seed, position, token) for token in range(vocabulary)]
    assert random_words([seed], [position], vocabulary)[0].tolist() == expected
    assert random_words_torch([seed], [position], vocabulary, "cpu")[0].tolist() == expected


@pytest.mark.parametrize("vocabulary", [1, 5, 4097, 32001])
def test_noise_of_numpy_and_torch_is_equal_and_independent_of_the_batch(vocabulary: int) -> None:
    seeds, positions = [0, 2**64 - 1, 0x9E3779B97F4A7C15, 7], [0, 2**32 - 1, 4095, 131072]
    words, noise = random_words(seeds, positions, vocabulary), log_exponential(seeds, positions, vocabulary)
    assert words.dtype == np.uint32
    assert np.array_equal(words, random_words_torch(seeds, positions, vocabulary, "cpu").numpy())
    by_torch = log_exponential_torch(seeds, positions, vocabulary, "cpu").numpy()
    np.testing.assert_allclose(noise, by_torch, rtol=3e-7, atol=1e-7)
    for row, seed, position in zip(noise, seeds, positions, strict=True):
        assert np.array_equal(row, log_exponential([seed], [position], vocabulary)[0])


def test_noise_is_finite_and_exact_at_both_ends() -> None:
    words = [0, 1, 2, 3, 1000, 2**24 + 1, 2**31, 2**32 - 512, 2**32 - 129, 2**32 - 2, 2**32 - 1]
    values = log_exponential_of_words(np.array(words, dtype=np.uint32))
    for word, value in zip(words, values.tolist(), strict=True):
        w = min((word + 0.5) / 2**32, 1 - 2.0**-24)
        assert value == pytest.approx(math.log(-math.log1p(-w)), rel=2.0**-23)
    assert np.all(np.diff(values) >= 0)
    assert len(set(log_exponential_of_words(np.arange(4096, dtype=np.uint32)).tolist())) == 4096


def test_noise_of_seed_none_is_zero() -> None:
    noise = NoiseRows(101, capacity=4)
    rows = noise.rows([5, None, 5, 6, 5], [1, 1, 2, 1, 1])
    assert rows.dtype == torch.float32
    expected = log_exponential([5, 5, 6, 5], [1, 2, 1, 1], 101)
    assert np.array_equal(rows[[0, 2, 3, 4]].numpy(), expected)
    assert not rows[1].any()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=12), st.integers(1, 6))
@settings(max_examples=examples(60))
def test_noise_cache_never_changes_a_row(keys: list[tuple[int, int]], capacity: int) -> None:
    noise = NoiseRows(9, capacity)
    found = [noise.rows([seed], [position])[0] for seed, position in keys]  # survive evictions
    if keys:
        seeds, positions = [seed for seed, _ in keys], [position for _, position in keys]
        expected = torch.from_numpy(log_exponential(seeds, positions, 9))
        assert torch.equal(torch.stack(found), expected)
        assert torch.equal(noise.rows(seeds, positions), expected)


def test_noise_cache_refuses_empty_sizes() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        NoiseRows(0, 4)
    with pytest.raises(ValueError, match="at least 1"):
        NoiseRows(4, 0)


def rows(native: NativeLibrary, seeds: list[int], positions: list[int], vocabulary: int) -> Float32Array:
    table = torch.full((len(seeds) + 1, vocabulary), torch.nan)
    NativeNoise(native).fill(table, range(1, len(seeds) + 1), list(zip(seeds, positions, strict=True)))
    assert bool(torch.isnan(table[0]).all()), "other lines must not change"
    return table[1:].numpy()


def steps_apart(ours: Float32Array, theirs: Float32Array) -> np.ndarray:
    """Distance in float32 steps between numbers of equal sign; 0: the same bits."""
    return np.abs(ours.view(np.int32).astype(np.int64) - theirs.view(np.int32))


@given(WORD_64, WORD_32, st.integers(1, 140))
@settings(max_examples=examples(100))
def test_native_noise_equals_the_reference(
    native: NativeLibrary, seed: int, position: int, vocabulary: int
) -> None:
    ours = rows(native, [3, seed], [1, position], vocabulary)
    assert steps_apart(ours, log_exponential([3, seed], [1, position], vocabulary)).max() <= 1
    assert np.array_equal(ours[1:], rows(native, [seed], [position], vocabulary))


def test_native_logarithms_equal_numpy_but_for_rare_last_bits(native: NativeLibrary) -> None:
    seeds, positions, vocabulary = [2**63 + 9] * 64, list(range(64)), 32001
    apart = steps_apart(
        rows(native, seeds, positions, vocabulary), log_exponential(seeds, positions, vocabulary)
    )
    assert apart.max() <= 1
    assert np.count_nonzero(apart) <= 4


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(1, 3)), max_size=4)),
    st.integers(1, 9),
    st.booleans(),
)
@settings(max_examples=examples(100))
def test_noise_cache_returns_requested_rows(
    native: NativeLibrary, calls: list[list[tuple[int, int, int]]], capacity: int, compiled: bool
) -> None:
    noise = NoiseRows(9, capacity, native=native if compiled else None)
    for spans in calls:
        keys = {(seed, first + index) for seed, first, count in spans for index in range(count)}
        lines = noise.lines(spans)
        assert (lines is None) == (len(keys) > capacity)
        for (seed, first, count), found in zip(spans, lines or [], strict=lines is not None):
            for index, line in enumerate(found):
                expected = log_exponential([seed], [first + index], 9)[0]
                assert steps_apart(noise.table[line].numpy(), expected).max() <= 1
            assert len(found) == count
    assert not noise.table[0].any()


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


@pytest.mark.parametrize("probability", [1e-7, 2e-9])
def test_improbable_token_has_its_probability(probability: float) -> None:
    """Computes the probability exactly, over all equally likely words, that the token beats all others.

    The others' race ends at an exponential time of rate 1 - p; the token wins if E / p comes before that.
    """
    words = np.arange(min(2**32, int(40 * probability * 2**32) + 4000), dtype=np.uint32)
    times = np.exp(log_exponential_of_words(words).astype(np.float64)) / probability
    wins = float(np.exp(-(1.0 - probability) * times).sum()) / 2**32
    # At 2e-9 a token has only 8 words to win with; the midpoint rule leaves 0.06 % there.
    assert wins == pytest.approx(probability, rel=1e-3)
