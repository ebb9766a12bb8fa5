"""Limits a minute as buckets that fill evenly. Knows no keys, no requests and no HTTP.

A bucket holds a minute's worth, so that a client may spend it at once and then as fast as it fills. What is
already running is charged as it comes and may overdraw the bucket: then the next one waits for longer.
"""

import time
from collections.abc import Callable

MINUTE_S = 60.0

Clock = Callable[[], float]


class Bucket:
    """`per_minute` of something. Full at first."""

    def __init__(self, per_minute: int, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._at = clock()

    @property
    def per_minute(self) -> int:
        """The limit; setting it changes no more of the level than that it fits."""
        return self._per_minute

    @per_minute.setter
    def per_minute(self, per_minute: int) -> None:
        self._level = min(self.level, float(per_minute))
        self._per_minute = per_minute

    @property
    def level(self) -> float:
        """What may be taken now; negative where the bucket is overdrawn."""
        now = self._clock()
        filled = self._level + (now - self._at) * self._per_minute / MINUTE_S
        self._level, self._at = min(float(self._per_minute), filled), now
        return self._level

    @property
    def left(self) -> int:
        """The level as it is told to clients: whole, and never negative."""
        return max(0, int(self.level))

    def take(self, amount: int) -> None:
        """Charge `amount`, whatever is there."""
        self._level = self.level - amount

    def wait_s(self, level: float = 1.0) -> float:
        """Seconds until so much will be there, if nobody takes anything; 0 where it is."""
        return max(0.0, level - self.level) * MINUTE_S / self._per_minute

    @property
    def refill_s(self) -> float:
        """Seconds until the bucket is full."""
        return self.wait_s(self._per_minute)
