"""int8 products by the compiled kernel: the numbers of oneDNN, for any shape and number of rows.

Without VNNI sums are scaled once and not in two parts: exact all the same, but for fewer roundings.
"""

import pytest
import torch

from ssd_serve.base.errors import UserError
from ssd_serve.kernels import cpu_products
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.native.products import NativeInt8Matrix, can_multiply_int8, has_int8_products

SHAPES = ((32, 4), (200, 136), (33, 70), (1, 15), (96, 1029), (40, 512))
"""Whole panels and groups of inputs, and what is left of them."""


@pytest.fixture
def library(native: NativeLibrary) -> NativeLibrary:
    if not has_int8_products(native):
        pytest.skip("this processor has neither AVX-512 VNNI nor AVX2")
    assert can_multiply_int8(native)
    return native


def weight_of(outputs: int, inputs: int) -> cpu_products.QuantisedWeight:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(outputs)
    sizes = 10.0 ** torch.linspace(-4, 3, outputs).unsqueeze(1)
    return cpu_products.quantise(torch.randn((outputs, inputs), generator=generator) * sizes)


def rows_of(rows: int, inputs: int) -> torch.Tensor:
    sizes = 10.0 ** torch.linspace(-6, 6, rows).unsqueeze(1)
    return (torch.randn((rows, inputs), generator=torch.Generator().manual_seed(rows)) * sizes).bfloat16()


def as_in_torch(
    weight: cpu_products.QuantisedWeight, bias: torch.Tensor | None, rows: torch.Tensor
) -> torch.Tensor:
    """The same scheme, sums in float64, which holds them exactly."""
    pieces, scales = cpu_products.split_rows(rows)
    sums = ((pieces.double() - 128) @ weight.numbers.double().T).float() * weight.scales
    low, high = sums.chunk(2)
    result = (low + 256.0 * high) * scales
    return (result if bias is None else result + bias.float()).bfloat16()


def scaled_once(
    weight: cpu_products.QuantisedWeight, bias: torch.Tensor | None, rows: torch.Tensor
) -> torch.Tensor:
    """The scheme where a row's numbers stay whole: their exact sums are rounded once, when scaled."""
    pieces, scales = cpu_products.split_rows(rows)
    low, high = (pieces.double() - 128).chunk(2)
    sums = (low + 256.0 * high) @ weight.numbers.double().T
    result = (sums * (weight.scales.double() * scales.double())).float()
    return (result if bias is None else result + bias.float()).bfloat16()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 23, 49])
@pytest.mark.parametrize("tiles", [False, True])
def test_native_int8_equals_its_reference_bit_for_bit(
    library: NativeLibrary, shape: tuple[int, int], rows: int, tiles: bool
) -> None:
    weight, x = weight_of(*shape), rows_of(rows, shape[1])
    for bias in (None, torch.linspace(-1, 1, shape[0]).bfloat16()):
        result = NativeInt8Matrix(library, weight, bias, tiles)(x)
        assert (result.dtype, result.shape) == (torch.bfloat16, (rows, shape[0]))
        references = as_in_torch(weight, bias, x), scaled_once(weight, bias, x)
        assert any(torch.equal(result, expected) for expected in references)
        assert result.count_nonzero() > 0.9 * result.numel()


def test_native_int8_equals_onednn_bit_for_bit(library: NativeLibrary) -> None:
    if not cpu_products.can_multiply_int8():
        pytest.skip("this torch has no int8 products")
    weight = weight_of(200, 136)
    ours, theirs = NativeInt8Matrix(library, weight), cpu_products.Int8Matrix(weight)
    for rows in (1, 5, 16):
        assert torch.equal(ours(rows_of(rows, 136)), theirs(rows_of(rows, 136)))


def test_largest_int8_sums_do_not_overflow(library: NativeLibrary) -> None:
    numbers = torch.full((32, 1 << 17), 127, dtype=torch.int8)
    numbers[1::2] = -127
    weight = cpu_products.QuantisedWeight(numbers, torch.full((32,), 1e-3))
    for value in (1.0, -1.0):
        x = torch.full((1, 1 << 17), value, dtype=torch.bfloat16)
        expected = value * 127e-3 * (1 << 17) * torch.tensor([[1.0, -1.0]]).repeat(1, 16)
        torch.testing.assert_close(NativeInt8Matrix(library, weight)(x).float(), expected, rtol=0.005, atol=0)


def test_a_matrix_whose_sums_could_overflow_is_refused(library: NativeLibrary) -> None:
    weight = cpu_products.QuantisedWeight(torch.zeros((1, (1 << 17) + 1), dtype=torch.int8), torch.ones(1))
    with pytest.raises(UserError, match="131072 inputs"):
        NativeInt8Matrix(library, weight)


def test_leading_dimensions_are_kept_and_rows_may_be_spread(library: NativeLibrary) -> None:
    matrix, x = NativeInt8Matrix(library, weight_of(24, 40)), rows_of(6, 40)
    assert torch.equal(matrix(x.view(2, 3, 40)).view(6, 24), matrix(x))
    assert torch.equal(matrix(x.T.contiguous().T), matrix(x))
    assert matrix(x[:0]).shape == (0, 24)


def test_int8_product_keeps_nan_and_zero_rows(library: NativeLibrary) -> None:
    matrix, x = NativeInt8Matrix(library, weight_of(40, 40)), rows_of(3, 40)
    x[1, 3], x[2] = float("nan"), 0.0
    result = matrix(x)
    assert torch.isfinite(result[0]).all()
    assert result[1].isnan().all()
    assert (result[2] == 0).all()
