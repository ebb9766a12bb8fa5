"""oneDNN's products and int8 weights against exact ones, and the self-tests that decide on their use."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ssd_serve.kernels import cpu_products

can_pack_float32 = partial(cpu_products.can_pack, torch.float32)
EITHER = pytest.mark.parametrize("can_pack", [can_pack_float32, cpu_products.can_pack_int8])


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


def test_int8_product_of_nan_is_nan() -> None:
    needs_int8()
    matrix, x = cpu_products.Int8Matrix(cpu_products.quantise(weight_of(24, 40))), rows_of(2, 40)
    x[1, 3] = float("nan")
    result = matrix(x)
    assert torch.isfinite(result[0]).all()
    assert result[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 8, 70])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_products_are_torchs_up_to_rounding_and_equal_in_bf16(
    dtype: torch.dtype, rows: int, bias: bool
) -> None:
    if not cpu_products.can_pack(dtype):
        pytest.skip(f"this machine cannot pack {dtype}")
    generator = torch.Generator().manual_seed(rows)
    weight, offset, x = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((200, 136), (200,), (rows, 136))
    )
    result = cpu_products.PackedMatrix(weight, offset if bias else None)(x)
    plain = F.linear(x, weight, offset if bias else None)
    assert (result.shape, result.dtype) == ((rows, 200), dtype)
    torch.testing.assert_close(result, plain, rtol=4 * torch.finfo(dtype).eps, atol=1e-4)
    if dtype == torch.bfloat16 and not bias:
        assert torch.equal(result, plain)


@EITHER
def test_products_are_not_packed_without_onednn(
    can_pack: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not can_pack()


def test_int8_is_not_packed_without_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    assert not cpu_products.can_multiply_int8()


@EITHER
def test_products_are_not_packed_when_an_operator_changed(
    can_pack: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> torch.Tensor:
        raise TypeError("unexpected argument")

    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", refuse)
    monkeypatch.setattr(torch.ops.onednn, "qlinear_pointwise", refuse)
    assert not can_pack()


@EITHER
def test_wrong_onednn_products_are_not_used_and_logged_once(
    can_pack: Callable[[], bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sums of int8 products that saturate, and products that are zero."""
    if not can_pack():
        pytest.skip("this machine has no such products")
    cpu_products.warn_of_failure.cache_clear()
    product = torch.ops.onednn.qlinear_pointwise

    def saturate(*arguments: Any) -> torch.Tensor:
        result: torch.Tensor = product(*arguments)
        return result.clamp(-1e6, 1e6)

    monkeypatch.setattr(torch.ops.onednn, "qlinear_pointwise", saturate)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda x, *_: x.new_zeros((x.shape[0], 48)))
    assert not any(can_pack() for _ in range(2))
    (record,) = caplog.records
    kind = "float32" if can_pack is can_pack_float32 else "int8"
    assert record.getMessage().startswith(f"oneDNN products in {kind} failed their self-test: ")
    assert "used instead" in record.getMessage()


def test_packed_products_are_used_where_the_processor_has_them() -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    if "AVX" not in capability:
        pytest.skip("not an x86 CPU with AVX")
    assert cpu_products.can_pack(torch.float32)
    if "AVX512" in capability and cpu_products.cpu_has_fast_bf16():  # VNNI comes with AVX-512 BF16
        assert cpu_products.can_multiply_int8()
