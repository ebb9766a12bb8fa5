"""A torch-free allocator of numbered KV slots, one token each, and tables of a request's slots.

Invariants: a slot is free or in use; every free slot can be allocated; a slot is freed once. It keeps one
request's slots together and requests apart: attention on a CPU reads a compact span of slots as a view.
Correctness never depends on the placement.

The pool knows neither readers nor contents of a slot; the prefix cache counts readers. A caller frees a slot
only after every forward that uses it has completed.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ssd_serve.base.errors import SsdError

FREE = b"\0"


class SlotError(SsdError):
    """A caller's error: a slot freed twice, used while free, or outside the pool."""


class SlotPool:
    """Allocates slots 0 to `slots` - 1."""

    def __init__(self, slots: int) -> None:
        if slots < 0:
            raise ValueError("the number of slots cannot be negative")
        self.slots = slots
        self._taken = bytearray(slots)  # 1 where the slot is in use
        self._available = slots

    @property
    def available(self) -> int:
        """Number of free slots."""
        return self._available

    @property
    def used(self) -> int:
        """Number of slots in use."""
        return self.slots - self._available

    def allocate(self, count: int, near: int | None = None) -> list[int] | None:
        """Take `count` free slots, ascending; None when there are not enough.

        `near` is a slot of the same request: the closest free slots are taken, those above it first. None
        starts a new request, away from others.
        """
        if count < 0 or (near is not None and not 0 <= near < self.slots):
            raise SlotError(f"cannot allocate {count} slots near {near} of {self.slots}")
        if count > self._available:
            return None
        if count == 0:
            return []
        start = self._roomy_start(count) if near is None else near + 1
        taken = self._taken
        if start + count <= self.slots and 1 not in taken[start : start + count]:
            chosen = list(range(start, start + count))
        else:
            chosen = self._closest(start, count)
        for slot in chosen:
            taken[slot] = 1
        self._available -= count
        return chosen

    def free(self, slots: Sequence[int]) -> None:
        """Free slots. Raises `SlotError` and changes nothing if one is already free."""
        if not self.in_use(slots):
            raise SlotError("a slot to free is listed twice, free already or does not exist")
        for slot in slots:
            self._taken[slot] = 0
        self._available += len(slots)

    def in_use(self, slots: Sequence[int]) -> bool:
        """True if all these slots exist, are distinct and are in use."""
        if not slots:
            return True
        if min(slots) < 0 or max(slots) >= self.slots or len(set(slots)) != len(slots):
            return False
        return 0 not in map(self._taken.__getitem__, slots)

    def free_spans(self) -> list[range]:
        """Return all free slots, as spans."""
        bounds = np.zeros(self.slots + 2, dtype=np.int8)
        bounds[1:-1] = np.frombuffer(self._taken, dtype=np.int8) ^ 1
        steps = np.diff(bounds)
        ends = zip(np.flatnonzero(steps == 1), np.flatnonzero(steps == -1), strict=True)
        return [range(int(low), int(high)) for low, high in ends]

    def _closest(self, start: int, count: int) -> list[int]:
        """The free slots closest to `start`, ascending. Requires `count` free slots."""
        taken = self._taken
        above = taken.find(FREE, start)
        below = taken.rfind(FREE, 0, start)
        chosen: list[int] = []
        while len(chosen) < count:
            if below < 0 or 0 <= above - start < start - below:
                chosen.append(above)
                above = taken.find(FREE, above + 1)
            else:
                chosen.append(below)
                below = taken.rfind(FREE, 0, below)
        chosen.sort()
        return chosen

    def _roomy_start(self, count: int) -> int:
        """Return the first slot for a new request of `count` slots: the middle of the largest gap.

        It is lower if `count` slots need more than the upper half, and 0 if the gap starts at slot 0. The
        request below may grow into the lower half.
        """
        gap = max(self.free_spans(), key=len)
        low, size = gap.start, len(gap)
        return low if low == 0 else low + max(0, min(size // 2, size - count))


class SlotTable:
    """A growing table of one request's slots at positions 0, 1, 2, ..., readable without copying."""

    def __init__(self, slots: Sequence[int] = ()) -> None:
        self._array = np.zeros(max(64, 2 * len(slots)), dtype=np.int32)
        self._length = len(slots)
        self._array[: self._length] = slots

    def __len__(self) -> int:
        return self._length

    def extend(self, slots: Sequence[int]) -> None:
        """Append the slots of the next positions."""
        needed = self._length + len(slots)
        if needed > len(self._array):
            self._array = np.concatenate((self._array[: self._length], np.zeros(needed + 64, dtype=np.int32)))
        self._array[self._length : needed] = slots
        self._length = needed

    def view(self) -> npt.NDArray[np.int32]:
        """The slots as int32 [positions]; valid until the next `extend`."""
        return self._array[: self._length]

    def last(self) -> int | None:
        """The slot of the last position."""
        return int(self._array[self._length - 1]) if self._length else None

    def pop(self) -> int:
        """Remove the slot of the last position and return it."""
        self._length -= 1
        return int(self._array[self._length])

    def take(self) -> list[int]:
        """Empty the table and return what it held."""
        slots: list[int] = self._array[: self._length].tolist()
        self._length = 0
        return slots

    def clear(self) -> None:
        """Empty the table."""
        self._length = 0
