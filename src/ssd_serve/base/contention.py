"""Detects other programs on the cores of this machine, by the time that threads of this process wait for a core.

Linux counts how long each thread was ready to run and did not, and how long each core worked. Elsewhere nothing is
detected.
"""

import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

_BEGINS, _ENDS = 0.15, 0.05
"""Shares of the time that threads were ready: waiting for more than the first makes a machine busy, until it is
less than the second. An idle machine has one to two hundredths, one with a busy core of two a quarter."""
_IDLE_FIELDS = (3, 4, 8, 9)
"""Fields of a core in /proc/stat in which it does not work, or that are counted in others."""
_LEAST_S = 0.05
"""Least waiting a second that counts: a process that does little work waits for a tick now and then."""


def core_seconds(cores: Collection[int], stat: Path = Path("/proc/stat")) -> float:
    """Return the seconds that these cores have worked; 0 where the system does not tell."""
    ticks = 0
    with suppress(OSError, ValueError):
        for line in stat.read_text().splitlines():
            name, *fields = line.split()
            if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cores:
                ticks += sum(int(each) for at, each in enumerate(fields) if at not in _IDLE_FIELDS)
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0


class CoreContention:
    """Detects between calls of `observe` whether other programs take cores that this process needs."""

    def __init__(
        self,
        threads: Path = Path("/proc/self/task"),
        clock: Callable[[], float] = time.monotonic,
        worked: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`worked`: seconds that the cores of this process have worked."""
        self.busy = False
        self.waited = 0.0
        """Share of their ready time that the threads waited, between the last two calls."""
        self.others = 0.0
        """Cores that other processes used on average, between the last two calls."""
        self._threads = threads
        self._clock = clock
        self._worked = worked
        self._seen, self._seen_at, self._worked_s = self._read(), clock(), worked()

    def observe(self) -> bool:
        """Return whether the machine was busy since the last call."""
        seen, now, worked_s = self._read(), self._clock(), self._worked()
        ran_s = waited_s = 0.0
        for thread, (ran, waited) in seen.items():
            ran_before, waited_before = self._seen.get(thread, (ran, waited))
            ran_s += 1e-9 * (ran - ran_before)
            waited_s += 1e-9 * (waited - waited_before)
        long_enough = waited_s >= _LEAST_S * (now - self._seen_at)
        self.waited = waited_s / (ran_s + waited_s) if waited_s > 0 else 0.0
        self.busy = long_enough and self.waited >= (_ENDS if self.busy else _BEGINS)
        self.others = max(0.0, worked_s - self._worked_s - ran_s) / max(1e-3, now - self._seen_at)
        self._seen, self._seen_at, self._worked_s = seen, now, worked_s
        return self.busy

    def _read(self) -> dict[str, tuple[int, int]]:
        """Nanoseconds that each thread ran and waited so far."""
        found: dict[str, tuple[int, int]] = {}
        with suppress(OSError, ValueError):  # no such folder, or a thread that has just ended
            for thread in self._threads.iterdir():
                ran, waited, _ = (thread / "schedstat").read_text().split()
                found[thread.name] = int(ran), int(waited)
        return found
