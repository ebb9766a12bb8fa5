"""The two e4m3 formats over all their bytes, scales, and scaled products against exact ones."""

import math
from typing import Any

import pytest
import torch

from ssd_serve.kernels import fp8
from tests.pretended_device import DEVICE, checked_device

FN, FNUZ = fp8.FORMATS
BYTES = torch.arange(256).to(torch.uint8)


def meaning(byte: int, bias: int) -> float:
    sign, exponent, mantissa = (-1.0 if byte & 0x80 else 1.0), (byte >> 3) & 15, byte & 7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0 ** (1 - bias)
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - bias)


def exact_product(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
    scales: torch.Tensor = options["scale_a"] * options["scale_b"]
    dtype: torch.dtype = options["out_dtype"]
    return (a.double() @ b.double() * scales).to(dtype)


def test_the_meaning_of_every_byte() -> None:
    for form, bias, nan in ((FN, 7, {0x7F, 0xFF}), (FNUZ, 8, {0x80})):
        found = BYTES.view(form).float().tolist()
        for byte, value in enumerate(found):
            assert math.isnan(value) if byte in nan else value == meaning(byte, bias), (form, byte)
            assert fp8.holds_nan(BYTES[byte : byte + 1].view(form)) == (byte in nan)


def test_fnuz_conversion_halves_every_fn_byte() -> None:
    numbers = BYTES.view(FN)
    converted = fp8.to_fnuz(numbers)
    assert converted.dtype is FNUZ
    assert converted.shape == numbers.shape
    expected = [math.nan if byte in (0x7F, 0xFF) else meaning(byte, 7) for byte in range(256)]
    doubled = (converted.float() * 2).tolist()
    assert all(math.isnan(a) if math.isnan(b) else a == b for a, b in zip(doubled, expected, strict=True))
    # The only bytes that change: -0, and the NaNs.
    changed = (converted.view(torch.uint8) != BYTES).nonzero().flatten().tolist()
    assert changed == [0x7F, 0x80, 0xFF]
    assert converted.view(torch.uint8)[changed].tolist() == [0x80, 0x00, 0x80]


@pytest.mark.parametrize("form", fp8.FORMATS)
@pytest.mark.parametrize("width", [1, 16, 30, 100])
def test_widening(form: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(2)
    numbers = torch.randn(1500, 100, generator=generator).to(form)
    scales = torch.rand(1500, -(-100 // width), generator=generator)
    every = torch.stack([scales[:, column // width] for column in range(100)], 1)
    expected = numbers.float() * every
    for dtype in (torch.float32, torch.bfloat16):
        target = torch.full((1500, 100), math.nan, dtype=dtype)
        fp8.widen(numbers, scales, width, target)
        assert torch.equal(target, expected.to(dtype))


@pytest.mark.parametrize("form", fp8.FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_with_a_scale_each(form: torch.dtype, dtype: torch.dtype) -> None:
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    rows *= torch.tensor([[1e-20], [1e-3], [1.0], [1e4], [0.0]], dtype=dtype)
    rows[2, :2] = torch.tensor([-0.0, -1e-9])
    numbers, scales = fp8.round_rows(rows, form)
    assert not fp8.holds_nan(numbers)
    assert torch.equal(numbers.float().abs().amax(1)[:4], torch.full((4,), torch.finfo(form).max))
    error = (numbers.float() * scales - rows.float()).abs()
    top = rows.float().abs().amax(1, keepdim=True)
    assert (error <= rows.float().abs() / 16 * 1.001 + top * 2.0**-17).all()
    assert torch.equal(numbers[4].float(), torch.zeros(64))
    alone = [fp8.round_rows(rows[index : index + 1], form) for index in range(5)]
    assert torch.equal(torch.cat([row.view(torch.uint8) for row, _ in alone]), numbers.view(torch.uint8))
    assert torch.equal(torch.cat([scale for _, scale in alone]), scales)


@pytest.mark.parametrize("form", fp8.FORMATS)
@pytest.mark.parametrize("bias", [False, True])
def test_scaled_products(form: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fp8.multiplies(form, "cpu"):
        monkeypatch.setattr(torch.ops.aten, "_scaled_mm", exact_product)
    generator = torch.Generator().manual_seed(4)
    numbers = torch.randn(48, 64, generator=generator).to(form)
    scales = torch.rand(48, generator=generator) + 0.1
    offset = torch.randn(48, generator=generator).bfloat16() if bias else None
    rows = torch.randn(2, 3, 64, generator=generator).bfloat16()
    found = fp8.Fp8Matrix(numbers, scales, offset)(rows)
    assert (found.shape, found.dtype) == ((2, 3, 48), torch.bfloat16)
    rounded, steps = fp8.round_rows(rows.view(6, 64), form)
    expected = (rounded.double() * steps) @ (numbers.double() * scales[:, None]).T
    expected = expected.view(2, 3, 48) + (0.0 if offset is None else offset.double())
    torch.testing.assert_close(found.double(), expected, rtol=2.0**-8, atol=1e-5)


def test_the_format_that_multiplies_rightly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def only(form: torch.dtype) -> Any:
        def product(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
            if a.dtype is not form:
                raise RuntimeError("unsupported")
            return exact_product(a, b, **options)

        return product

    for form in fp8.FORMATS:
        monkeypatch.setattr(torch.ops.aten, "_scaled_mm", only(form))
        assert fp8.native_format("cpu") is form


@pytest.mark.parametrize("error", [TypeError, RuntimeError, AttributeError, ValueError, NotImplementedError])
def test_fp8_products_are_not_used_when_the_operator_changed(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> torch.Tensor:
        raise error("unexpected")

    monkeypatch.setattr(torch.ops.aten, "_scaled_mm", refuse)
    assert fp8.native_format("cpu") is None


@pytest.mark.parametrize("factor", [0.5, 2.0, 1.01, math.nan])
def test_wrong_fp8_products_are_not_used_and_logged_once(
    factor: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A factor of two is what the other format's reading of the same bytes gives."""

    def wrong(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        return exact_product(a, b, **options) * factor

    monkeypatch.setattr(torch.ops.aten, "_scaled_mm", wrong)
    fp8.warn_of_failure.cache_clear()
    assert [fp8.native_format("cpu") for _ in range(2)] == [None, None]
    assert [record.getMessage() for record in caplog.records] == [
        f"fp8 products ({name}) failed their self-test on cpu: "
        "weights are widened to the model's dtype instead"
        for name in ("float8_e4m3fn", "float8_e4m3fnuz")
    ]


@pytest.mark.parametrize("form", fp8.FORMATS)
def test_scaled_products_meet_torchs_requirements_on_a_gpu(form: torch.dtype) -> None:
    with checked_device():
        weight = torch.empty((48, 64), device=DEVICE).to(form)
        scales, bias, one = (torch.empty(shape, device=DEVICE) for shape in ((48,), (48,), ()))
        rows = torch.empty((3, 64), device=DEVICE, dtype=torch.bfloat16)
        found = fp8.Fp8Matrix(weight, scales, bias)(rows)
        assert (found.shape, found.device, found.dtype) == ((3, 48), torch.device(DEVICE), torch.bfloat16)
        by_rows = torch.empty((64, 48), device=DEVICE).to(form)  # a weight must lie the other way
        with pytest.raises(RuntimeError, match="col_major"):
            torch.ops.aten._scaled_mm(rows.to(form), by_rows, scale_a=one, scale_b=one)


def test_shapes_of_scaled_products() -> None:
    assert fp8.can_multiply(48, 64)
    assert not fp8.can_multiply(199, 64)
    assert not fp8.can_multiply(48, 72)
