"""Products of bf16 rows with matrices that stay packed in 4 to 8 bits, by the compiled kernel.

Rows are rounded to 8 bits with a scale for each 32 inputs; products are exact, sums in float32. A row's result
is the same alone and among any others, and by every instruction set. Knows one layer's matrices; no model.
"""

import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ssd_serve.kernels.native.library import INT, POINTER, SIZE, NativeLibrary

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""Types of GGUF that are multiplied packed, numbered as in `packed.h`."""
FASTEST = 9
"""Above every instruction set (0 plain C, 1 AVX2, 2 AVX-512, 3 tiles): a number allows those up to it."""


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A matrix, or some of its outputs, in the blocks of a GGUF file: uint8 [outputs, bytes]."""

    kind: str
    blocks: npt.NDArray[np.uint8]


_RESERVED = 1 << 26
"""Bytes of address space that are reserved at once; what is not used is not resident."""
_LINE = 64


class WeightMemory:
    """Memory for the weights of a model, in huge pages where the system has them.

    Weights are read from end to end for every row, and with small pages address translation takes most of the time.
    """

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """Return `size` bytes at a cache line; the memory is freed with the last tensor in it."""
        rounded = -(-size // _LINE) * _LINE
        if rounded > len(self._left):
            pages = mmap.mmap(-1, max(rounded, _RESERVED), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel without them
                    pages.madvise(mmap.MADV_HUGEPAGE)
            self._left = torch.frombuffer(pages, dtype=torch.uint8)
        taken, self._left = self._left[:size], self._left[rounded:]
        return taken


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Neighbouring outputs of one type."""

    kind: int
    outputs: int
    start: int
    weights: torch.Tensor
    bias: torch.Tensor | None
    places: tuple[int, int | None]
    """Addresses of weights and bias."""


class NativePackedLinear:
    """Matrices one below the other, each in its own type, with an optional bias [outputs], for bf16 rows.

    A single one is also a table of its rows, with the methods of a tensor that an embedding needs.
    """

    def __init__(
        self,
        library: NativeLibrary,
        matrices: Sequence[StoredBlocks],
        inputs: int,
        bias: torch.Tensor | None = None,
        *,
        way: int = FASTEST,
        memory: WeightMemory | None = None,
    ) -> None:
        """`inputs` is a multiple of the inputs in a block of every type."""
        memory = memory or WeightMemory()
        self._multiply = library.function(
            "ssd_multiply_packed", POINTER, SIZE, SIZE, INT, *[POINTER] * 3, SIZE, SIZE, INT, INT, result=INT
        )
        self._rows = library.function("ssd_packed_rows", INT, POINTER, SIZE, POINTER, SIZE, POINTER)
        self._bytes = library.function("ssd_packed_bytes", INT, SIZE, SIZE, result=SIZE)
        self._pack = library.function("ssd_pack", INT, POINTER, SIZE, SIZE, POINTER, INT)
        self._settle = library.function("ssd_pool_settle")
        self.inputs, self.way = inputs, way
        self.parts: list[PackedPart] = []
        start = 0
        for same in _joined(matrices):
            stop = start + len(same.blocks)
            self.parts.append(
                self._part(memory, same, start, None if bias is None else bias[start:stop].float())
            )
            start = stop
        self._outputs = start

    def __del__(self) -> None:
        """Wait until no thread reads the weights."""
        self._settle()

    def __len__(self) -> int:
        return self._outputs

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in memory."""
        return sum(part.weights.nbytes for part in self.parts)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """bf16 rows [..., inputs] -> [..., outputs]. Raises `MemoryError`."""
        rows = rows.contiguous()
        count = rows.numel() // self.inputs
        result = rows.new_empty((*rows.shape[:-1], self._outputs))
        if not count:  # a part of a prompt without logits
            return result
        rows_at, result_at = rows.data_ptr(), result.data_ptr()
        for part in self.parts if count else ():
            done = self._multiply(
                rows_at,
                count,
                self.inputs,
                part.kind,
                *part.places,
                result_at + 2 * part.start,
                self._outputs,
                part.outputs,
                self.way,
                torch.get_num_threads(),
            )
            if not done:
                raise MemoryError(f"no memory to quantise {count} rows of {self.inputs} numbers")
        return result

    def index_select(self, dim: int, index: torch.Tensor) -> torch.Tensor:
        """Rows of a single matrix by their numbers, rounded to bf16: [count, inputs]; `dim` is 0."""
        (part,) = self.parts
        wanted = index.to(torch.int64).contiguous()
        numbers = wanted.numpy()
        if dim or (len(numbers) and not 0 <= numbers.min() <= numbers.max() < self._outputs):
            raise IndexError(f"rows are numbered from 0 to {self._outputs - 1}")
        result = torch.empty((len(wanted), self.inputs), dtype=torch.bfloat16)
        where = (wanted.data_ptr(), len(wanted), result.data_ptr())
        self._rows(part.kind, part.weights.data_ptr(), self.inputs, *where)
        return result

    def _part(
        self, memory: WeightMemory, stored: StoredBlocks, start: int, bias: torch.Tensor | None
    ) -> PackedPart:
        blocks = np.ascontiguousarray(stored.blocks)
        kind, outputs = TYPES.index(stored.kind), len(blocks)
        weights = memory.take(self._bytes(kind, outputs, self.inputs))
        self._pack(
            kind, blocks.ctypes.data, outputs, self.inputs, weights.data_ptr(), torch.get_num_threads()
        )
        places = weights.data_ptr(), None if bias is None else bias.data_ptr()
        return PackedPart(kind, outputs, start, weights, bias, places)


_BLOCK = 32


def can_round(weight: torch.Tensor) -> bool:
    """Return True if `rounded_to_8_bits` takes this matrix."""
    return weight.shape[1] % _BLOCK == 0


def rounded_to_8_bits(weight: torch.Tensor) -> StoredBlocks:
    """Return a matrix [outputs, inputs] in Q8_0: whole numbers to 127, and a scale for each 32 inputs."""
    blocks = weight.float().view(len(weight), -1, _BLOCK)
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    codes = (blocks / scales.float().clamp(min=1e-12)).round().clamp(-127, 127).to(torch.int8)
    stored = torch.cat((scales.view(torch.uint8), codes.view(torch.uint8)), dim=-1)
    return StoredBlocks("Q8_0", stored.reshape(len(weight), -1).numpy())


def _joined(matrices: Sequence[StoredBlocks]) -> list[StoredBlocks]:
    """Return neighbours of one type as one matrix."""
    joined: list[StoredBlocks] = []
    for each in matrices:
        if joined and joined[-1].kind == each.kind:
            joined[-1] = StoredBlocks(each.kind, np.concatenate((joined[-1].blocks, each.blocks)))
        else:
            joined.append(each)
    return joined


def has_packed_products(library: NativeLibrary) -> bool:
    """Return True if this processor has the instructions."""
    return bool(library.function("ssd_packed_way", result=INT)())


def can_multiply_packed(library: NativeLibrary) -> bool:
    """Return True if this processor has the instructions, and their products equal those of plain C."""
    if not has_packed_products(library):
        return False
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((19, 512), generator=generator).bfloat16()
    right = True
    for kind, size in (("Q4_1", 320), ("Q5_0", 352), ("Q8_0", 544), ("Q5_K", 352), ("Q6_K", 420)):
        blocks = torch.randint(0, 60, (40, size), generator=generator).to(torch.uint8).numpy()
        fast, plain = (
            NativePackedLinear(library, [StoredBlocks(kind, blocks)], 512, way=way) for way in (FASTEST, 0)
        )
        right = right and torch.equal(fast(rows), plain(rows))
    return library.accept("packed products", right)
