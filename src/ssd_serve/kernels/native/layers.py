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
        ("feature", SIZE),
    )


class _Head(ctypes.Structure):
    _fields_ = (
        ("layer", _Layer),
        ("logits", _Matrix),
        ("norms", POINTER * 3),
        ("floors", ctypes.c_double * 3),
        ("adds_normed", SIZE),
        ("keeps_normed", SIZE),
    )


class NativeLayers:
    """Runs all layers of a model, and keeps the outputs of the layers `features`. The queries of a row must fill whole
    vectors: see `can_narrow`."""

    def __init__(
        self, layers: Sequence[LayerPlaces], attention: NativeAttention, features: Sequence[int] = ()
    ) -> None:
        self._run = attention.library.function(
            "ssd_packed_layers",
            POINTER,
            SIZE,
            *[POINTER] * 4,
            INT,
            POINTER,
            *[SIZE] * 4,
            POINTER,
            SIZE,
            INT,
            INT,
            result=INT,
        )
        self._kept: list[object] = [layers]
        self._sizes = attention.heads, attention.kv_heads, attention.head_dim
        self._way = layers[0].matrices[0].way
        self._hidden, self.features = len(layers[0].matrices[1]), tuple(features)
        self._table = (_Layer * len(layers))(
            *(
                _layer(each, attention.places(index), self._place(index), self._kept)
                for index, each in enumerate(layers)
            )
        )

    def run(
        self,
        span: range,
        hidden: torch.Tensor,
        added: torch.Tensor | None,
        rotations: torch.Tensor,
        plan: NativePlan,
        features: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the layers of `span` for bf16 rows; return what the next norm adds to `hidden`.

        `rotations` are those of the rows, complex64 [rows, 1, head_dim / 2]. `features` [rows, len(features), hidden]
        gets the outputs of those layers; without layers to keep there is none. Raises `MemoryError`.
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
            None if features is None else features.data_ptr(),
            len(self.features) * self._hidden,
            self._way,
            torch.get_num_threads(),
        )
        if not done:
            raise MemoryError(f"no memory for a layer of {len(hidden)} rows")
        return result

    def _place(self, index: int) -> int:
        return self.features.index(index) * self._hidden if index in self.features else -1


@dataclass(frozen=True, slots=True)
class HeadPlaces:
    """Matrices and norms of an EAGLE-3 head with one layer, whose own input norm is not used."""

    layer: LayerPlaces
    logits: NativePackedLinear
    norms: tuple[RmsNorm, RmsNorm, RmsNorm]
    """Of tokens, of vectors, and before the logits."""
    adds_normed: bool
    """The layer adds to the normed vectors."""
    keeps_normed: bool
    """The own vectors are those before the logits."""


class NativeHead:
    """Runs a whole EAGLE-3 head in one call. For its queries see `can_narrow`."""

    def __init__(self, head: HeadPlaces, attention: NativeAttention) -> None:
        self._run = attention.library.function(
            "ssd_packed_head",
            *[POINTER] * 6,
            *[SIZE] * 4,
            POINTER,
            SIZE,
            POINTER,
            POINTER,
            INT,
            INT,
            result=INT,
        )
        self._kept: list[object] = [head]
        self._sizes = attention.heads, attention.kv_heads, attention.head_dim
        self._way = head.logits.way
        self._proposed, self._hidden = len(head.logits), head.logits.inputs
        norms = (POINTER * 3)(*(norm.scaled.data_ptr() for norm in head.norms))
        floors = (ctypes.c_double * 3)(*(norm.floor for norm in head.norms))
        layer = _layer(head.layer, attention.places(0), -1, self._kept)
        logits = _matrix(head.logits, self._kept)
        self._head = _Head(layer, logits, norms, floors, head.adds_normed, head.keeps_normed)

    def run(
        self,
        tokens: torch.Tensor,
        vectors: torch.Tensor,
        rotations: torch.Tensor,
        plan: NativePlan,
        wanted: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 logits [wanted, proposed] and bf16 vectors [wanted, hidden] of the rows `wanted`, int64.

        `tokens` are embedded, bf16 [rows, hidden]; they and `vectors` change. Raises `MemoryError`.
        """
        count = len(wanted)
        logits, own = torch.empty((count, self._proposed)), vectors.new_empty((count, self._hidden))
        done = self._run(
            ctypes.addressof(self._head),
            plan.at,
            plan.write_slots_at,
            tokens.data_ptr(),
            vectors.data_ptr(),
            rotations.data_ptr(),
            len(tokens),
            *self._sizes,
            wanted.data_ptr(),
            count,
            logits.data_ptr(),
            own.data_ptr(),
            self._way,
            torch.get_num_threads(),
        )
        if not done:
            raise MemoryError(f"no memory for a head of {len(tokens)} rows")
        return logits, own


def _layer(layer: LayerPlaces, cache: tuple[int, int, int], feature: int, kept: list[object]) -> _Layer:
    """Return a layer as C reads it; what must live as long is added to `kept`."""
    norms = (POINTER * 2)(*(norm.scaled.data_ptr() for norm in layer.norms))
    floors = (ctypes.c_double * 2)(*(norm.floor for norm in layer.norms))
    matrices = (_Matrix * 4)(*(_matrix(matrix, kept) for matrix in layer.matrices))
    return _Layer(matrices, norms, floors, *cache, feature)


def _matrix(matrix: NativePackedLinear, kept: list[object]) -> _Matrix:
    parts = [_Part(part.kind, *part.places, part.start, part.outputs) for part in matrix.parts]
    table = (_Part * len(parts))(*parts)
    kept.append(table)
    return _Matrix(ctypes.addressof(table), len(parts), matrix.inputs, len(matrix))


def can_narrow(attention: NativeAttention) -> bool:
    """Return True if attention's results can be narrowed to bf16 in whole vectors."""
    return attention.heads * attention.head_dim % _LANES == 0
