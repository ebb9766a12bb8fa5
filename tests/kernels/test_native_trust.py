"""Compiled kernels that compute something else are not used, whatever they say of themselves.

The right kernels run first: what they leave in freed memory must not speak for the others.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.native.products import can_multiply_bf16, can_multiply_int8
from ssd_serve.kernels.native.rows import can_operate
from ssd_serve.sampling.choice import trusted_choice
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.sampling.ranking import trusted_ranking


class Lying(NativeLibrary):
    """A library whose functions report success and do nothing."""

    def function(self, name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
        def nothing(*given: object) -> int:
            return 1

        return nothing


@pytest.fixture
def lying(native: NativeLibrary) -> Lying:
    return Lying(native.path)


def test_choices(native: NativeLibrary, lying: Lying) -> None:
    assert trusted_choice(native) is not None
    assert trusted_choice(lying) is None
    assert trusted_choice(None) is None


def test_ranking(native: NativeLibrary, lying: Lying) -> None:
    assert trusted_ranking(native) is not None
    assert trusted_ranking(lying) is None
    assert trusted_ranking(None) is None


def test_noise(lying: Lying) -> None:
    keys = ([5, 6], [7, 8])
    assert torch.equal(NoiseRows(64, 8, native=lying).rows(*keys), NoiseRows(64, 8).rows(*keys))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_rotations_and_gates(native: NativeLibrary, lying: Lying, dtype: torch.dtype) -> None:
    can_operate(native, dtype)
    assert not can_operate(lying, dtype)


@pytest.mark.parametrize("check", [can_multiply_bf16, can_multiply_int8])
def test_products(native: NativeLibrary, lying: Lying, check: Callable[[NativeLibrary], bool]) -> None:
    check(native)
    assert not check(lying)
