"""Products of rows with a fixed matrix on CPUs by oneDNN, in bf16, float32 and with int8 weights.

The private torch operators for CPUs are called here alone; the one for GPUs is in `fp8`. Each kind is tried
once against exact products before it is used. Where the operators are absent, have another signature or
disagree, nothing is packed and callers keep the public `F.linear`.

An int8 weight row is rounded to the nearest of 255 evenly spaced numbers. The product takes bf16 activations
without giving up their precision. Each row becomes 16-bit numbers with a scale per row, split into two bytes.
The two bytes are two rows of one integer product, so that the weights are read once. An element is off by at
most 1 / 65,278 of the largest one in its row. Sums are exact before they are scaled, hence a row's result
does not depend on the number of rows.
"""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)

_LARGEST = 127
_LARGEST_ELEMENT = 32639
"""Largest number of an element: two bytes less 128 each span -32,896 to 32,639."""
_ROUNDING = float(3 << 22)
"""Added to a float32 below 2^22, leaves it rounded to an integer in the lowest bits of the sum."""
_SMALLEST_TOP = 1e-30
_AT_ONCE = 1024
"""Rows that are quantised together, so that float32 copies stay small."""


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
    right = torch.allclose(result.double(), expected, rtol=tolerance, atol=tolerance)
    if not right:
        warn_of_failure(str(dtype).removeprefix("torch."), "torch's F.linear is")
    return right


def can_pack_int8() -> bool:
    """Return True if this machine and this torch multiply packed int8 matrices rightly and by VNNI."""
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
    right = torch.allclose(result.double(), expected, rtol=1e-6, atol=0.0)
    if not right:
        warn_of_failure("int8", "the compiled kernel, or bf16 copies of the weights, are")
    return right


@cache
def warn_of_failure(kind: str, instead: str) -> None:
    """Log the failure, once for each kind of products."""
    logger.warning("oneDNN products in %s failed their self-test: %s used instead", kind, instead)


def cpu_has_fast_bf16() -> bool:
    """Return True if this CPU multiplies bf16 matrices in hardware (AVX-512 BF16 or AMX)."""
    cpu = cast(Any, torch.cpu)
    tests = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(cpu, test, lambda: False)()) for test in tests)


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight as numbers times scales."""

    numbers: torch.Tensor  # int8 [outputs, inputs], -127 to 127
    scales: torch.Tensor  # float32 [outputs], above 0


def quantise(weight: torch.Tensor) -> QuantisedWeight:
    """A weight [outputs, inputs], each row rounded to the nearest multiple of its largest element / 127."""
    scales = weight.abs().amax(1).float() / _LARGEST
    scales = torch.where(scales > 0, scales, 1.0)
    numbers = torch.empty(weight.shape, dtype=torch.int8)
    for start in range(0, len(weight), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        steps = weight[part].float() / scales[part].unsqueeze(1)
        numbers[part] = steps.round_().clamp_(-_LARGEST, _LARGEST)
    return QuantisedWeight(numbers, scales)


class Int8Matrix:
    """A quantised weight [outputs, inputs] and an optional bias [outputs], for bf16 rows."""

    def __init__(self, weight: QuantisedWeight, bias: torch.Tensor | None = None) -> None:
        self._packed = PackedInt8(weight.numbers, weight.scales)
        self._outputs, self._inputs = weight.numbers.shape
        self._bias = torch.zeros(()) if bias is None else bias.float()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [..., inputs] -> [..., outputs], in the dtype of the rows."""
        flat = rows.reshape(rows.numel() // self._inputs, self._inputs)
        pieces, scales = split_rows(flat)
        low, high = self._packed(pieces).chunk(2)  # float32 [rows, outputs] each
        result = torch.addcmul(self._bias, low.add_(high, alpha=256.0), scales).to(rows.dtype)
        return result.view(*rows.shape[:-1], self._outputs)


def split_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [rows, inputs] as bytes uint8 [2 * rows, inputs], low ones first, and scales float32 [rows, 1].

    An element is (low - 128 + 256 * (high - 128)) * scale.
    """
    top = rows.abs().amax(1, keepdim=True).float()  # several times faster than a norm of bf16 rows
    scales = top.clamp_min_(_SMALLEST_TOP).div_(_LARGEST_ELEMENT)
    numbers = torch.div(rows, scales).add_(_ROUNDING + 128 + 256 * 128)
    pieces = numbers.view(torch.uint8).view(*rows.shape, 4)[..., :2].permute(2, 0, 1)
    return pieces.reshape(2 * rows.shape[0], rows.shape[1]), scales


@dataclass(frozen=True, slots=True)
class WidenedMatrix:
    """A quantised weight where int8 products are not built: its numbers in bf16, which holds them exactly.

    The same function up to rounding, as large and as fast as a bf16 weight. `product` multiplies rows by the
    numbers; scales and bias follow in float32.
    """

    product: Callable[[torch.Tensor], torch.Tensor]
    scales: torch.Tensor  # float32 [outputs]
    bias: torch.Tensor | None = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [..., inputs] -> [..., outputs], in the dtype of the rows."""
        result = self.product(rows) * self.scales
        if self.bias is not None:
            result += self.bias
        return result.to(rows.dtype)


def can_multiply_int8() -> bool:
    """Return True if `Int8Matrix` works on this machine; it needs a little-endian CPU."""
    return sys.byteorder == "little" and can_pack_int8()
