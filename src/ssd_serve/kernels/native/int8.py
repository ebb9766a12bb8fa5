"""Products with int8 weights by the compiled kernel, which reads them once for several rows.

The scheme is that of `kernels.products.int8`. Results are the same to the bit by VNNI; by AVX2 sums are
scaled once and rounded less. Knows one matrix, and no model.
"""

import torch
import torch.nn.functional as F

from ssd_serve.base.errors import UserError
from ssd_serve.kernels.native.library import INT, POINTER, SIZE, NativeLibrary
from ssd_serve.kernels.products.int8 import QuantisedWeight, quantise

_PANEL, _TOGETHER, _TILE = 32, 4, 64
"""Outputs and inputs that lie together, and what inputs are rounded up to, as in `int8.c`."""
_MAX_INPUTS = 1 << 17


class NativeInt8Matrix:
    """A quantised weight [outputs, inputs] and an optional bias [outputs], for bf16 rows. Products are the
    same with the processor's `tiles` and without."""

    def __init__(
        self,
        library: NativeLibrary,
        weight: QuantisedWeight,
        bias: torch.Tensor | None = None,
        tiles: bool = True,
    ) -> None:
        self._outputs, self._inputs = weight.numbers.shape
        if self._inputs > _MAX_INPUTS:
            raise UserError(f"int8 matrices have at most {_MAX_INPUTS} inputs; use another dtype")
        self._multiply = library.function(
            "ssd_multiply_int8", POINTER, SIZE, SIZE, *[POINTER] * 5, SIZE, POINTER, POINTER, INT, INT
        )
        more = -self._outputs % _PANEL
        numbers = F.pad(weight.numbers, (0, -self._inputs % _TILE, 0, more))
        panels = numbers.view(-1, _PANEL, numbers.shape[1] // _TOGETHER, _TOGETHER)
        self._packed = panels.transpose(1, 2).contiguous()  # [panels, inputs / 4, 32, 4]
        self._start = numbers.sum(1, dtype=torch.int32).mul_(-128)
        self._scales = F.pad(weight.scales, (0, more))
        self._bias = None if bias is None else F.pad(bias.float(), (0, more))
        parts = (self._packed, self._start, self._scales)
        self._parts_at = tuple(part.data_ptr() for part in parts)
        self._bias_at = None if self._bias is None else self._bias.data_ptr()
        self._plane = numbers.shape[1]
        self._tiles = tiles

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """bf16 rows [..., inputs] -> [..., outputs]."""
        return self.into(rows.new_empty((*rows.shape[:-1], self._outputs)), rows)

    def into(self, result: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The same, written to `result`."""
        rows = rows.contiguous()
        count = rows.numel() // self._inputs
        scratch = torch.empty(count * (2 * self._plane + 4), dtype=torch.uint8)
        planes_at = scratch.data_ptr()
        self._multiply(
            rows.data_ptr(),
            count,
            self._inputs,
            *self._parts_at,
            self._bias_at,
            result.data_ptr(),
            self._outputs,
            planes_at,
            planes_at + 2 * count * self._plane,
            self._tiles,
            torch.get_num_threads(),
        )
        return result


def has_int8_products(library: NativeLibrary) -> bool:
    """Whether this processor has the instructions."""
    return bool(library.function("ssd_can_multiply_int8", result=INT)())


def can_multiply_int8(library: NativeLibrary) -> bool:
    """Whether this processor has the instructions, and the products are right."""
    if not has_int8_products(library):
        return False
    generator = torch.Generator().manual_seed(0)
    weight = quantise(torch.randn((48, 70), generator=generator))
    rows = torch.randn((9, 70), generator=generator).bfloat16()
    expected = F.linear(rows.double(), weight.numbers.double()) * weight.scales.double()
    found = torch.full((9, 48), torch.nan, dtype=torch.bfloat16)
    NativeInt8Matrix(library, weight).into(found, rows)
    return torch.allclose(found.double(), expected, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=1e-3)
