"""The noise of GPUs under Triton's interpreter: numpy's integers, and its logarithms to the last bit but for
very few."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_serve.kernels.triton import noise
from ssd_serve.kernels.triton.noise import TritonNoise
from ssd_serve.sampling.noise import Float32Array, log_exponential
from ssd_serve.sampling.noise_rows import NoiseRows
from tests.pretended_device import DEVICE, pretended_device
from tests.sampling.test_noise import WORD_32, WORD_64, steps_apart

pytestmark = pytest.mark.slow


def rows(seeds: list[int], positions: list[int], vocabulary: int) -> Float32Array:
    table = torch.full((len(seeds) + 1, vocabulary), torch.nan)
    keys = list(zip(seeds, positions, strict=True))
    TritonNoise().fill(table, range(1, len(seeds) + 1), keys)
    assert bool(torch.isnan(table[0]).all()), "a line that was not asked for must not change"
    return table[1:].numpy()


@given(WORD_64, WORD_32, st.integers(1, 1100))
@settings(max_examples=30)
def test_any_row_is_the_definition(seed: int, position: int, vocabulary: int) -> None:
    ours = rows([seed], [position], vocabulary)
    assert steps_apart(ours, log_exponential([seed], [position], vocabulary)).max() <= 1


def test_many_rows_differ_from_numpys_in_hardly_any_last_bit() -> None:
    seeds, positions, vocabulary = [3, 3, 2**63 + 9, 2**64 - 1], [1, 2, 1, 2**32 - 1], 32001
    apart = steps_apart(rows(seeds, positions, vocabulary), log_exponential(seeds, positions, vocabulary))
    assert apart.max() <= 1
    assert np.count_nonzero(apart) <= 1


class NoCompiler:
    def fill(self, table: torch.Tensor, lines: Sequence[int], keys: Sequence[tuple[int, int]]) -> None:
        raise RuntimeError("Failed to find C compiler")


def test_without_a_compiler_torch_makes_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = NoiseRows(64, 8).rows([3, 4], [5, 6])
    monkeypatch.setattr(noise, "TritonNoise", NoCompiler)
    with pretended_device():
        found = NoiseRows(64, 8, DEVICE).rows([3, 4], [5, 6]).cpu()
    assert steps_apart(found.numpy(), expected.numpy()).max() <= 1
