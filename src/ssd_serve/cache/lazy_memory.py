"""Memory of the host that becomes resident page by page, as it is written, and can be given back."""

import math
import mmap
from collections.abc import Sequence

import torch


class LazyTensor:
    """A tensor of zeros [rows, slots, ...] or [slots, ...] whose untouched pages are not resident."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, slot_axis: int) -> None:
        self._slot_bytes = math.prod(shape[slot_axis + 1 :]) * dtype.itemsize
        self._row_bytes = shape[slot_axis] * self._slot_bytes
        size = math.prod(shape) * dtype.itemsize
        self._memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.data = torch.frombuffer(self._memory, dtype=dtype, count=math.prod(shape)).view(tuple(shape))

    def release(self, spans: Sequence[range]) -> None:
        """Give back the pages that hold nothing but slots of these spans; they are zero again."""
        for row in range(0, self.data.numel() * self.data.itemsize, self._row_bytes):
            for span in spans:
                first = -(-(row + span.start * self._slot_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
                end = (row + span.stop * self._slot_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
                if first < end:
                    self._memory.madvise(mmap.MADV_DONTNEED, first, end - first)
