"""Whether a target that died is started again, and after which pause.

Knows deaths, exit codes and times, no processes.
"""

import time
from collections.abc import Callable

from ssd_serve.base.errors import MemoryShortError

USER_ERRORS = range(2, 10)
"""Exit codes of mistakes that a restart cannot mend (see `errors.py`)."""
_LONGEST_PAUSE_S = 30.0
_LONG_LIFE_S = 10.0
"""A target that gave tokens for so long died of something new."""
_MAX_QUICK_DEATHS = 6
"""More than a request needs that kills every target and is given up for it."""


def pause_before_restart(restarts: int) -> float:
    """Seconds to wait before restart number `restarts` (from 0): none, then 0.5, 1, 2, ... up to 30."""
    return 0.0 if restarts == 0 else min(_LONGEST_PAUSE_S, 0.5 * 2.0 ** min(restarts - 1, 10))


class RestartPolicy:
    """Counts the deaths of one target. It comes back only once it was ready: what dies at its first start is
    a mistake that somebody should see."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._worked = False
        self._ready_at: float | None = None
        self._quick_deaths = 0

    @property
    def ready_at(self) -> float | None:
        """When the target that runs now was ready; None while it loads."""
        return self._ready_at

    def ready(self) -> None:
        """The target can generate. May be called from any thread."""
        self._worked = True
        self._ready_at = self._clock()

    def forgive(self) -> None:
        """The deaths so far had a cause that is gone. May be called from any thread."""
        self._quick_deaths = 0

    def pause(self, code: int) -> float | None:
        """It died with this exit code: seconds until the next start, or None where there is none."""
        ready_at, self._ready_at = self._ready_at, None
        quick = ready_at is None or self._clock() - ready_at < _LONG_LIFE_S
        self._quick_deaths = self._quick_deaths + 1 if quick else 0
        # Memory of the one that died may be given back a moment later.
        mended = code not in USER_ERRORS or code == MemoryShortError.exit_code
        if not self._worked or not mended or self._quick_deaths > _MAX_QUICK_DEATHS:
            return None
        return pause_before_restart(self._quick_deaths)
