"""Batch-invariant model: products and row operations give a row the same bits in any batch.

Kernels are chosen by shape, so one trial stands for all layers. Compiled kernels compute each
row alone and stay as they are. Knows shapes and how matrices are made; no model, batch or attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ssd_serve.kernels.fixed_rows import (
    BlockForm,
    operation_way,
    product_ways,
    rows_of_block,
    settle,
    trial_product,
)
from ssd_serve.kernels.native.packed import NativePackedLinear
from ssd_serve.kernels.native.products import NativeInt8Matrix, NativeMatrix
from ssd_serve.kernels.rows import NativeRows, RmsNorm, RowOperations
from ssd_serve.models.architectures.contract import RowShapes
from ssd_serve.models.parallel import Parallel
from ssd_serve.models.weights.linear import Linear, Linears, MatrixShare, Table

_INDEPENDENT = (NativeMatrix, NativeInt8Matrix, NativePackedLinear)
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class FixedLinear:
    """A linear layer, run in one way."""

    linear: Linear
    way: BlockForm

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [rows, inputs] -> [rows, outputs]."""
        return self.way.run(self.linear, rows)


@dataclass(frozen=True, slots=True)
class FixedRowOperations:
    """`RowOperations`, run in one way."""

    operations: RowOperations
    way: BlockForm

    def norm(self, hidden: torch.Tensor, added: torch.Tensor | None, norm: RmsNorm) -> torch.Tensor:
        if added is not None:
            hidden.add_(added)  # each sum is rounded once, by any operator
        return self.way.run(lambda rows: self.operations.norm(rows, None, norm), hidden)

    def rotate(
        self, qkv: torch.Tensor, rotations: torch.Tensor, rotated: int, norm: RmsNorm | None
    ) -> torch.Tensor:
        return self.way.run(
            lambda rows, turns: self.operations.rotate(rows, turns, rotated, norm), qkv, rotations
        )

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self.way.run(self.operations.gate, gate_up)


class InvariantLinears:
    """`Linears` with batch-invariant products: rows do not depend on each other. Methods that make a matrix
    raise `UserError` if its product cannot be invariant.

    Matrices may be of several kinds; one matrix of each kind and shape is tested.
    """

    def __init__(self, linears: Linears, device: str, dtype: torch.dtype) -> None:
        self._linears = linears
        self._device = torch.device(device)
        self._dtype = dtype
        self._ways: dict[tuple[type, int, int, bool], BlockForm] = {}

    @property
    def parallel(self) -> Parallel:
        return self._linears.parallel

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._linears.tensor(name, shape)

    def embedding(self, name: str, shape: tuple[int, int]) -> Table:
        return self._linears.embedding(name, shape)

    def by_outputs(self, parts: Sequence[MatrixShare], inputs: int, *, bias: bool) -> Linear:
        shares = [part.own or self.parallel.part(part.outputs) for part in parts]
        outputs = sum(share.stop - share.start for share in shares)
        name = ", ".join(part.name for part in parts)
        return self._fixed(self._linears.by_outputs(parts, inputs, bias=bias), outputs, inputs, bias, name)

    def by_inputs(self, part: MatrixShare, inputs: int, *, bias: bool) -> Linear:
        columns = self.parallel.part(inputs)
        linear = self._linears.by_inputs(part, inputs, bias=bias)
        return self._fixed(linear, part.outputs, columns.stop - columns.start, bias, part.name)

    def wrap(self, weight: Table, bias: torch.Tensor | None = None) -> Linear:
        if isinstance(weight, NativePackedLinear):
            return weight
        outputs, inputs = weight.shape
        return self._fixed(self._linears.wrap(weight, bias), outputs, inputs, bias is not None, "head")

    def _fixed(self, linear: Linear, outputs: int, inputs: int, biased: bool, name: str) -> Linear:
        if isinstance(linear, _INDEPENDENT):
            return linear
        key = type(linear), outputs, inputs, biased
        if key not in self._ways:
            self._ways[key] = self._settle(linear, outputs, inputs, biased, name)
        return FixedLinear(linear, self._ways[key])

    def _settle(self, linear: Linear, outputs: int, inputs: int, biased: bool, name: str) -> BlockForm:
        place = self._device
        trial, rows = trial_product(rows_of_block(place.type), outputs, inputs, self._dtype)
        if place.type == "cpu":
            linear = self._linears.wrap(trial, trial.new_zeros(outputs) if biased else None)
        what = f"the product with the matrix {name!r} by {type(linear).__name__}"
        return settle(linear, (rows.to(place),), product_ways(place.type), what)


def invariant_operations(
    shapes: RowShapes, operations: RowOperations, device: str, dtype: torch.dtype
) -> RowOperations:
    """The same operations, done so that rows do not depend on each other. Raises `UserError`."""
    if isinstance(operations, NativeRows):
        return operations
    place, generator = torch.device(device), torch.Generator().manual_seed(0)
    rows, rotated = rows_of_block(place.type), shapes.heads + shapes.kv_heads

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(place, dtype)

    hidden_norm = RmsNorm(some(shapes.hidden), _EPSILON)
    head_norm = RmsNorm(some(rotated, shapes.head_dim), _EPSILON) if shapes.head_norm else None

    def norm(hidden: torch.Tensor) -> torch.Tensor:
        return operations.norm(hidden, None, hidden_norm)

    def rotate(heads: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        return operations.rotate(heads, turns, rotated, head_norm)

    angles = some(rows, 1, shapes.head_dim // 2).float()
    turns = torch.polar(torch.ones_like(angles), angles)
    way = operation_way(place.type)
    settle(norm, (some(rows, shapes.hidden),), [way], "a norm")
    settle(rotate, (some(rows, rotated + shapes.kv_heads, shapes.head_dim), turns), [way], "a rotation")
    settle(operations.gate, (some(rows, 2 * shapes.gate),), [way], "the gate")
    return FixedRowOperations(operations, way)
