"""Compiled bf16 products: near to exact ones, and the same for a row in any company."""

import pytest
import torch
import torch.nn.functional as F

from ssd_serve.kernels.native import products
from ssd_serve.kernels.native.library import NativeLibrary

INPUTS = 134


@pytest.fixture(scope="module")
def library(native: NativeLibrary) -> NativeLibrary:
    """The kernels, where this processor can run them."""
    if not products.can_multiply_bf16(native):
        pytest.skip("this processor has no AVX-512 BF16")
    return native


def some(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.parametrize("outputs", [1, 16, 31, 32, 33, 200])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_exact_but_for_one_rounding(library: NativeLibrary, outputs: int, bias: bool) -> None:
    weight, offset = some(outputs, INPUTS), some(outputs) if bias else None
    matrix = products.NativeMatrix(library, weight, offset)
    rows = some(17, INPUTS)
    found = matrix(rows)
    assert found.dtype == torch.bfloat16
    exact = F.linear(rows.double(), weight.double(), None if offset is None else offset.double())
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=2e-3)


@pytest.mark.parametrize("rows", [1, 2, 7, 13, 14, 15, 28, 29, 70])
def test_a_row_has_the_same_result_alone_and_among_others(library: NativeLibrary, rows: int) -> None:
    matrix = products.NativeMatrix(library, some(96, INPUTS))
    x = some(rows, INPUTS)
    alone = torch.cat([matrix(x[row : row + 1]) for row in range(rows)])
    assert torch.equal(matrix(x), alone)


def test_threads_do_not_change_results(library: NativeLibrary) -> None:
    matrix, x = products.NativeMatrix(library, some(96, INPUTS)), some(9, INPUTS)
    one = matrix(x)
    torch.set_num_threads(3)
    try:
        assert torch.equal(matrix(x), one)
    finally:
        torch.set_num_threads(1)


def test_leading_dimensions_and_strides_are_kept_apart(library: NativeLibrary) -> None:
    matrix = products.NativeMatrix(library, some(40, INPUTS))
    x = some(2, 3, 2 * INPUTS)[..., :INPUTS]
    assert torch.equal(matrix(x), matrix(x.reshape(6, INPUTS)).view(2, 3, 40))
