"""The memory of processes that must not pause: Python's garbage, and the heap below it."""

import ctypes
import gc
import time
from collections.abc import Callable

_YOUNG = 20_000
"""New objects between two collections: they take a millisecond or two then."""
_TRIM_EVERY_S = 60.0


def settle_memory() -> None:
    """After loading: collect once, and never look at what lives now again.

    A full collection walks every object that torch and the models made, 100 ms and more in the middle of a
    round; afterwards only what requests leave behind is looked at, about once in ten full rounds: most of it
    is freed without a collection.
    """
    gc.collect()
    gc.freeze()
    # Python waits with the next full collection until a quarter of what the last one kept is new. This one
    # keeps nothing, so that it does not wait for 100,000 objects.
    gc.collect()
    gc.set_threshold(_YOUNG)


class Heap:
    """The C library's heap of this process, which keeps what was freed: see `cluster.process`.

    Batches of ever new shapes leave holes that fit nothing, and a process would grow for hours. Giving the
    pages in the holes back takes some 10 ms, and some 10 ms more until those in use are mapped again.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, trim: Callable[[], None] | None = None
    ) -> None:
        self._clock = clock
        self._trim = trim or _c_library_trim()
        self._trimmed_at = clock()

    def trim_when_due(self) -> None:
        """Once a minute give free pages back to the system; call it between two rounds."""
        now = self._clock()
        if now - self._trimmed_at >= _TRIM_EVERY_S:
            self._trimmed_at = now
            self._trim()


def _c_library_trim() -> Callable[[], None]:
    """Only glibc needs it and has it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return (lambda: None) if trim is None else (lambda: trim(0))
