"""A growing table of vectors in order of position, and vectors as bytes. Knows tensors, not what they say."""

import numpy as np
import torch

from ssd_serve.base.errors import ProtocolError


class VectorTable:
    """Vectors [places, hidden] of the positions from `first` on."""

    def __init__(self) -> None:
        self.first = 0
        self._rows: torch.Tensor | None = None
        self._length = 0

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.first + self._length

    def __len__(self) -> int:
        return self._length

    def begin(self, first: int) -> None:
        """Forget everything; the next vectors are those from this position on."""
        self.first, self._length, self._rows = first, 0, None

    def extend(self, vectors: torch.Tensor) -> None:
        """Append those of the next positions: [places, hidden]."""
        needed = self._length + len(vectors)
        if self._rows is None or needed > len(self._rows):
            rows = vectors.new_empty((2 * needed, vectors.shape[1]))
            if self._rows is not None:
                rows[: self._length] = self._rows[: self._length]
            self._rows = rows
        self._rows[self._length : needed] = vectors
        self._length = needed

    def part(self, start: int, count: int) -> torch.Tensor:
        """Those of `count` positions from `start` on; valid until the next `extend`."""
        if self._rows is None or not self.first <= start <= start + count <= self.end:
            raise IndexError(f"vectors of {count} positions from {start} on, of {self.first} to {self.end}")
        place = start - self.first
        return self._rows[place : place + count]


def as_bytes(vectors: torch.Tensor) -> bytes:
    """Vectors as they travel: rows one after the other, bfloat16, little-endian."""
    numbers = vectors.to("cpu", torch.bfloat16).contiguous().view(torch.int16)
    raw: bytes = numbers.numpy().astype("<i2", copy=False).tobytes()
    return raw


def from_bytes(raw: bytes, width: int) -> torch.Tensor:
    """The inverse: bfloat16 [rows, width]. Raises `ProtocolError` where the bytes are no whole rows."""
    if width < 1 or len(raw) % (2 * width):
        raise ProtocolError(f"{len(raw)} bytes are no rows of {width} numbers")
    numbers = torch.from_numpy(np.frombuffer(raw, "<i2").astype(np.int16))
    return numbers.view(torch.bfloat16).view(-1, width)
