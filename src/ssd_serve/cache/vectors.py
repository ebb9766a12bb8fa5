"""A growing table of hidden states in order of position, and their encoding as bytes."""

import numpy as np
import torch

from ssd_serve.base.errors import ProtocolError


class VectorTable:
    """Vectors [positions, hidden] of consecutive positions from `first` on."""

    def __init__(self) -> None:
        self.first = 0
        self._rows: torch.Tensor | None = None
        self._length = 0

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.first + self._length

    def __len__(self) -> int:
        return self._length

    def begin(self, first: int) -> None:
        """Empty the table; the next vectors start at this position."""
        self.first, self._length, self._rows = first, 0, None

    def extend(self, vectors: torch.Tensor) -> None:
        """Append the vectors of the next positions: [positions, hidden]."""
        needed = self._length + len(vectors)
        if self._rows is None or needed > len(self._rows):
            rows = vectors.new_empty((2 * needed, vectors.shape[1]))
            if self._rows is not None:
                rows[: self._length] = self._rows[: self._length]
            self._rows = rows
        self._rows[self._length : needed] = vectors
        self._length = needed

    def part(self, start: int, count: int) -> torch.Tensor:
        """Vectors [count, hidden] of the positions from `start` on; a view, valid until the next `extend`."""
        if self._rows is None or not self.first <= start <= start + count <= self.end:
            raise IndexError(f"vectors of {count} positions from {start} on, of {self.first} to {self.end}")
        place = start - self.first
        return self._rows[place : place + count]


def as_bytes(vectors: torch.Tensor) -> bytes:
    """Encode rows as little-endian bfloat16."""
    numbers = vectors.to("cpu", torch.bfloat16).contiguous().view(torch.int16)
    raw: bytes = numbers.numpy().astype("<i2", copy=False).tobytes()
    return raw


def from_bytes(raw: bytes, width: int) -> torch.Tensor:
    """Decode bfloat16 [rows, width]. Raises `ProtocolError` if the bytes are not a whole number of rows."""
    if width < 1 or len(raw) % (2 * width):
        raise ProtocolError(f"{len(raw)} bytes are not whole rows of {width} numbers")
    numbers = torch.from_numpy(np.frombuffer(raw, "<i2").astype(np.int16))
    return numbers.view(torch.bfloat16).view(-1, width)
