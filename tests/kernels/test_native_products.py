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
    if not products.has_bf16_products(native):
        pytest.skip("this processor has neither AVX-512 BF16 nor AVX2")
    assert products.can_multiply_bf16(native)
    return native


@pytest.fixture(params=[False, True])
def tiles(library: NativeLibrary, request: pytest.FixtureRequest) -> bool:
    wanted = bool(request.param)
    return wanted and products.has_tiles(library)


def some(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.parametrize("outputs", [1, 31, 32, 33, 200])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("count", [1, 17])
def test_products_are_exact_but_for_one_rounding(
    library: NativeLibrary, tiles: bool, outputs: int, bias: bool, count: int
) -> None:
    weight, offset = some(outputs, INPUTS), some(outputs) if bias else None
    matrix = products.NativeMatrix(library, weight, offset, tiles)
    rows = some(count, INPUTS)
    found = matrix(rows)
    assert found.dtype == torch.bfloat16
    exact = F.linear(rows.double(), weight.double(), None if offset is None else offset.double())
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=2e-3)


@pytest.mark.parametrize("rows", [2, 3, 7, 14, 17, 32, 33, 97])
@pytest.mark.parametrize("inputs", [INPUTS, 768])
def test_rows_are_batch_invariant(library: NativeLibrary, tiles: bool, rows: int, inputs: int) -> None:
    matrix = products.NativeMatrix(library, some(96, inputs), tiles=tiles)
    x = some(rows, inputs)
    alone = torch.cat([matrix(x[row : row + 1]) for row in range(rows)])
    assert torch.equal(matrix(x), alone)


@pytest.mark.parametrize("rows", [1, 9])
def test_threads_do_not_change_results(library: NativeLibrary, tiles: bool, rows: int) -> None:
    matrix, x = products.NativeMatrix(library, some(196, INPUTS), tiles=tiles), some(rows, INPUTS)
    one = matrix(x)
    torch.set_num_threads(3)
    try:
        assert torch.equal(matrix(x), one)
    finally:
        torch.set_num_threads(1)


def test_subnormal_numbers_are_batch_invariant(library: NativeLibrary) -> None:
    if not products.has_tiles(library):
        pytest.skip("this processor has no tiles, or its kernel does not give them away")
    tiny = torch.tensor([1e-39, 1e-20, 3e-39, -1e-20] * 16).bfloat16()
    matrix = products.NativeMatrix(library, (some(40, 64).abs() + 1e-20 * some(40, 64)) * 1e-19)
    rows = torch.stack([tiny, some(64), tiny.flip(0)])
    alone = torch.cat([matrix(row[None]) for row in rows])
    assert torch.equal(matrix(rows), alone)


def test_leading_dimensions_and_strides_are_kept_apart(library: NativeLibrary) -> None:
    matrix = products.NativeMatrix(library, some(40, INPUTS))
    x = some(2, 3, 2 * INPUTS)[..., :INPUTS]
    assert torch.equal(matrix(x), matrix(x.reshape(6, INPUTS)).view(2, 3, 40))


def test_no_rows_give_no_results(library: NativeLibrary, tiles: bool) -> None:
    assert products.NativeMatrix(library, some(40, 64), tiles=tiles)(some(3, 64)[:0]).shape == (0, 40)


def test_memory_error_names_rows_and_inputs(library: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = products.NativeMatrix(library, some(40, 64))
    monkeypatch.setattr(matrix, "_multiply", lambda *_arguments: 0)
    with pytest.raises(MemoryError, match="to widen 3 rows of 64 numbers"):
        matrix(some(3, 64))
