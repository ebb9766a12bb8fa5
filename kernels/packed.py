"""Products of few rows with a fixed matrix on CPUs, the matrix pre-packed by oneDNN.

The one module that calls private torch operators. Each dtype is tried once against the public product before
it is used; where the operators are absent, have another signature or disagree, nothing is packed and callers
keep the public `F.linear`.
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


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine and this torch multiply packed matrices of `dtype`, and rightly."""
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


def cpu_has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware (AVX-512 BF16 or AMX)."""
    cpu = cast(Any, torch.cpu)
    tests = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(cpu, test, lambda: False)()) for test in tests)
