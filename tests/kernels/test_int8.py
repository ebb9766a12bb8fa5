"""int8 products: rounding to nearest, activations of bf16 kept, a fallback that computes the same."""

import pytest
import torch
import torch.nn.functional as F

from ssd_serve.kernels import cpu_products


def weight_of(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, one of them zero."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.linspace(-4, 3, outputs).unsqueeze(1)
    weight = torch.randn((outputs, inputs), generator=generator) * sizes
    weight[outputs // 2] = 0.0
    return weight


def rows_of(rows: int, inputs: int) -> torch.Tensor:
    """bf16 rows of very different sizes."""
    sizes = 10.0 ** torch.linspace(-6, 6, rows).unsqueeze(1)
    return (torch.randn((rows, inputs), generator=torch.Generator().manual_seed(rows)) * sizes).bfloat16()


def exact(weight: cpu_products.QuantisedWeight, rows: torch.Tensor) -> torch.Tensor:
    return F.linear(rows.double(), weight.numbers.double()) * weight.scales.double()


def needs_int8() -> None:
    if not cpu_products.can_multiply_int8():
        pytest.skip("this machine has no int8 products")


def test_weights_are_rounded_to_the_nearest_number() -> None:
    weight = weight_of(40, 96)
    quantised = cpu_products.quantise(weight)
    assert (quantised.numbers.dtype, quantised.scales.dtype) == (torch.int8, torch.float32)
    numbers, scales = quantised.numbers.double(), quantised.scales.double().unsqueeze(1)
    assert ((weight.double() - numbers * scales).abs() <= 0.5001 * scales).all()
    largest = numbers.abs().amax(1)
    assert largest.tolist() == [0.0 if row == 20 else 127.0 for row in range(40)]
    assert (quantised.scales > 0).all()


def test_large_weights_are_quantised_in_pieces() -> None:
    weight = weight_of(2500, 8)
    assert torch.equal(
        cpu_products.quantise(weight).numbers[2400:], cpu_products.quantise(weight[2400:]).numbers
    )


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_rows_keep_sixteen_bits(rows: int) -> None:
    x = rows_of(rows, 70)
    pieces, scales = cpu_products.split_rows(x)
    assert pieces.dtype == torch.uint8
    low, high = (pieces.double() - 128).chunk(2)
    written = (low + 256 * high) * scales.double()
    top = x.double().abs().amax(1, keepdim=True)
    assert ((written - x.double()).abs() <= top / 65_000).all()
    # An element that is not far below the largest is closer than bf16 can tell.
    near = x.double().abs() > top / 64
    assert torch.equal(written.bfloat16()[near], x[near])


def test_rows_of_zeros_stay_zeros() -> None:
    pieces, scales = cpu_products.split_rows(torch.zeros((2, 8), dtype=torch.bfloat16))
    assert (pieces == 128).all()
    assert torch.isfinite(scales).all()


@pytest.mark.parametrize("rows", [1, 3, 8, 70])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("widened", [False, True])
def test_products(rows: int, bias: bool, widened: bool) -> None:
    weight = cpu_products.quantise(weight_of(200, 136))
    offset = torch.linspace(-1, 1, 200).bfloat16() if bias else None
    x = rows_of(rows, 136)
    if widened:
        numbers = weight.numbers.bfloat16()
        result = cpu_products.WidenedMatrix(lambda each: F.linear(each, numbers), weight.scales, offset)(x)
    else:
        needs_int8()
        result = cpu_products.Int8Matrix(weight, offset)(x)
    assert (result.dtype, result.shape) == (torch.bfloat16, (rows, 200))
    product = exact(weight, x)
    expected = product + (0.0 if offset is None else offset.double())
    # Two roundings to bf16 at most, and a row's elements are off by 1 / 65,278 of its largest.
    size = F.linear(x.abs().amax(1, keepdim=True).expand_as(x).double(), weight.numbers.double().abs())
    bound = 2**-8 * (product.abs() + expected.abs()) + size * weight.scales.double() / 65_000 + 1e-12
    assert ((result.double() - expected).abs() <= bound).all()
    assert (expected != 0).sum() >= 199 * rows


def test_the_quantised_product_is_near_the_float_one() -> None:
    needs_int8()
    weight, x = weight_of(64, 256), rows_of(5, 256)
    result = cpu_products.Int8Matrix(cpu_products.quantise(weight))(x).double()
    expected = F.linear(x.double(), weight.double())
    # Half a step of every weight, times the elements: what rounding to int8 can cost at most.
    step = weight.double().abs().amax(1) / 127
    bound = 0.51 * step * x.double().abs().sum(1, keepdim=True) + 2**-8 * expected.abs() + 1e-12
    assert ((result - expected).abs() <= bound).all()
    typical = (result - expected).norm() / expected.norm()
    assert 1e-4 < float(typical) < 0.02


def test_a_row_does_not_depend_on_how_many_there_are() -> None:
    needs_int8()
    matrix, x = cpu_products.Int8Matrix(cpu_products.quantise(weight_of(200, 136))), rows_of(33, 136)
    together = matrix(x)
    for count in (1, 2, 5, 16):
        parts = [matrix(x[start : start + count]) for start in range(0, 33, count)]
        assert torch.equal(torch.cat(parts), together)


def test_leading_dimensions_are_kept() -> None:
    needs_int8()
    matrix, x = cpu_products.Int8Matrix(cpu_products.quantise(weight_of(24, 40))), rows_of(6, 40)
    assert torch.equal(matrix(x.view(2, 3, 40)).view(6, 24), matrix(x))
    assert matrix(x[:0]).shape == (0, 24)


def test_numbers_that_are_none_are_seen() -> None:
    needs_int8()
    matrix, x = cpu_products.Int8Matrix(cpu_products.quantise(weight_of(24, 40))), rows_of(2, 40)
    x[1, 3] = float("nan")
    result = matrix(x)
    assert torch.isfinite(result[0]).all()
    assert result[1].isnan().all()


def test_nothing_is_built_without_onednn_or_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        assert not cpu_products.can_pack_int8()
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    assert not cpu_products.can_pack_int8()
    assert not cpu_products.can_multiply_int8()


def test_nothing_is_built_when_an_operator_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> torch.Tensor:
        raise TypeError("unexpected argument")

    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    monkeypatch.setattr(torch.ops.onednn, "qlinear_pointwise", refuse)
    assert not cpu_products.can_pack_int8()


def test_nothing_is_built_when_sums_saturate(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_int8()
    product = torch.ops.onednn.qlinear_pointwise

    def saturate(*arguments: object) -> torch.Tensor:
        result: torch.Tensor = product(*arguments)
        return result.clamp(-1e6, 1e6)

    monkeypatch.setattr(torch.ops.onednn, "qlinear_pointwise", saturate)
    assert not cpu_products.can_pack_int8()


def test_int8_is_built_where_the_processor_has_it() -> None:
    if "AVX512" not in torch.backends.cpu.get_cpu_capability() or not cpu_products.cpu_has_fast_bf16():
        pytest.skip("no x86 CPU with AVX-512 BF16, which comes with VNNI")
    assert cpu_products.can_multiply_int8()
