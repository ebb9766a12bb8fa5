"""Tests that compiled kernels with wrong results are not used, even if they report success.

The right kernels run first: their results in freed memory must not make wrong kernels pass.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from ssd_serve.kernels.attention.self_test import first_failure
from ssd_serve.kernels.native.attention import NativeAttention
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.native.products import can_multiply_bf16, can_multiply_int8
from ssd_serve.kernels.rows import can_operate
from ssd_serve.sampling import noise_rows
from ssd_serve.sampling.choice import trusted_choice
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.sampling.ranking import trusted_ranking


class Lying(NativeLibrary):
    """Test double of a library: its functions report success and do nothing."""

    def function(self, name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
        def nothing(*given: object) -> int:
            return 1

        return nothing


@pytest.fixture
def lying(native: NativeLibrary) -> Lying:
    return Lying(native.path)


@pytest.mark.parametrize("trusted", [trusted_choice, trusted_ranking])
def test_failed_self_test_of_choice_and_ranking_is_logged(
    native: NativeLibrary,
    lying: Lying,
    trusted: Callable[[NativeLibrary | None], object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert trusted(native) is not None
    assert trusted(None) is None
    assert not caplog.records
    assert trusted(lying) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "failed its self-test" in record.getMessage()


def test_failed_self_test_of_noise_is_logged(
    native: NativeLibrary, lying: Lying, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ([5, 6], [7, 8])
    expected = NoiseRows(64, 8, native=native).rows(*keys)
    assert not caplog.records
    assert torch.allclose(NoiseRows(64, 8, native=lying).rows(*keys), expected, rtol=1e-6)
    (record,) = caplog.records
    assert "NativeNoise failed its self-test" in record.getMessage()


def test_triton_noise_kernel_that_cannot_compile_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "ssd_serve.kernels.triton.noise", None)  # importing it raises
    monkeypatch.setattr(noise_rows, "find_spec", lambda _: True)
    assert noise_rows.noise_kernel(torch.device("cuda"), None) is None
    assert "Triton noise kernel cannot be used" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_rotations_and_gates(native: NativeLibrary, lying: Lying, dtype: torch.dtype) -> None:
    can_operate(native, dtype)
    assert not can_operate(lying, dtype)


@pytest.mark.parametrize("check", [can_multiply_bf16, can_multiply_int8])
def test_products(native: NativeLibrary, lying: Lying, check: Callable[[NativeLibrary], bool]) -> None:
    check(native)
    assert not check(lying)


def test_attention_that_writes_nothing_fails_its_self_test(native: NativeLibrary) -> None:
    class Broken(NativeLibrary):
        def function(self, name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
            found = super().function(name, *arguments, result=result)
            return (lambda *_: None) if name == "ssd_attend" else found

    assert first_failure(partial(NativeAttention, Broken(native.path)), torch.float32, 64, "cpu")
