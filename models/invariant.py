"""A decoder whose rows do not depend on their batch, to the bit: its products and row operations made so.

Kernels are chosen by shape, so one trial stands for all layers. Compiled kernels compute a row alone whatever
the batch is, and stay as they are. Knows a decoder's weights; no batch and no attention.
"""

from dataclasses import dataclass, replace

import torch

from ssd_serve.kernels.native.int8 import NativeInt8Matrix
from ssd_serve.kernels.native.products import NativeMatrix
from ssd_serve.kernels.native.rows import NativeRows
from ssd_serve.kernels.rows.fixed_rows import (
    BlockForm,
    operation_way,
    product_ways,
    rows_of_block,
    settle,
    trial_product,
)
from ssd_serve.kernels.rows.norm import RmsNorm
from ssd_serve.kernels.rows.operations import RowOperations
from ssd_serve.models.config import DecoderConfig
from ssd_serve.models.decoder import DecoderWeights
from ssd_serve.models.weights.linear import Linear, LinearFactory

_INDEPENDENT = (NativeMatrix, NativeInt8Matrix)


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
        """See `RowOperations`."""
        if added is not None:
            hidden.add_(added)  # each sum is rounded once, whoever computes it
        return self.way.run(lambda rows: self.operations.norm(rows, None, norm), hidden)

    def rotate(
        self, qkv: torch.Tensor, rotations: torch.Tensor, rotated: int, norm: RmsNorm | None
    ) -> torch.Tensor:
        """See `RowOperations`."""
        return self.way.run(
            lambda rows, turns: self.operations.rotate(rows, turns, rotated, norm), qkv, rotations
        )

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `RowOperations`."""
        return self.way.run(self.operations.gate, gate_up)


def invariant_weights(config: DecoderConfig, weights: DecoderWeights, make: LinearFactory) -> DecoderWeights:
    """The same weights, multiplied so that rows do not depend on each other. Raises `UserError`."""
    c = config
    heads = (c.heads + 2 * c.kv_heads) * c.head_dim
    qkv = _Products("query, key and value", heads, c.hidden, c.qkv_bias, make, weights)
    output = _Products("attention's output", c.hidden, c.heads * c.head_dim, c.output_bias, make, weights)
    gate_up = _Products("gate and up", 2 * c.intermediate, c.hidden, c.mlp_bias, make, weights)
    down = _Products("down", c.hidden, c.intermediate, c.mlp_bias, make, weights)
    head = _Products("head", c.vocabulary, c.hidden, False, make, weights)
    layers = tuple(
        replace(
            layer,
            qkv=qkv.fixed(layer.qkv),
            output=output.fixed(layer.output),
            gate_up=gate_up.fixed(layer.gate_up),
            down=down.fixed(layer.down),
        )
        for layer in weights.layers
    )
    return replace(weights, layers=layers, head=head.fixed(weights.head))


def invariant_operations(
    config: DecoderConfig, weights: DecoderWeights, operations: RowOperations
) -> RowOperations:
    """The same operations, done so that rows do not depend on each other. Raises `UserError`."""
    if isinstance(operations, NativeRows):
        return operations
    like, layer, c = weights.embedding, weights.layers[0], config
    rows, generator = rows_of_block(like.device.type), torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn((rows, *shape), generator=generator).to(like.device, like.dtype)

    def norm(hidden: torch.Tensor) -> torch.Tensor:
        return operations.norm(hidden, None, layer.input_norm)

    def rotate(heads: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        return operations.rotate(heads, turns, c.heads + c.kv_heads, layer.qk_norm)

    angles = some(1, c.head_dim // 2).float()
    turns = torch.polar(torch.ones_like(angles), angles)
    way = operation_way(like.device.type)
    settle(norm, (some(c.hidden),), [way], "a norm")
    settle(rotate, (some(c.heads + 2 * c.kv_heads, c.head_dim), turns), [way], "a rotation")
    settle(operations.gate, (some(2 * c.intermediate),), [way], "the gate")
    return FixedRowOperations(operations, way)


class _Products:
    """The matrices of one place in the layers. They may be of several kinds; of each, one is tried."""

    def __init__(
        self,
        name: str,
        outputs: int,
        inputs: int,
        biased: bool,
        make: LinearFactory,
        weights: DecoderWeights,
    ) -> None:
        self._name = name
        self._outputs, self._inputs = outputs, inputs
        self._biased = biased
        self._make = make
        self._like = weights.embedding
        self._ways: dict[type, BlockForm] = {}

    def fixed(self, linear: Linear) -> Linear:
        """A matrix of this place, run so that its rows do not depend on each other."""
        if isinstance(linear, _INDEPENDENT):
            return linear
        kind = type(linear)
        if kind not in self._ways:
            self._ways[kind] = self._settle(linear)
        return FixedLinear(linear, self._ways[kind])

    def _settle(self, linear: Linear) -> BlockForm:
        place, dtype = self._like.device, self._like.dtype
        trial, rows = trial_product(rows_of_block(place.type), self._outputs, self._inputs, dtype)
        if place.type == "cpu":
            linear = self._make.wrap(trial, trial.new_zeros(self._outputs) if self._biased else None)
        what = f"the product with the matrix {self._name!r} by {type(linear).__name__}"
        return settle(linear, (rows.to(place),), product_ways(place.type), what)
