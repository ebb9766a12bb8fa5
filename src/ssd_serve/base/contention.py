"""Detects other programs on the cores of this machine, by the time that threads of this process wait for a core.

Linux counts how long each thread was ready to run and did not. Elsewhere nothing is detected.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_BEGINS, _ENDS = 0.15, 0.05
"""Shares of the time that threads were ready: waiting for more than the first makes a machine busy, until it is
less than the second. An idle machine has one to two hundredths, one with a busy core of two a quarter."""
_LEAST_S = 0.05
"""Least waiting a second that counts: a process that does little work waits for a tick now and then."""


class CoreContention:
    """Detects between calls of `observe` whether other programs take cores that this process needs."""

    def __init__(
        self, threads: Path = Path("/proc/self/task"), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.busy = False
        self.waited = 0.0
        """Share of their ready time that the threads waited, between the last two calls."""
        self._threads = threads
        self._clock = clock
        self._seen, self._seen_at = self._read(), clock()

    def observe(self) -> bool:
        """Return whether the machine was busy since the last call."""
        seen, now = self._read(), self._clock()
        ran_s = waited_s = 0.0
        for thread, (ran, waited) in seen.items():
            ran_before, waited_before = self._seen.get(thread, (ran, waited))
            ran_s += 1e-9 * (ran - ran_before)
            waited_s += 1e-9 * (waited - waited_before)
        long_enough = waited_s >= _LEAST_S * (now - self._seen_at)
        self.waited = waited_s / (ran_s + waited_s) if waited_s > 0 else 0.0
        self.busy = long_enough and self.waited >= (_ENDS if self.busy else _BEGINS)
        self._seen, self._seen_at = seen, now
        return self.busy

    def _read(self) -> dict[str, tuple[int, int]]:
        """Nanoseconds that each thread ran and waited so far."""
        found: dict[str, tuple[int, int]] = {}
        with suppress(OSError, ValueError):  # no such folder, or a thread that has just ended
            for thread in self._threads.iterdir():
                ran, waited, _ = (thread / "schedstat").read_text().split()
                found[thread.name] = int(ran), int(waited)
        return found
