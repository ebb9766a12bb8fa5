"""The compiled noise: numpy's integers, and its logarithms to the last bit but for very few."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.sampling.noise import Float32Array, log_exponential
from ssd_serve.sampling.noise_rows import NativeNoise, NoiseRows
from tests.examples import examples

WORD_64 = st.integers(min_value=0, max_value=2**64 - 1)
WORD_32 = st.integers(min_value=0, max_value=2**32 - 1)


def rows(
    native: NativeLibrary, seeds: list[int], positions: list[int], vocabulary: int, stream: int = 0
) -> Float32Array:
    table = torch.full((len(seeds) + 1, vocabulary), torch.nan)
    NativeNoise(native).fill(
        table, range(1, len(seeds) + 1), list(zip(seeds, positions, strict=True)), stream
    )
    assert bool(torch.isnan(table[0]).all()), "a line that was not asked for must not change"
    return table[1:].numpy()


def steps_apart(ours: Float32Array, theirs: Float32Array) -> np.ndarray:
    """How many float32 lie between numbers of equal sign; 0: the same bits."""
    return np.abs(ours.view(np.int32).astype(np.int64) - theirs.view(np.int32))


@given(WORD_64, WORD_32, st.integers(1, 140), st.integers(0, 3))
@settings(max_examples=examples(100))
def test_native_noise_equals_the_reference(
    native: NativeLibrary, seed: int, position: int, vocabulary: int, stream: int
) -> None:
    """One wrong integer would be off by far more than one step."""
    ours = rows(native, [seed], [position], vocabulary, stream)
    assert steps_apart(ours, log_exponential([seed], [position], vocabulary, stream)).max() <= 1


@pytest.mark.parametrize("vocabulary", [4096, 32001, 128256])
def test_native_logarithms_equal_numpy_but_for_rare_last_bits(native: NativeLibrary, vocabulary: int) -> None:
    number = 2**22 // vocabulary + 1
    seeds, positions = [2**63 + vocabulary] * number, list(range(number))
    apart = steps_apart(
        rows(native, seeds, positions, vocabulary), log_exponential(seeds, positions, vocabulary)
    )
    assert apart.max() <= 1
    assert np.count_nonzero(apart) <= 4


def test_native_noise_row_is_independent_of_the_batch(native: NativeLibrary) -> None:
    seeds, positions = [3, 3, 9, 2**64 - 1], [1, 2, 1, 2**32 - 1]
    together = rows(native, seeds, positions, 333)
    for row, seed, position in zip(together, seeds, positions, strict=True):
        assert np.array_equal(row, rows(native, [seed], [position], 333)[0])


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
