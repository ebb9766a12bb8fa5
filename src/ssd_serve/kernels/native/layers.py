"""Layers of a dense decoder with packed matrices in one call of the compiled kernel.

The steps and their bits are those of the separate kernels; only the Python calls between them are saved. Knows
layers as addresses; no architecture.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ssd_serve.kernels.native.attention import NativeAttention, NativePlan
from ssd_serve.kernels.native.library import INT, POINTER, SIZE
from ssd_serve.kernels.native.packed import NativePackedLinear
from ssd_serve.kernels.rows import RmsNorm

_LANES = 16
"""Attention's results are narrowed by so many at a time."""


@dataclass(frozen=True, slots=True)
class LayerPlaces:
    """Matrices and norms of one layer, in the order in which they are applied."""

    matrices: tuple[NativePackedLinear, NativePackedLinear, NativePackedLinear, NativePackedLinear]
    """Queries with keys and values; output; gate and up; down."""
    norms: tuple[RmsNorm, RmsNorm]


class _Part(ctypes.Structure):
    _fields_ = (("kind", SIZE), ("packed", POINTER), ("bias", POINTER), ("start", SIZE), ("outputs", SIZE))


class _Matrix(ctypes.Structure):
    _fields_ = (("parts", POINTER), ("count", SIZE), ("inputs", SIZE), ("outputs", SIZE))


class _Layer(ctypes.Structure):
    _fields_ = (
        ("matrices", _Matrix * 4),
        ("norms", POINTER * 2),
        ("floors", ctypes.c_double * 2),
        ("keys", POINTER),
        ("values", POINTER),
        ("window", SIZE),
    )


class NativeLayers:
    """Runs all layers of a model. The queries of a row must fill whole vectors: see `can_narrow`."""

    def __init__(self, layers: Sequence[LayerPlaces], attention: NativeAttention) -> None:
        self._run = attention.library.function(
            "ssd_packed_layers",
            POINTER,
            SIZE,
            *[POINTER] * 4,
            INT,
            POINTER,
            *[SIZE] * 4,
            INT,
            INT,
            result=INT,
        )
        self._kept: list[object] = [layers]
        self._sizes = attention.heads, attention.kv_heads, attention.head_dim
        self._way = layers[0].matrices[0].way
        self._table = (_Layer * len(layers))(
            *(self._layer(each, attention.places(index)) for index, each in enumerate(layers))
        )

    def run(
        self,
        span: range,
        hidden: torch.Tensor,
        added: torch.Tensor | None,
        rotations: torch.Tensor,
        plan: NativePlan,
    ) -> torch.Tensor:
        """Compute the layers of `span` for bf16 rows; return what the next norm adds to `hidden`.

        `rotations` are those of the rows, complex64 [rows, 1, head_dim / 2]. Raises `MemoryError`.
        """
        result = torch.empty_like(hidden) if added is None else added
        done = self._run(
            ctypes.addressof(self._table) + span.start * ctypes.sizeof(_Layer),
            len(span),
            plan.at,
            plan.write_slots_at,
            hidden.data_ptr(),
            result.data_ptr(),
            added is not None,
            rotations.data_ptr(),
            len(hidden),
            *self._sizes,
            self._way,
            torch.get_num_threads(),
        )
        if not done:
            raise MemoryError(f"no memory for a layer of {len(hidden)} rows")
        return result

    def _layer(self, layer: LayerPlaces, cache: tuple[int, int, int]) -> _Layer:
        norms = (POINTER * 2)(*(norm.scaled.data_ptr() for norm in layer.norms))
        floors = (ctypes.c_double * 2)(*(norm.floor for norm in layer.norms))
        matrices = (_Matrix * 4)(*(self._matrix(matrix) for matrix in layer.matrices))
        return _Layer(matrices, norms, floors, *cache)

    def _matrix(self, matrix: NativePackedLinear) -> _Matrix:
        parts = [_Part(part.kind, *part.places, part.start, part.outputs) for part in matrix.parts]
        table = (_Part * len(parts))(*parts)
        self._kept.append(table)
        return _Matrix(ctypes.addressof(table), len(parts), matrix.inputs, len(matrix))


def can_narrow(attention: NativeAttention) -> bool:
    """Return True if attention's results can be narrowed to bf16 in whole vectors."""
    return attention.heads * attention.head_dim % _LANES == 0
