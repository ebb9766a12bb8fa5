"""Products of few rows with a fixed matrix on CPUs, the matrix pre-packed by oneDNN.

The private torch operators for CPUs are called here alone; the one for GPUs is in `fp8`. Each kind is tried
once against exact products before it is used. Where the operators are absent, have another signature or
disagree, nothing is packed and callers keep the public `F.linear`.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F


class PackedMatrix:
    """A weight [outputs, inputs] in oneDNN's own layout, with an optional bias [outputs]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [..., inputs] -> [..., outputs]."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self._bias, "none", [], ""
        )
        return result


class PackedInt8:
    """An int8 weight [outputs, inputs] in oneDNN's own layout, with a float32 scale for each output."""

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        self._packed = torch.ops.onednn.qlinear_prepack(numbers.contiguous(), None)
        self._scales = scales
        self._zeros = torch.zeros_like(scales, dtype=torch.int32)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """uint8 rows [rows, inputs], which mean their value less 128 -> float32 [rows, outputs].

        Sums are exact in int32 and rounded once. Rows are unsigned because oneDNN has no fast product of
        signed ones on x86.
        """
        weight = (self._packed, self._scales, self._zeros)
        result: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, 128, *weight, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return result


def can_pack(dtype: torch.dtype) -> bool:
    """Return True if this machine and this torch multiply packed matrices of `dtype`, and rightly."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((48, 32), generator=generator).to(dtype)
    bias = torch.randn((48,), generator=generator).to(dtype)
    rows = torch.randn((3, 32), generator=generator).to(dtype)
    try:
        result = PackedMatrix(weight, bias)(rows)
    except (RuntimeError, AttributeError, TypeError):
        return False
    expected = F.linear(rows.double(), weight.double(), bias.double())
    tolerance = 64 * torch.finfo(dtype).eps
    return torch.allclose(result.double(), expected, rtol=tolerance, atol=tolerance)


def can_pack_int8() -> bool:
    """Return True if this machine and this torch multiply packed int8 matrices rightly and in hardware
    (VNNI)."""
    has_vnni = getattr(cast(Any, torch.cpu), "_is_vnni_supported", lambda: False)
    if not torch.backends.mkldnn.is_available() or not has_vnni():  # type: ignore[no-untyped-call]
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (48, 256), generator=generator).to(torch.int8)
    # The largest sums there are: products that saturate in 16 bits would show here.
    weight[0], weight[1] = 127, -127
    scales = torch.rand((48,), generator=generator)
    rows = torch.randint(0, 256, (3, 256), generator=generator).to(torch.uint8)
    rows[0], rows[1] = 255, 0
    try:
        result = PackedInt8(weight, scales)(rows)
    except (RuntimeError, AttributeError, TypeError):
        return False
    expected = F.linear(rows.double() - 128, weight.double()) * scales.double()
    return torch.allclose(result.double(), expected, rtol=1e-6, atol=0.0)


def cpu_has_fast_bf16() -> bool:
    """Return True if this CPU multiplies bf16 matrices in hardware (AVX-512 BF16 or AMX)."""
    cpu = cast(Any, torch.cpu)
    tests = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(cpu, test, lambda: False)()) for test in tests)
