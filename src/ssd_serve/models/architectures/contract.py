"""Contract of an architecture: how its configuration is read, what its models hold, and
how they are built.

Knows no architecture; those that there are stand in `registry`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch

from ssd_serve.cache.kv import KVLayout, LayerKV
from ssd_serve.kernels.attention.contract import AttentionBackend
from ssd_serve.kernels.rows import RowOperations
from ssd_serve.models.config import Json
from ssd_serve.models.interface import CapturableModel, ModelFacts
from ssd_serve.models.parallel import Group, Parallel
from ssd_serve.models.weights.checkpoint import Checkpoint
from ssd_serve.models.weights.linear import Linears
from ssd_serve.models.weights.quantization import Fp8Scheme


class ModelConfig(Protocol):
    """Fields that every architecture's configuration has."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def hidden(self) -> int: ...

    @property
    def context(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def fp8(self) -> Fp8Scheme | None:
        """Scaling of fp8 weights in the file; None: there may be none."""
        ...


@dataclass(frozen=True, slots=True)
class Matrices:
    """`count` equal matrices, each fused of the file's matrices that share their input."""

    outputs: tuple[int, ...]
    """Outputs of each of the fused ones."""
    inputs: int
    count: int = 1
    active: int | None = None
    """Number of them that a forward of one row reads (mixtures of experts); None: all."""

    @property
    def size(self) -> int:
        """Numbers in one of them."""
        return sum(self.outputs) * self.inputs

    @property
    def read(self) -> int:
        """Numbers that a forward of one row reads."""
        return (self.count if self.active is None else self.active) * self.size

    @property
    def resident(self) -> int:
        """Numbers in all of them."""
        return self.count * self.size


@dataclass(frozen=True, slots=True)
class RowShapes:
    """Sizes of a row in `RowOperations`: norm [hidden], rotation of heads, gate [2 * gate]."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    gate: int
    head_norm: bool
    """True if heads are normed before they are rotated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Counts of the numbers that one rank of a model holds; bytes follow from the dtype."""

    matrices: tuple[Matrices, ...]
    """Matrices except the head."""
    head: Matrices
    embedding: int
    """Numbers of the embedding."""
    tied: bool
    """The head is the embedding too, where its format allows that."""
    kv: tuple[LayerKV, ...]
    """KV of each layer."""
    rows: RowShapes
    ranks: tuple[int, ...]
    """Numbers of ranks that can share the model."""

    @property
    def read(self) -> int:
        """Numbers in the matrices that a forward of one row reads (the head, not the embedding)."""
        return self.head.read + sum(each.read for each in self.matrices)

    @property
    def resident(self) -> int:
        """Numbers in all matrices (the head, not the embedding): what memory must hold."""
        return self.head.resident + sum(each.resident for each in self.matrices)

    @property
    def outputs(self) -> int:
        """Outputs of all matrices."""
        return sum(each.count * sum(each.outputs) for each in (self.head, *self.matrices))

    @property
    def largest(self) -> int:
        """Numbers in the largest matrix that is multiplied."""
        return max(each.size for each in (self.head, *self.matrices))

    def layout(self, dtype: torch.dtype) -> KVLayout:
        """Return the layout of the KV cache, in the dtype that attention computes in."""
        return KVLayout(self.kv, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """Parts on which a model of any architecture is built. Every forward returns the outputs of the layers
    `features` for all rows, with `FINAL` if it is requested; `feature_name` names them."""

    attention: AttentionBackend[Any]
    operations: RowOperations
    facts: ModelFacts
    slots: int
    release: Callable[[Sequence[range]], None]
    """`KVCache.release`."""
    features: tuple[int, ...] = ()
    group: Group = field(default_factory=Group)


C = TypeVar("C", bound=ModelConfig)
W = TypeVar("W")


def _as_they_are(operations: RowOperations) -> RowOperations:
    return operations


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture(Generic[C, W]):
    """Architecture, or a member of a family. C is its configuration, W are its weights."""

    models: str
    """Models that have it, for people."""
    parse: Callable[[Json, Json], C]
    """The configuration, from `config.json` and `generation_config.json` (empty where there is none). What
    cannot be computed exactly is a `CheckpointError`."""
    sizes: Callable[[C, Parallel], Sizes]
    """Counts this rank's share. Raises `UserError` where that many ranks cannot share the model."""
    read_weights: Callable[[C, Checkpoint, Linears], W]
    """Reads one rank's share of all weights. Missing, misshapen and unexpected tensors are a
    `CheckpointError`."""
    build: Callable[[C, W, ModelParts], CapturableModel]
    """The model of one rank; the configuration is the whole model's."""
    operations: Callable[[RowOperations], RowOperations] = _as_they_are
    """Replaces the usual row operations."""


@dataclass(frozen=True, slots=True)
class Description(Generic[C]):
    """A model before its weights are read."""

    architecture: Architecture[C, Any]
    config: C
    unread: tuple[str, ...] = ()
    """Keys of `config.json` that nothing has read."""

    def sizes(self, parallel: Parallel) -> Sizes:
        """Count one rank's share; see `Architecture.sizes`."""
        return self.architecture.sizes(self.config, parallel)
