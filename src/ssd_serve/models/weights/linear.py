"""Linear layers: each rank's part of a matrix, and its layout in memory.

A model asks the factory for its matrices by checkpoint names and never touches weights itself. The factory
reads this rank's slices, fuses matrices that share their input, and packs them where that is faster. Formats
today: dense, packed and int8 (the latter two on CPUs, by a compiled kernel or by oneDNN), and fp8 on GPUs
that multiply it. Elsewhere weights that lie in the file in fp8 are widened to the model's dtype when they are
read. Knows no architecture.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from ssd_serve.base.errors import UserError
from ssd_serve.kernels.cpu_products import (
    Int8Matrix,
    PackedMatrix,
    WidenedMatrix,
    can_multiply_int8,
    can_pack,
    quantise,
)
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.native.packed import (
    NativePackedLinear,
    WeightMemory,
    can_multiply_packed,
    can_round,
    rounded_to_8_bits,
)
from ssd_serve.kernels.native.products import NativeInt8Matrix, NativeMatrix, can_multiply_bf16
from ssd_serve.kernels.native.products import can_multiply_int8 as native_multiplies_int8
from ssd_serve.models.parallel import Parallel
from ssd_serve.models.weights.checkpoint import Checkpoint
from ssd_serve.models.weights.formats import StoredMatrix
from ssd_serve.models.weights.quantization import Fp8Scheme

Table = torch.Tensor | NativePackedLinear
"""An embedding [tokens, hidden], of which `index_select` gives rows."""


class Linear(Protocol):
    """rows [..., inputs] -> [..., outputs]."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """A plain matrix [outputs, inputs]; on GPUs, and wherever packing is not possible."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [..., inputs] -> [..., outputs]."""
        return F.linear(rows, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class MatrixShare:
    """A part of a fused matrix: its name without `.weight`, and its outputs."""

    name: str
    outputs: int
    order: torch.Tensor | None = None
    """The new order of this rank's outputs, if any."""
    own: slice | None = None
    """This rank's outputs; None: an even share."""


MatrixKind = Callable[[torch.Tensor, torch.Tensor | None], Linear]


def matrix_kind(
    dtype: torch.dtype, device: str, native: NativeLibrary | None, rounded: bool = False
) -> MatrixKind:
    """Return the fastest product for rows of `dtype` on this device: the compiled kernel, oneDNN or torch.

    `rounded`: bf16 weights may be rounded to 8 bits.
    """
    if device != "cpu":
        return DenseLinear
    other: MatrixKind = PackedMatrix if can_pack(dtype) else DenseLinear
    if native is None or dtype is not torch.bfloat16 or not can_multiply_bf16(native):
        return other

    memory, rounds = WeightMemory(), rounded and can_multiply_packed(native)

    def compiled(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        if rounds and can_round(weight):
            stored = [rounded_to_8_bits(weight)]
            return NativePackedLinear(native, stored, weight.shape[1], bias, memory=memory)
        even = weight.shape[1] % 2 == 0
        return NativeMatrix(native, weight, bias) if even else other(weight, bias)

    return compiled


def multiplies_int8(native: NativeLibrary | None) -> bool:
    """Return True if int8 weights stay int8 on this machine: by oneDNN, or by the compiled kernels."""
    return can_multiply_int8() or (native is not None and native_multiplies_int8(native))


class Linears(Protocol):
    """Source of an architecture's weights, by their names in the checkpoint."""

    @property
    def parallel(self) -> Parallel:
        """Rank to read the share of."""
        ...

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor that every rank holds whole (a norm), in the model's dtype and device."""
        ...

    def embedding(self, name: str, shape: tuple[int, int]) -> Table:
        """This rank's rows of a table with one row a token of the vocabulary."""
        ...

    def by_outputs(self, parts: Sequence[MatrixShare], inputs: int, *, bias: bool) -> Linear:
        """Matrices that share their input, fused; every rank computes its share of each one's outputs."""
        ...

    def by_inputs(self, part: MatrixShare, inputs: int, *, bias: bool) -> Linear:
        """A matrix with inputs split over the ranks; the results of all ranks are summed."""
        ...

    def wrap(self, weight: Table, bias: torch.Tensor | None = None) -> Linear:
        """A weight [outputs, inputs], wherever it is, in the format of this device; the dense copy is not
        kept when packed. An embedding that is packed is the product too."""
        ...


class LinearFactory:
    """`Linears` of one rank from a checkpoint: in `dtype`, or int8 for rows in `dtype`.

    `packed`: matrices are packed where that is faster. `fp8` is how the checkpoint's fp8 weights are scaled,
    None: it holds none. `keep`: weights of few bits stay as they are on CPUs. `rounded`: see `matrix_kind`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        parallel: Parallel,
        device: str,
        dtype: torch.dtype,
        packed: bool = True,
        int8: bool = False,
        native: NativeLibrary | None = None,
        fp8: Fp8Scheme | None = None,
        keep: bool = False,
        rounded: bool = False,
    ) -> None:
        if int8 and device != "cpu":
            raise UserError(f"int8 weights are not built for {device}, only for CPUs; use another dtype")
        self._checkpoint = checkpoint
        self._matrices = checkpoint.format.matrices(checkpoint, fp8, native if keep else None)
        self._keeps = keep
        self._keeps_layout = keep or checkpoint.format.multiplies(fp8, device)
        self._parallel = parallel
        self._device = device
        self._dtype = dtype
        self._kind = matrix_kind(dtype, device, native, rounded) if packed else DenseLinear
        self._int8 = int8
        quantised = int8 and packed
        self._int8_products = quantised and can_multiply_int8()
        self._native_int8 = native if quantised and native and native_multiplies_int8(native) else None
        # Numbers are rounded once, from the file's dtype to int8.
        self._read_dtype = torch.float32 if int8 else dtype

    @property
    def parallel(self) -> Parallel:
        return self._parallel

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._matrices.plain(name, shape).to(self._device, self._dtype)

    def embedding(self, name: str, shape: tuple[int, int]) -> Table:
        rows = self._parallel.nearly_even(shape[0])
        if self._keeps:
            stored = self._matrices.read(name.removesuffix(".weight"), shape, rows=rows)
            kept = self._matrices.product([stored], None, self._device)
            if isinstance(kept, NativePackedLinear):
                return kept
        return self._matrices.plain(name, shape, rows).to(self._device, self._dtype)

    def by_outputs(self, parts: Sequence[MatrixShare], inputs: int, *, bias: bool) -> Linear:
        shares = [part.own or self._parallel.part(part.outputs) for part in parts]
        biases: list[torch.Tensor] = []
        for part, share in zip(parts, shares, strict=True) if bias else ():
            offset = self._checkpoint.read(f"{part.name}.bias", (part.outputs,), rows=share)
            biases.append(offset if part.order is None else offset[part.order])
        stored = (self._read(part, inputs, share) for part, share in zip(parts, shares, strict=True))
        return self._fuse(stored, sum(share.stop - share.start for share in shares), inputs, biases)

    def by_inputs(self, part: MatrixShare, inputs: int, *, bias: bool) -> Linear:
        shape = (part.outputs, inputs)
        columns = self._parallel.part(inputs)
        stored = self._matrices.read(part.name, shape, columns=columns)
        offsets: list[torch.Tensor] = []
        if bias and self._parallel.rank:  # ranks sum their results, so only one of them may add the bias
            self._checkpoint.ignore(f"{part.name}.bias")
        elif bias:
            offsets.append(self._checkpoint.read(f"{part.name}.bias", (part.outputs,)))
        return self._fuse([stored], part.outputs, columns.stop - columns.start, offsets)

    def _read(self, part: MatrixShare, inputs: int, share: slice) -> StoredMatrix:
        stored = self._matrices.read(part.name, (part.outputs, inputs), rows=share)
        return stored if part.order is None else stored.reordered(part.order)

    def _fuse(
        self, parts: Iterable[StoredMatrix], outputs: int, inputs: int, biases: list[torch.Tensor]
    ) -> Linear:
        """Stored matrices one below the other, each with its own scales, as one layer."""
        bias = torch.cat(biases) if biases else None
        if self._keeps_layout:
            parts = list(parts)
            if (kept := self._matrices.product(parts, bias, self._device)) is not None:
                return kept
        weight = torch.empty((outputs, inputs), dtype=self._read_dtype, device=self._device)
        start = 0
        for part in parts:  # one at a time: the file's copy of a large model's matrix is large too
            stop = start + part.outputs
            part.write(weight[start:stop])
            start = stop
        return self.wrap(weight, bias)

    def wrap(self, weight: Table, bias: torch.Tensor | None = None) -> Linear:
        if isinstance(weight, NativePackedLinear):
            return weight
        if bias is not None:
            bias = bias.to(self._device, self._dtype)
        if self._int8:
            return self._quantise(weight.to(self._device), bias)
        return self._kind(weight.to(self._device, self._dtype), bias)

    def _quantise(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        quantised = quantise(weight)
        if self._native_int8 is not None:
            return NativeInt8Matrix(self._native_int8, quantised, bias)
        if self._int8_products:
            return Int8Matrix(quantised, bias)
        return WidenedMatrix(self._kind(quantised.numbers.to(self._dtype), None), quantised.scales, bias)
