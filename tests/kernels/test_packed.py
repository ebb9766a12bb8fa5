"""Packed products: near to exact ones in every supported dtype, bit-identical to `F.linear` in bf16."""

import pytest
import torch
import torch.nn.functional as F

from ssd_serve.kernels import cpu_products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 8, 70])
@pytest.mark.parametrize("bias", [False, True])
def test_products(dtype: torch.dtype, rows: int, bias: bool) -> None:
    if not cpu_products.can_pack(dtype):
        pytest.skip(f"this machine cannot pack {dtype}")
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn((200, 136), generator=generator).to(dtype)
    offset = torch.randn((200,), generator=generator).to(dtype) if bias else None
    x = torch.randn((rows, 136), generator=generator).to(dtype)
    result = cpu_products.PackedMatrix(weight, offset)(x)
    plain = F.linear(x, weight, offset)
    assert result.shape == (rows, 200)
    assert result.dtype == dtype
    torch.testing.assert_close(result, plain, rtol=4 * torch.finfo(dtype).eps, atol=1e-4)
    if dtype == torch.bfloat16 and not bias:
        assert torch.equal(result, plain)


def test_nothing_is_packed_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not cpu_products.can_pack(torch.float32)


def test_nothing_is_packed_when_an_operator_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> torch.Tensor:
        raise TypeError("unexpected argument")

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", refuse)
    assert not cpu_products.can_pack(torch.float32)


def test_nothing_is_packed_when_results_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: torch.Tensor, *arguments: object) -> torch.Tensor:
        return x.new_zeros((x.shape[0], 48))

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", wrong)
    assert not cpu_products.can_pack(torch.float32)


def test_packing_works_on_x86() -> None:
    if "AVX" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("not an x86 CPU with AVX")
    assert cpu_products.can_pack(torch.float32)
