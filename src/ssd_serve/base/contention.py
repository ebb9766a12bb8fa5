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
_SAMPLE_S = 0.2
"""Seconds of a sample; the system counts in hundredths."""
_TAKEN, _FREED = 0.65, 0.45
"""Shares of a second after which a core counts as taken by other programs, and no longer does. A program beside two
threads of this process gets two thirds of a core, and one on two cores for 0.3 s of each second 0.4 to 0.6."""


def core_seconds(cores: Collection[int], stat: Path = Path("/proc/stat")) -> float:
    """Return the seconds that these cores have worked; 0 where the system does not tell."""
    ticks = 0
    with suppress(OSError, ValueError):
        for line in stat.read_text().splitlines():
            name, *fields = line.split()
            if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cores:
                ticks += sum(int(each) for at, each in enumerate(fields) if at not in _IDLE_FIELDS)
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0


def cores_in_use(cores: Collection[int]) -> float:
    """Return how many of these cores are used, by any program, while the caller sleeps."""
    before = core_seconds(cores)
    time.sleep(_SAMPLE_S)
    return (core_seconds(cores) - before) / _SAMPLE_S


def family_seconds(parent: int, proc: Path = Path("/proc")) -> float:
    """Return the CPU seconds of a process and of its running children; 0 where the system does not tell."""
    ticks = 0
    with suppress(OSError, ValueError):
        family = {str(parent)}
        for children in (proc / str(parent) / "task").glob("*/children"):
            family.update(children.read_text().split())
        for each in family:
            fields = (proc / each / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0


class CoreContention:
    """Detects between calls of `observe` whether other programs take cores that this process needs."""

    def __init__(
        self,
        threads: Path = Path("/proc/self/task"),
        clock: Callable[[], float] = time.monotonic,
        worked: Callable[[], float] = lambda: 0.0,
        own: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`worked`: seconds that the cores of this process have worked; `own`: those for processes of this
        server."""
        self.busy = False
        self.waited = 0.0
        """Share of their ready time that the threads waited, between the last two calls."""
        self.others = 0.0
        """Cores that other servers and programs used on average, between the last two calls."""
        self.taken = 0
        """Whole cores that others use; the threads of this process had better leave them alone."""
        self._threads = threads
        self._clock = clock
        self._worked, self._own = worked, own
        self._seen, self._seen_at = self._read(), clock()
        self._worked_s, self._own_s = worked(), own()

    def observe(self) -> bool:
        """Return whether the machine was busy since the last call."""
        seen, now, worked_s, own_s = self._read(), self._clock(), self._worked(), self._own()
        ran_s = waited_s = 0.0
        for thread, (ran, waited) in seen.items():
            ran_before, waited_before = self._seen.get(thread, (ran, waited))
            ran_s += 1e-9 * (ran - ran_before)
            waited_s += 1e-9 * (waited - waited_before)
        long_enough = waited_s >= _LEAST_S * (now - self._seen_at)
        self.waited = waited_s / (ran_s + waited_s) if waited_s > 0 else 0.0
        self.busy = long_enough and self.waited >= (_ENDS if self.busy else _BEGINS)
        ours_s = max(ran_s, own_s - self._own_s)
        self.others = max(0.0, worked_s - self._worked_s - ours_s) / max(1e-3, now - self._seen_at)
        most, least = int(self.others + 1 - _FREED), int(self.others + 1 - _TAKEN)
        self.taken = min(max(self.taken, least), most)
        self._seen, self._seen_at = seen, now
        self._worked_s, self._own_s = worked_s, own_s
        return self.busy

    def _read(self) -> dict[str, tuple[int, int]]:
        """Nanoseconds that each thread ran and waited so far."""
        found: dict[str, tuple[int, int]] = {}
        with suppress(OSError, ValueError):  # no such folder, or a thread that has just ended
            for thread in self._threads.iterdir():
                ran, waited, _ = (thread / "schedstat").read_text().split()
                found[thread.name] = int(ran), int(waited)
        return found


class ThreadLimit:
    """Keeps a process's threads off the cores that other programs use, and takes the cores back when they are free.

    A round waits for its slowest thread: two threads of which one shares its core are slower than one alone.
    """

    def __init__(self, read: Callable[[], int], write: Callable[[int], None]) -> None:
        """`read` and `write`: number of threads that computations use."""
        self._read, self._write = read, write
        self._whole = self._set = read()

    def leave(self, taken: int, cores: int) -> None:
        """Use at most the cores that are left, but one thread; others may have set the number meanwhile."""
        threads = self._read()
        if threads != self._set:
            self._whole = threads
        self._set = max(1, min(self._whole, cores - taken))
        if self._set != threads:
            self._write(self._set)
