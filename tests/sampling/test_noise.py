"""Shared noise: known vectors, equal integers in numpy, torch and plain Python, and the cache of rows."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_serve.sampling.noise import (
    log_exponential,
    log_exponential_of_words,
    log_exponential_torch,
    philox,
    random_words,
    random_words_torch,
)
from ssd_serve.sampling.noise_rows import NoiseRows
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


def reference_word(seed: int, position: int, token: int, stream: int) -> int:
    return reference_philox([position, token // 4, stream, 0], [seed % 2**32, seed >> 32])[token % 4]


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


@given(WORD_64, WORD_32, st.integers(1, 40), st.integers(0, 3))
@settings(max_examples=examples(50))
def test_philox_words_match_the_definition(seed: int, position: int, vocabulary: int, stream: int) -> None:
    expected = [reference_word(seed, position, token, stream) for token in range(vocabulary)]
    assert random_words([seed], [position], vocabulary, stream)[0].tolist() == expected
    assert random_words_torch([seed], [position], vocabulary, "cpu", stream)[0].tolist() == expected


@pytest.mark.parametrize("vocabulary", [1, 5, 4096, 32001, 128256])
def test_numpy_and_torch_random_words_are_equal(vocabulary: int) -> None:
    seeds, positions = [0, 2**64 - 1, 0x9E3779B97F4A7C15, 7], [0, 2**32 - 1, 4095, 131072]
    together = random_words(seeds, positions, vocabulary)
    assert together.dtype == np.uint32
    assert together.shape == (4, vocabulary)
    assert np.array_equal(together, random_words_torch(seeds, positions, vocabulary, "cpu").numpy())
    for row, seed, position in zip(together, seeds, positions, strict=True):
        assert np.array_equal(row, random_words([seed], [position], vocabulary)[0])


@pytest.mark.parametrize("vocabulary", [1, 7, 4097, 32001])
def test_noise_row_is_independent_of_the_batch(vocabulary: int) -> None:
    seeds, positions = [3, 3, 9, 11, 3], [1, 2, 1, 500, 3]
    together = log_exponential(seeds, positions, vocabulary)
    for row, seed, position in zip(together, seeds, positions, strict=True):
        assert np.array_equal(row, log_exponential([seed], [position], vocabulary)[0])


def test_noise_is_finite_and_exact_at_both_ends() -> None:
    words = [0, 1, 2, 3, 1000, 2**24 + 1, 2**31, 2**32 - 512, 2**32 - 129, 2**32 - 2, 2**32 - 1]
    values = log_exponential_of_words(np.array(words, dtype=np.uint32))
    for word, value in zip(words, values.tolist(), strict=True):
        w = min((word + 0.5) / 2**32, 1 - 2.0**-24)
        assert value == pytest.approx(math.log(-math.log1p(-w)), rel=2.0**-23)
    assert np.all(np.diff(values) >= 0)
    assert len(set(log_exponential_of_words(np.arange(4096, dtype=np.uint32)).tolist())) == 4096


def test_torch_noise_equals_numpy_to_rounding() -> None:
    ours = log_exponential([5, 6], [7, 8], 4096)
    theirs = log_exponential_torch([5, 6], [7, 8], 4096, "cpu").numpy()
    np.testing.assert_allclose(ours, theirs, rtol=3e-7, atol=1e-7)


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
    for seed, position in keys:
        noise.rows([seed], [position])
        assert np.array_equal(
            noise.rows([seed], [position])[0].numpy(), log_exponential([seed], [position], 9)[0]
        )
    if keys:
        seeds, positions = [seed for seed, _ in keys], [position for _, position in keys]
        rows = noise.rows(seeds, positions)
        assert np.array_equal(rows.numpy(), log_exponential(seeds, positions, 9))


def test_noise_row_survives_eviction() -> None:
    noise = NoiseRows(16, capacity=1)
    row = noise.rows([1], [1])[0]
    noise.rows([2], [2])
    assert np.array_equal(row.numpy(), log_exponential([1], [1], 16)[0])


def test_noise_cache_refuses_empty_sizes() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        NoiseRows(0, 4)
    with pytest.raises(ValueError, match="at least 1"):
        NoiseRows(4, 0)
