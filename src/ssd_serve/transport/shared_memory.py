"""Memory shared by two processes of one machine: one writes spans, the other reads and returns them in order.

The writer creates it without a name and passes the descriptor over a unix socket, so it disappears with the
two processes. Messages carry the spans and the number of spans read. Knows bytes and descriptors only.
"""

import contextlib
import fcntl
import mmap
import os
import sys
from collections import deque
from typing import NamedTuple

from ssd_serve.base.errors import ProtocolError

_ALIGNED = 64
_MAX_BYTES = 1 << 30
"""Limit of what a peer may offer."""


class SharedSpan(NamedTuple):
    """A range of bytes in the memory."""

    offset: int
    length: int


class RingAllocator:
    """Allocates spans of a memory in a ring: they are returned in the order of allocation.

    Invariant: taken spans do not overlap; a span never wraps around the end.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: deque[SharedSpan] = deque()
        self._returned = 0

    def __len__(self) -> int:
        return len(self._taken)

    def find(self, length: int) -> int | None:
        """The offset of free bytes; None if there are too few in one piece."""
        if not self._taken:
            return 0 if length <= self.size else None
        first = self._taken[0].offset
        last = self._taken[-1]
        end = last.offset + -(-last.length // _ALIGNED) * _ALIGNED
        if last.offset < first:  # wrapped around: only the gap is free
            return end if end + length <= first else None
        if end + length <= self.size:
            return end
        return 0 if length <= first else None

    def take(self, place: SharedSpan) -> None:
        """Take a span that `find` returned."""
        self._taken.append(place)

    def give_back(self, total: int) -> None:
        """Return spans up to this total count since the start. Raises `ProtocolError` for an impossible
        count."""
        more = total - self._returned
        if not 0 <= more <= len(self._taken):
            raise ProtocolError(f"{total} spans of shared memory cannot have been read")
        for _ in range(more):
            self._taken.popleft()
        self._returned = total


class SharedWriter:
    """The writer's side. Raises `OSError` if shared memory is unavailable."""

    def __init__(self, size: int) -> None:
        if sys.platform != "linux":
            raise OSError("memory is shared on Linux only")
        self.ring = RingAllocator(size)
        self.descriptor = os.memfd_create("ssd-features", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size)
            # Sealed, so that neither side can truncate pages that the other has mapped.
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._bytes = memoryview(mmap.mmap(self.descriptor, size))
        except (OSError, ValueError):
            self.close()
            raise

    def at(self, place: SharedSpan) -> memoryview:
        """A writable view of a span, until it is announced in a message."""
        return self._bytes[place.offset : place.offset + place.length]

    def close(self) -> None:
        """Close the descriptor; the memory lives as long as its mappings."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


class SharedReader:
    """The reader's side: maps a descriptor from the peer and closes it.

    Raises `ProtocolError` if the memory may shrink or has another size, `OSError` if it cannot be mapped.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.read = 0
        """Number of spans read so far."""
        self._size = size
        if descriptor < 0:
            raise OSError("no descriptor came with the offer")
        try:
            if (
                not 0 < size <= _MAX_BYTES
                or os.fstat(descriptor).st_size != size
                or not _cannot_shrink(descriptor)
            ):
                raise ProtocolError("the offered descriptor is no sealed memory of this size")
            self._bytes = memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ))
        finally:
            os.close(descriptor)

    def copy(self, place: SharedSpan) -> bytes:
        """Copy a span, which may then be overwritten. Raises `ProtocolError` if it is out of range."""
        offset, length = place
        if offset < 0 or length < 0 or offset + length > self._size:
            raise ProtocolError(f"{length} bytes from {offset} on are not in {self._size} of shared memory")
        self.read += 1
        return bytes(self._bytes[offset : offset + length])


def _cannot_shrink(descriptor: int) -> bool:
    with contextlib.suppress(OSError, AttributeError):  # a file that cannot be sealed, or no such system
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    return False
