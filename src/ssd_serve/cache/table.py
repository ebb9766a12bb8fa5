"""A growing table of KV slots in order of position, readable as an array without copying. Torch-free."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class SlotTable:
    """The slots of positions 0, 1, 2, ... of one request."""

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
