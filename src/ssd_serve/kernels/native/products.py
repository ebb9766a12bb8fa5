"""bf16 products of rows with a fixed matrix, by the compiled kernel.

A row's result is the same alone and among any others. Knows one matrix; no model.
"""

import torch
import torch.nn.functional as F

from ssd_serve.base.errors import UserError
from ssd_serve.kernels.cpu_products import QuantisedWeight, quantise
from ssd_serve.kernels.native.library import INT, POINTER, SIZE, NativeLibrary

_PANEL = 32
"""Outputs that are stored together, and the multiple to which bf16 inputs are padded, as in `products.c`."""


class NativeMatrix:
    """A bf16 weight [outputs, inputs], inputs even, with an optional bias [outputs].

    By the processor's tiles where it has some, unless `tiles` is false: they take many rows at the price of
    one, and round otherwise.
    """

    def __init__(
        self,
        library: NativeLibrary,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        tiles: bool = True,
    ) -> None:
        arguments = (POINTER, SIZE, SIZE, POINTER, POINTER, POINTER, SIZE, INT, INT)
        self._multiply = library.function("ssd_multiply_bf16", *arguments, result=INT)
        self._tiles = tiles and has_tiles(library)
        self._outputs, self._inputs = weight.shape
        missing = -self._outputs % (2 * _PANEL)
        padded = F.pad(weight, (0, -self._inputs % _PANEL, 0, missing))
        panels = padded.view(-1, _PANEL, padded.shape[1] // 2, 2)
        self._packed = panels.transpose(1, 2).contiguous()  # [panels, inputs / 2, 32, 2]
        self._bias = None if bias is None else F.pad(bias.float(), (0, missing))
        self._weights_at = self._packed.data_ptr()
        self._bias_at = None if self._bias is None else self._bias.data_ptr()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """bf16 rows [..., inputs] -> [..., outputs]."""
        return self.into(rows.new_empty((*rows.shape[:-1], self._outputs)), rows)

    def into(self, result: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The same, written to `result`. Raises `MemoryError`."""
        rows = rows.contiguous()
        count = rows.numel() // self._inputs
        done = self._multiply(
            rows.data_ptr(),
            count,
            self._inputs,
            self._weights_at,
            self._bias_at,
            result.data_ptr(),
            self._outputs,
            self._tiles,
            torch.get_num_threads(),
        )
        if not done:
            raise MemoryError(f"no memory to widen {count} rows of {self._inputs} numbers")
        return result


def has_tiles(library: NativeLibrary) -> bool:
    """Return True if this processor multiplies bf16 by tiles, and this process may use them."""
    return bool(library.function("ssd_tiles_multiply_bf16", result=INT)())


def has_bf16_products(library: NativeLibrary) -> bool:
    """Return True if this processor has the instructions."""
    return bool(library.function("ssd_can_multiply_bf16", result=INT)())


def can_multiply_bf16(library: NativeLibrary) -> bool:
    """Return True if this processor has the instructions, and the products are right, and alike for few rows
    and many."""
    if not has_bf16_products(library):
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((48, 66), generator=generator).bfloat16()
    bias = torch.randn((48,), generator=generator).bfloat16()
    rows = torch.randn((17, 66), generator=generator).bfloat16()
    expected = F.linear(rows.double(), weight.double(), bias.double())
    found = torch.full((17, 48), torch.nan, dtype=torch.bfloat16)
    matrix = NativeMatrix(library, weight, bias)
    matrix.into(found, rows)
    tolerance = 2 * torch.finfo(torch.bfloat16).eps
    right = torch.allclose(found.double(), expected, rtol=tolerance, atol=tolerance)
    alike = all(torch.equal(matrix(rows[:few]), found[:few]) for few in (1, 3))
    return library.accept("products in bf16", right and alike)


_TOGETHER, _INT8_TILE = 4, 64
"""Inputs that are stored together, and the multiple to which int8 inputs are padded, as in `int8.c`."""
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
        numbers = F.pad(weight.numbers, (0, -self._inputs % _INT8_TILE, 0, more))
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
    """Return True if this processor has the instructions."""
    return bool(library.function("ssd_can_multiply_int8", result=INT)())


def can_multiply_int8(library: NativeLibrary) -> bool:
    """Return True if this processor has the instructions, and the products are right."""
    if not has_int8_products(library):
        return False
    generator = torch.Generator().manual_seed(0)
    weight = quantise(torch.randn((48, 70), generator=generator))
    rows = torch.randn((9, 70), generator=generator).bfloat16()
    expected = F.linear(rows.double(), weight.numbers.double()) * weight.scales.double()
    found = torch.full((9, 48), torch.nan, dtype=torch.bfloat16)
    NativeInt8Matrix(library, weight).into(found, rows)
    right = torch.allclose(found.double(), expected, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=1e-3)
    return library.accept("products in int8", right)
