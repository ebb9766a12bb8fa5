"""The matrices of a GGUF file: kept in its blocks and multiplied so, or widened where that is not possible.

Knows blocks and names; knows no architecture.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.native.packed import TYPES, NativePackedLinear, StoredBlocks, WeightMemory
from ssd_serve.models.weights.checkpoint import Checkpoint
from ssd_serve.models.weights.formats import StoredMatrix
from ssd_serve.models.weights.gguf.tensors import EMBEDDING, HEAD, GgufTensors, widened
from ssd_serve.models.weights.matrices import ScaledMatrix

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """A matrix, or a rank's share of one, in the blocks of the file."""

    stored: StoredBlocks
    inputs: int

    @property
    def outputs(self) -> int:
        return len(self.stored.blocks)

    def reordered(self, order: torch.Tensor) -> "BlockMatrix":
        return BlockMatrix(StoredBlocks(self.stored.kind, self.stored.blocks[order.numpy()]), self.inputs)

    def write(self, target: torch.Tensor) -> None:
        target.copy_(widened(self.stored, self.inputs))


class GgufMatrices:
    """`Matrices` of a GGUF checkpoint. Without `native` they are all widened."""

    def __init__(self, checkpoint: Checkpoint, native: NativeLibrary | None) -> None:
        self._checkpoint = checkpoint
        self._native = native
        self._memory = WeightMemory()

    def plain(self, name: str, shape: tuple[int, ...], rows: slice = slice(None)) -> torch.Tensor:
        return self._checkpoint.read(name, shape, rows=rows)

    def read(
        self, name: str, shape: tuple[int, int], *, rows: slice = slice(None), columns: slice | None = None
    ) -> StoredMatrix:
        weight = f"{name}.weight"
        file = self._checkpoint.file(weight, shape)
        if isinstance(file, GgufTensors) and file.kind(weight) in TYPES:
            if (stored := file.blocks(weight, rows, columns)) is not None:
                start, stop, _ = (columns or slice(None)).indices(shape[1])
                return BlockMatrix(stored, stop - start)
            if self._native is not None:
                logger.info("%s is widened: its share of a rank ends within a block of the file", weight)
        return ScaledMatrix(self._checkpoint.read(weight, shape, rows=rows, columns=columns))

    def product(
        self, parts: Sequence[StoredMatrix], bias: torch.Tensor | None, device: str
    ) -> NativePackedLinear | None:
        """Keep matrices in their blocks; None where one of them has no blocks, or nothing multiplies them."""
        packed = [part for part in parts if isinstance(part, BlockMatrix)]
        if self._native is None or device != "cpu" or len(packed) < len(parts):
            return None
        stored, inputs = [each.stored for each in packed], packed[0].inputs
        return NativePackedLinear(self._native, stored, inputs, bias, memory=self._memory)

    def saved(self, device: str, dtype: torch.dtype) -> int:
        """Return the bytes that blocks save; the embedding counts where it is the head too."""
        if self._native is None or device != "cpu":
            return 0
        saved = 0
        for name in self._checkpoint.names():
            file = self._checkpoint.file(name)
            if name == EMBEDDING and HEAD in self._checkpoint:
                continue
            if isinstance(file, GgufTensors) and file.kind(name) in TYPES:
                outputs, inputs = file.shape(name)
                saved += outputs * inputs * dtype.itemsize - file.nbytes(name)
        return saved
