"""The batch: the one struct that every forward takes, and the contract of tree attention.

A batch is ragged: each request contributes some rows (a prompt chunk, or its root and some tree nodes). A row
attends to its request's whole committed prefix, and to the request's *tree slots* that have their bit set in
the row's ancestry. A batch knows nothing of requests' parameters, of models or of devices.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ssd_serve.base.errors import ProtocolError

if TYPE_CHECKING:
    import torch

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
UInt64Array = npt.NDArray[np.uint64]
IntegerT = TypeVar("IntegerT", bound=np.integer)
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Batch:
    """Host side description of one forward.

    Rows of request r are `request_offsets[r]:request_offsets[r + 1]`. Its committed slots, in order of
    position from 0, are `prefix_slots[prefix_offsets[r]:prefix_offsets[r + 1]]`; every row of the request
    attends to all of them. Its tree slots are `tree_slots[tree_offsets[r]:tree_offsets[r + 1]]`, with their
    positions in `tree_positions`. They include every row written by this forward and may include slots
    written by earlier ones. Bit j of `ancestry[row]` (word j // 64, bit j % 64) means that the row attends to
    the request's j-th tree slot; a row's own bit is always set. A request may have any number of rows >= 1
    and an empty prefix.

    Keys and values of all rows are written to `write_slots` before attention reads them.
    """

    tokens: Int64Array  # [rows]
    positions: Int64Array  # [rows], absolute, from 0
    write_slots: Int64Array  # [rows]
    request_offsets: Int32Array  # [requests + 1]
    prefix_slots: Int32Array  # [sum of prefix lengths]
    prefix_offsets: Int32Array  # [requests + 1]
    tree_slots: Int32Array  # [sum of tree sizes]
    tree_positions: Int64Array  # [sum of tree sizes]
    tree_offsets: Int32Array  # [requests + 1]
    ancestry: UInt64Array  # [rows, words]
    rows_wanted: Int64Array  # [wanted], rows to return logits for, ascending
    vectors: "torch.Tensor | None" = (
        None  # [rows, hidden], of models with more input than tokens; decoders add them to the embeddings
    )

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.tokens)

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.request_offsets) - 1

    def ancestry_bits(self) -> BoolArray:
        """The ancestry as booleans: [rows, 64 * words]."""
        words = np.ascontiguousarray(self.ancestry, dtype="<u8")
        return np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(np.bool_)


class RequestRows(NamedTuple):
    """Rows of one request in a batch.

    Bit j of `ancestry[i]` means that row i attends to the request's j-th tree slot; a row attends to itself.
    Where `tree_slots` is None the rows' own write slots are the tree slots, in order. Where `ancestry` is
    None the rows are a causal chunk: row i attends to rows 0..i.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    write_slots: Sequence[int]
    prefix_slots: Int32Array
    wanted: Sequence[int]
    """Indices, among these rows, of those to return logits for."""
    ancestry: Sequence[int] | None = None
    tree_slots: Sequence[int] | None = None
    tree_positions: Sequence[int] | None = None


def build_batch(parts: Sequence[RequestRows]) -> Batch:
    """Concatenate the parts of all requests into one batch."""
    # Lists are joined first, and few arrays are made and cut: an array for each piece would cost more than
    # its numbers.
    counts = [len(part.tokens) for part in parts]
    trees = [part.write_slots if part.tree_slots is None else part.tree_slots for part in parts]
    sizes = [len(tree) for tree in trees]
    starts = [0, *accumulate(counts)]
    rows, nodes, requests = starts[-1], sum(sizes), len(parts)
    numbers: list[int] = []
    for part in parts:
        numbers += part.tokens
    for part in parts:
        numbers += part.positions
    for part in parts:
        numbers += part.write_slots
    for tree in trees:
        numbers += tree
    for part in parts:
        numbers += part.positions if part.tree_positions is None else part.tree_positions
    for part, start in zip(parts, starts, strict=False):
        numbers += [index + start for index in part.wanted]
    whole = np.array(numbers, dtype=np.int64)
    prefixes = [len(part.prefix_slots) for part in parts]
    offsets = np.array([*starts, 0, *accumulate(prefixes), 0, *accumulate(sizes)], dtype=np.int32)
    words = max((size + 63) // 64 for size in sizes) if sizes else 1
    masks = [mask for part, count in zip(parts, counts, strict=True) for mask in _masks(part, count)]
    ancestry = np.frombuffer(b"".join([mask.to_bytes(8 * words, "little") for mask in masks]), dtype="<u8")
    tree_at = 3 * rows
    return Batch(
        tokens=whole[:rows],
        positions=whole[rows : 2 * rows],
        write_slots=whole[2 * rows : tree_at],
        request_offsets=offsets[: requests + 1],
        prefix_slots=np.concatenate([part.prefix_slots for part in parts]).astype(np.int32, copy=False),
        prefix_offsets=offsets[requests + 1 : 2 * requests + 2],
        tree_slots=whole[tree_at : tree_at + nodes].astype(np.int32),
        tree_positions=whole[tree_at + nodes : tree_at + 2 * nodes],
        tree_offsets=offsets[2 * requests + 2 :],
        ancestry=ancestry.reshape(len(masks), words),
        rows_wanted=whole[tree_at + 2 * nodes :],
    )


def padded(batch: Batch, rows: int, slot: int) -> Batch:
    """The batch with more rows at its end, `rows` in all; each of them is a request that attends to itself.

    They all write to `slot`, which must be no request's.
    """
    more = rows - batch.rows
    own = np.ones((more, 1), dtype=np.uint64)
    each = np.arange(1, more + 1, dtype=np.int32)
    return Batch(
        tokens=_extended(batch.tokens, more, 0),
        positions=_extended(batch.positions, more, 0),
        write_slots=_extended(batch.write_slots, more, slot),
        request_offsets=np.concatenate((batch.request_offsets, batch.request_offsets[-1] + each)),
        prefix_slots=batch.prefix_slots,
        prefix_offsets=_extended(batch.prefix_offsets, more, int(batch.prefix_offsets[-1])),
        tree_slots=_extended(batch.tree_slots, more, slot),
        tree_positions=_extended(batch.tree_positions, more, 0),
        tree_offsets=np.concatenate((batch.tree_offsets, batch.tree_offsets[-1] + each)),
        ancestry=np.concatenate((batch.ancestry, np.pad(own, ((0, 0), (0, batch.ancestry.shape[1] - 1))))),
        rows_wanted=batch.rows_wanted,
    )


def _extended(values: npt.NDArray[IntegerT], more: int, value: int) -> npt.NDArray[IntegerT]:
    return np.concatenate((values, np.full(more, value, dtype=values.dtype)))


def offsets_of(lengths: Sequence[int] | npt.NDArray[np.integer]) -> Int32Array:
    """Return the start of each piece of these lengths, and the end: int32 [pieces + 1]."""
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def _masks(part: RequestRows, count: int) -> Sequence[int]:
    """The ancestry of a part's rows."""
    return [(2 << row) - 1 for row in range(count)] if part.ancestry is None else part.ancestry


_FIELDS = (
    ("tokens", np.int64),
    ("positions", np.int64),
    ("write_slots", np.int64),
    ("tree_positions", np.int64),
    ("rows_wanted", np.int64),
    ("ancestry", np.uint64),
    ("request_offsets", np.int32),
    ("prefix_slots", np.int32),
    ("prefix_offsets", np.int32),
    ("tree_slots", np.int32),
    ("tree_offsets", np.int32),
)
"""The wider numbers first: all of them are aligned then."""
_SIZES = struct.Struct(f"<{len(_FIELDS)}Q")


def pack(batch: Batch) -> bytes:
    """The batch in one message, in this machine's byte order."""
    arrays = [np.ascontiguousarray(getattr(batch, name), dtype=kind) for name, kind in _FIELDS]
    sizes = _SIZES.pack(*(array.size for array in arrays))
    return b"".join((sizes, *(array.data.cast("B") for array in arrays if array.size)))


def unpack(message: bytearray) -> Batch:
    """The batch again, its arrays in the message's memory. Raises `ProtocolError`."""
    if len(message) < _SIZES.size:
        raise ProtocolError(f"a batch of {len(message)} bytes is cut off")
    sizes = _SIZES.unpack_from(message)
    widths = [np.dtype(kind).itemsize for _, kind in _FIELDS]
    needed = _SIZES.size + sum(size * width for size, width in zip(sizes, widths, strict=True))
    if needed != len(message):
        raise ProtocolError(f"a batch of {len(message)} bytes says that it has {needed}")
    arrays: dict[str, np.ndarray] = {}
    start = _SIZES.size
    for (name, kind), size, width in zip(_FIELDS, sizes, widths, strict=True):
        arrays[name] = np.frombuffer(message, kind, size, start)
        start += size * width
    rows = len(arrays["tokens"])
    ancestry = arrays.pop("ancestry")
    words = ancestry.size // max(rows, 1)
    return Batch(**arrays, ancestry=ancestry.reshape(rows, words), vectors=None)
