"""What the load benchmark runs, and where it keeps what it finds."""

from dataclasses import dataclass, field
from pathlib import Path

from ssd_serve.bench.load.outcome import Burst
from ssd_serve.bench.load.requests import Mix
from ssd_serve.bench.load.setups import Devices
from ssd_serve.bench.load.statistics import GoodLimits
from ssd_serve.bench.load.traffic import OpenLoop

_FEWEST = 4
"""Requests of a burst at least: at concurrency 1 a burst of two would be mostly chance."""
_CROWD = 32


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to run. `launches` share the pairs out; every launch has its own warm-up and resume check.

    `learning` bursts more warm up the modes that choose by measuring; a `fresh` launch remembers nothing of
    the last and has no warm-up at all. `busy_core` is kept busy from when the servers are up. Without
    `concurrencies` there is no closed loop, without shares of the capacity no open one. What is measured of
    the same `code` is kept in the folder `work` for later sittings, each at most so many `minutes` long.
    """

    modes: tuple[str, ...]
    concurrencies: tuple[int, ...]
    pairs: int
    launches: int
    learning: int
    fresh: bool
    busy_core: int | None
    waves: int
    mix: Mix
    open_loop: OpenLoop
    temperature: float
    limits: GoodLimits
    ballast: bool
    devices: Devices
    resume: bool
    trace: Path | None
    time_scale: float
    length_scale: float
    trace_seconds: float
    work: Path | None = None
    minutes: float | None = None
    code: str = ""

    @property
    def crowd(self) -> int:
        """The most requests at once, by which the capacity is measured."""
        return max(self.concurrencies, default=_CROWD)

    def size(self, concurrency: int) -> int:
        """Requests of a burst."""
        return max(_FEWEST, self.waves * concurrency)


@dataclass(slots=True)
class Findings:
    """What was measured so far, of all launches."""

    bursts: list[Burst] = field(default_factory=list[Burst])
    capacities: dict[str, float] = field(default_factory=dict[str, float])
    replays: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    resumes: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    notes: dict[str, object] = field(default_factory=dict[str, object])
