"""Memory that two processes of one machine share: one writes pieces, the other reads and gives them back.

The writer makes it without a name and hands the open file over a unix socket, so that it is gone with the two
processes, however they end. Where pieces are is said in messages, and so is how many were read: a piece stays
as it is until then. Knows bytes and descriptors; neither messages nor what the bytes mean.
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
_MOST_BYTES = 1 << 30
"""Of what a peer may offer."""


class SharedSpan(NamedTuple):
    """Where a piece is, in bytes."""

    offset: int
    length: int


class RingAllocator:
    """Which bytes of a memory of this size are taken: pieces are given back in the order in which they were
    taken, and lie behind each other, from the beginning again where the end is too near."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: deque[SharedSpan] = deque()
        self._returned = 0

    def __len__(self) -> int:
        """How many are taken."""
        return len(self._taken)

    def room(self, length: int) -> int | None:
        """Where so many bytes are free; None where they are not."""
        if not self._taken:
            return 0 if length <= self.size else None
        first = self._taken[0].offset
        last = self._taken[-1]
        end = last.offset + -(-last.length // _ALIGNED) * _ALIGNED
        if last.offset < first:  # they go round: only what is between is free
            return end if end + length <= first else None
        if end + length <= self.size:
            return end
        return 0 if length <= first else None

    def take(self, place: SharedSpan) -> None:
        """This is taken from now on, where there was room."""
        self._taken.append(place)

    def give_back(self, total: int) -> None:
        """So many have been given back, of all that ever were taken. Raises `ProtocolError` for a number that
        cannot be."""
        more = total - self._returned
        if not 0 <= more <= len(self._taken):
            raise ProtocolError(f"{total} pieces of shared memory cannot have been read")
        for _ in range(more):
            self._taken.popleft()
        self._returned = total


class SharedWriter:
    """The writer's side. Raises `OSError` where there is no memory to share, or no such memory on this
    system."""

    def __init__(self, size: int) -> None:
        if sys.platform != "linux":
            raise OSError("memory is shared on Linux only")
        self.pieces = RingAllocator(size)
        self.descriptor = os.memfd_create("ssd-features", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size)
            # Whoever maps it must not lose pages that the other has cut off.
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._bytes = memoryview(mmap.mmap(self.descriptor, size))
        except (OSError, ValueError):
            self.close()
            raise

    def at(self, place: SharedSpan) -> memoryview:
        """These bytes, to write on: before they are told, and while they are not given back."""
        return self._bytes[place.offset : place.offset + place.length]

    def close(self) -> None:
        """Let go of the file; the memory itself goes with whoever maps it last."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


class SharedReader:
    """The reader's side: maps a file that came from the peer, and closes it. Raises `ProtocolError` where it
    is no memory that can be trusted to stay, and `OSError` where it cannot be mapped."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.read = 0
        """Pieces that were read, which the writer may be told."""
        self._size = size
        if descriptor < 0:
            raise OSError("no open file came with the offer")
        try:
            if not 0 < size <= _MOST_BYTES or os.fstat(descriptor).st_size != size or not _sealed(descriptor):
                raise ProtocolError("what was offered is no memory that can be shared")
            self._bytes = memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ))
        finally:
            os.close(descriptor)

    def copied(self, place: SharedSpan) -> bytes:
        """A piece, which may be written on again. Raises `ProtocolError` where it is none."""
        offset, length = place
        if offset < 0 or length < 0 or offset + length > self._size:
            raise ProtocolError(f"{length} bytes from {offset} on are not in {self._size} of shared memory")
        self.read += 1
        return bytes(self._bytes[offset : offset + length])


def _sealed(descriptor: int) -> bool:
    """Whether nobody can make this file smaller."""
    with contextlib.suppress(OSError, AttributeError):  # a file that cannot be sealed, or no such system
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    return False
