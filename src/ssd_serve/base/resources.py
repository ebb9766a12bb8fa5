"""Resources of a process: descriptors, heap, garbage collection, exhausted resources, and probe processes."""

import contextlib
import ctypes
import errno
import gc
import os
import resource
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

RETRY_PAUSE_S = 0.2
"""Pause before a listener that found no descriptor tries again: a waiting peer would wake it all the time."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})
_YOUNG = 20_000
"""New objects between two garbage collections, which then take one or two milliseconds."""
_TRIM_EVERY_S = 60.0
_KILL_GRACE_S = 3.0


def is_exhausted(error: OSError) -> bool:
    """True if descriptors, memory or processes ran out, which may be available again later."""
    return error.errno in _EXHAUSTED


def descriptor_limit() -> int:
    """Limit of open files and sockets in force."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_descriptor_limit() -> tuple[int, int]:
    """Raise the limit as far as this user may; returns the limits before and now."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # some systems report a hard limit that they do not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return before, descriptor_limit()


def settle_memory() -> None:
    """Collect once after loading, exclude all objects that live now from later collections, and return free pages.

    A full collection walks every object that torch and the models made: 100 ms and more in the middle of a
    round. Afterwards only objects of requests are walked, about once in ten full rounds.
    """
    gc.collect()
    gc.freeze()
    # Python postpones the next full collection until a quarter of what the last one kept is new. This one
    # keeps nothing, so that the next one does not wait for 100,000 objects.
    gc.collect()
    gc.set_threshold(_YOUNG)
    _c_library_trim()()


class Heap:
    """The C library's heap of this process, which keeps freed memory: see `cluster.process`.

    Batches of ever new shapes leave holes that fit nothing, and a process would grow for hours. Returning the
    pages in the holes takes some 10 ms, and some 10 ms more until those in use are mapped again.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, trim: Callable[[], None] | None = None
    ) -> None:
        self._clock = clock
        self._trim = trim or _c_library_trim()
        self._trimmed_at = clock()

    def trim_when_due(self) -> None:
        """Return free pages to the system, at most once a minute; call it between two rounds."""
        now = self._clock()
        if now - self._trimmed_at >= _TRIM_EVERY_S:
            self._trimmed_at = now
            self.trim()

    def trim(self) -> None:
        """Return free pages to the system now."""
        self._trim()


def _c_library_trim() -> Callable[[], None]:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc, which alone needs it
    return (lambda: None) if trim is None else (lambda: trim(0))


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of a probe: the reason of its failure (empty: it succeeded), and its output."""

    failure: str
    printed: str = ""


def probe(
    program: Sequence[str], timeout_s: float, variables: Mapping[str, str] | None = None
) -> ProbeResult:
    """Run a program that may hang or crash, with additional environment `variables`. The last line of its
    stderr is the reason of its failure. Raises nothing."""
    try:
        process = subprocess.Popen(
            program,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **(variables or {})},
        )
    except OSError as error:
        return ProbeResult(f"it could not be tried: {error.strerror}")
    try:
        printed, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        printed = ""
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it even now
            printed, _ = process.communicate(timeout=_KILL_GRACE_S)
        return ProbeResult(f"no answer within {timeout_s:g} s", printed)
    if process.returncode == 0:
        return ProbeResult("", printed)
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return ProbeResult(lines[-1] if lines else f"it ended with code {process.returncode}", printed)
