"""Triton's noise under its interpreter against numpy's, and Triton's folder of compiled kernels."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton import knobs

from ssd_serve.base.trusted_files import make_folder, weakness
from ssd_serve.kernels.triton import keep_private, noise
from ssd_serve.kernels.triton.noise import TritonNoise
from ssd_serve.sampling.noise import Float32Array, log_exponential
from ssd_serve.sampling.noise_rows import NoiseRows
from tests.pretended_device import DEVICE, pretended_device
from tests.sampling.test_noise import WORD_32, WORD_64, steps_apart


def rows(seeds: list[int], positions: list[int], vocabulary: int) -> Float32Array:
    table = torch.full((len(seeds) + 1, vocabulary), torch.nan)
    keys = list(zip(seeds, positions, strict=True))
    TritonNoise().fill(table, range(1, len(seeds) + 1), keys)
    assert bool(torch.isnan(table[0]).all()), "a line that was not asked for must not change"
    return table[1:].numpy()


@pytest.mark.slow
@given(WORD_64, WORD_32, st.integers(1, 1100))
@settings(max_examples=30)
def test_triton_noise_equals_its_definition(seed: int, position: int, vocabulary: int) -> None:
    ours = rows([seed], [position], vocabulary)
    assert steps_apart(ours, log_exponential([seed], [position], vocabulary)).max() <= 1


@pytest.mark.slow
def test_many_rows_differ_from_numpys_in_hardly_any_last_bit() -> None:
    seeds, positions, vocabulary = [3, 3, 2**63 + 9, 2**64 - 1], [1, 2, 1, 2**32 - 1], 32001
    apart = steps_apart(rows(seeds, positions, vocabulary), log_exponential(seeds, positions, vocabulary))
    assert apart.max() <= 1
    assert np.count_nonzero(apart) <= 1


class NoCompiler:
    def fill(self, table: torch.Tensor, lines: Sequence[int], keys: Sequence[tuple[int, int]]) -> None:
        raise RuntimeError("Failed to find C compiler")


@pytest.mark.slow
def test_without_a_compiler_torch_makes_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = NoiseRows(64, 8).rows([3, 4], [5, 6])
    monkeypatch.setattr(noise, "TritonNoise", NoCompiler)
    with pretended_device():
        found = NoiseRows(64, 8, DEVICE).rows([3, 4], [5, 6]).cpu()
    assert steps_apart(found.numpy(), expected.numpy()).max() <= 1


def test_a_folder_of_this_users_alone_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "triton"
    make_folder(mine)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(mine))
    monkeypatch.setattr(knobs.cache, "dir", str(mine))
    keep_private()
    assert knobs.cache.dir == str(mine)


def test_triton_cache_folder_writable_by_others_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared = tmp_path / "triton"
    make_folder(shared)
    shared.chmod(0o777)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(shared))
    monkeypatch.setattr(knobs.cache, "dir", str(shared))
    keep_private()
    assert weakness(Path(knobs.cache.dir)) == ""
    assert os.environ["TRITON_CACHE_DIR"] == knobs.cache.dir, "also for the processes of this one"
    assert "TRITON_CACHE_DIR" in caplog.text
