"""Who holds which KV slot: a torch-free allocator of numbered slots, one token each, with reference counts.

Invariants: a slot is free or has at least one reference, never both; every free slot can be allocated; a slot
is freed once. It prefers to keep one request's slots together and different requests apart, because attention
on a CPU reads a compact span of slots as a view; correctness never depends on where slots lie.

It does not know what stands in a slot, nor which forward still reads it: whoever frees a slot has waited for
every forward that uses it.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ssd_serve.errors import SsdError

FREE = b"\0"


class SlotError(SsdError):
    """A slot was freed twice, shared while free, or does not exist: an error of the caller."""


class SlotPool:
    """Slots 0 .. slots - 1."""

    def __init__(self, slots: int) -> None:
        if slots < 0:
            raise ValueError("the number of slots cannot be negative")
        self.slots = slots
        self._taken = bytearray(slots)  # 1 where the slot is in use
        self._references = [0] * slots
        self._available = slots

    @property
    def available(self) -> int:
        """Number of free slots."""
        return self._available

    @property
    def used(self) -> int:
        """Number of slots in use."""
        return self.slots - self._available

    def references(self, slot: int) -> int:
        """How many hold this slot; 0: free."""
        return self._references[slot]

    def allocate(self, count: int, near: int | None = None) -> list[int] | None:
        """Take `count` free slots with one reference each, ascending; None when there are not enough.

        `near`: a slot of the same request; the free slots closest to it are taken, rather above than below
        it. None: a new request, which starts away from others.
        """
        if count < 0 or (near is not None and not 0 <= near < self.slots):
            raise SlotError(f"cannot allocate {count} slots near {near} of {self.slots}")
        if count > self._available:
            return None
        if count == 0:
            return []
        start = self._roomy_start(count) if near is None else near + 1
        taken, references = self._taken, self._references
        if start + count <= self.slots and 1 not in taken[start : start + count]:
            chosen = list(range(start, start + count))
        else:
            chosen = self._closest(start, count)
        for slot in chosen:
            taken[slot] = 1
            references[slot] = 1
        self._available -= count
        return chosen

    def share(self, slots: Sequence[int]) -> None:
        """Add a reference to each slot, all of them in use; a slot listed twice gets two."""
        self._check(slots, 1)
        for slot in slots:
            self._references[slot] += 1

    def release(self, slots: Sequence[int]) -> int:
        """Drop a reference of each slot and free those that have none left; returns how many were freed."""
        references = self._references
        if len(set(slots)) == len(slots):
            self._check(slots, 1)
        else:
            for slot, times in Counter(slots).items():
                self._check([slot], times)
        freed = 0
        for slot in slots:
            references[slot] -= 1
            if references[slot] == 0:
                self._taken[slot] = 0
                freed += 1
        self._available += freed
        return freed

    def free(self, slots: Sequence[int]) -> None:
        """Free slots that nobody else holds; nothing changes when any of them is shared or already free."""
        if not self.exclusive(slots):
            raise SlotError("a slot to free is listed twice, shared, free already or does not exist")
        taken, references = self._taken, self._references
        for slot in slots:
            taken[slot] = references[slot] = 0
        self._available += len(slots)

    def exclusive(self, slots: Sequence[int]) -> bool:
        """Whether all these slots are different and in use with a single reference."""
        if not slots:
            return True
        if min(slots) < 0 or max(slots) >= self.slots or len(set(slots)) != len(slots):
            return False
        references = self._references
        return [references[slot] for slot in slots].count(1) == len(slots)

    def _check(self, slots: Sequence[int], least: int) -> None:
        for slot in slots:
            if not 0 <= slot < self.slots:
                raise SlotError(f"slot {slot} does not exist; there are {self.slots}")
            if self._references[slot] < least:
                raise SlotError(f"slot {slot} has {self._references[slot]} references, not {least}")

    def _closest(self, start: int, count: int) -> list[int]:
        """The free slots closest to `start`, ascending; there are at least `count`."""
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
        """Where a new request of `count` slots should begin: in the largest gap, away from what lies below.

        What lies below a gap may be a request that grows into it: it is left the lower half, as far as
        `count` slots still fit into the upper. What lies above stays where it is.
        """
        bounds = np.zeros(self.slots + 2, dtype=np.int8)
        bounds[1:-1] = np.frombuffer(self._taken, dtype=np.int8) ^ 1
        steps = np.diff(bounds)
        lows, highs = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)  # [gaps], slots low .. high - 1
        largest = int(np.argmax(highs - lows))
        low, size = int(lows[largest]), int(highs[largest] - lows[largest])
        return low if low == 0 else low + max(0, min(size // 2, size - count))
