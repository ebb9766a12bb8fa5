"""Whether a round gains by all of the cores that are free, or computes on as many as beside a drafter.

Kernels on several threads wait for the slowest: a step of half a millisecond gains nothing by a second core,
and a core that another process uses costs more than it gives. So a round takes all of them only where it is
clearly faster, by what was measured at start and by what rounds took more than that lately. Plain Python;
knows cost tables, not threads.
"""

from collections import deque
from collections.abc import Callable, Mapping
from statistics import median

from ssd_serve.base.cost import CostTable, Reading

_GAINS = 0.9
"""All cores must take at most this share of the time of a few."""
_SLOWER = 1.2
"""A choice that takes less than this of its time at start counts as no slower, while others compute: what it
did last may have been to read prompts, which says no more of rounds that decode."""
_LATEST = 5
"""Rounds of which the middle one tells how slow a choice is lately: one that was descheduled does not."""
_LOOK_S = 1.0
"""How often one round looks whether all cores are as fast again as they were at start."""


class CoreChoice:
    """`few` and `all_cores`: what forwards cost on as many cores as beside a drafter, and on all."""

    def __init__(self, few: CostTable, all_cores: CostTable, clock: Callable[[], float]) -> None:
        self._tables = {False: few, True: all_cores}
        self._slowness = {wide: deque([1.0], _LATEST) for wide in (False, True)}
        self._clock = clock
        self._looked_at = clock()

    def table(self, wide: bool) -> CostTable:
        """What forwards cost on all cores (`wide`), or on a few."""
        return self._tables[wide]

    def likely(self, rows: int, reading: Reading) -> CostTable:
        """What forwards of so many rows cost where they would compute, if they did."""
        lately = {wide: median(self._slowness[wide]) for wide in self._tables}
        clearly = {wide: slowness if slowness > _SLOWER else 1.0 for wide, slowness in lately.items()}
        return self._tables[self._pays(rows, reading, clearly)]

    def wide(self, rows: int, reading: Reading) -> bool:
        """Whether the next round, of so many rows, computes on all cores."""
        few, lately = median(self._slowness[False]), self._slowness[True]
        if self._pays(rows, reading, {False: few, True: median(lately)}):
            return True
        if self._pays(rows, reading, {False: few, True: lately[-1]}):
            return True  # the last look was good: see whether it lasts
        if not self._pays(rows, reading, {False: 1.0, True: 1.0}):
            return False  # nor did it at start: that is worth no look
        now = self._clock()
        if now - self._looked_at < _LOOK_S:
            return False
        self._looked_at = now
        return True

    def _pays(self, rows: int, reading: Reading, slowness: Mapping[bool, float]) -> bool:
        few_s, all_s = (
            slowness[wide] * self._tables[wide].first_seconds(rows, reading) for wide in (False, True)
        )
        return all_s <= _GAINS * few_s

    def saved_s(self, rows: int, reading: Reading) -> float:
        """Seconds that the next round saves by all cores; 0 where it does not take them."""
        if not self.wide(rows, reading):
            return 0.0
        return self._tables[False].first_seconds(rows, reading) - self._tables[True].first_seconds(
            rows, reading
        )

    def observe(self, wide: bool, rows: int, seconds: float, reading: Reading) -> None:
        """A round's forward took `seconds`."""
        self._slowness[wide].append(seconds / self._tables[wide].first_seconds(rows, reading))
