"""A batch as one buffer, for ranks that compute the same forward: all sizes, then all arrays.

Knows the batch's fields and their order; not who sends it.
"""

import struct

import numpy as np

from ssd_serve.base.errors import ProtocolError
from ssd_serve.kernels.batch import Batch

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
