"""Whether a process that lives but tells nothing is stuck: it is, unless it computes.

Knows times, no processes.
"""

_LOOK_S = 5.0
_WORKING = 0.1
"""Share of one core above which something is computed. Signs of life alone take far less."""
_LONGEST_S = 600.0
"""However busy it is: a forward does not take so long."""


class HangDetector:
    """Judges one process that says nothing."""

    def __init__(self, look_s: float = _LOOK_S) -> None:
        """It is looked at for `look_s` before anything is said."""
        self._look_s = look_s
        self._seen: tuple[float, float] | None = None

    def is_stuck(self, now: float, silent_s: float, computed_s: float) -> bool:
        """Ask again and again while it is silent. `computed_s` is the processor time it has taken."""
        if silent_s > _LONGEST_S:
            return True
        if self._seen is None or now - self._seen[0] > 2 * self._look_s:
            self._seen = now, computed_s
        since, before = self._seen
        if now - since < self._look_s:
            return False
        self._seen = now, computed_s
        return computed_s - before < _WORKING * (now - since)
