"""Engines that run at the same time, so that everybody can be asked in turn, prompt by prompt.

Knows when engines are started, warmed up and ended, not what is measured.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from ssd_serve.bench.peers.client import Ask, PeerError, Sample
from ssd_serve.bench.peers.engines import Engine
from ssd_serve.bench.peers.ways import Way

Launch = Callable[[Way], AbstractContextManager[Engine]]
WARM_UPS = 2
_ROOMY, _FULL = 4 << 30, 1 << 30
"""Free bytes below which idle engines end (vLLM takes 3 GiB), and below which none is started: where weights
are read from the disk again and again, the disk is measured."""


@dataclass(slots=True)
class _Running:
    engine: Engine
    stack: ExitStack
    warm: set[tuple[Way, float]] = field(default_factory=set[tuple[Way, float]])


class Fleet:
    """Engines by the way of their process. At most so many run, unless more are needed at once, and no more
    than memory has room for; who has not been needed for the longest time ends first."""

    def __init__(self, launch: Launch, most: int, free_memory: Callable[[], int]) -> None:
        """`free_memory`: bytes that engines may still take."""
        self._launch = launch
        self._most = most
        self._free_memory = free_memory
        self._running: dict[Way, _Running] = {}
        self.versions: dict[str, str] = {}

    @classmethod
    def of(cls, launch: Launch, most: int) -> "Fleet":
        """Of real engines, which take this machine's memory."""
        from ssd_serve.models.memory import available_memory  # with torch, which reads the environment

        return cls(launch, most, partial(available_memory, "cpu"))

    def start(self, ways: Iterable[Way]) -> dict[Way, PeerError]:
        """Have these running, started one after the other. Those that cannot be, and why."""
        needed = list(dict.fromkeys(way.server for way in ways))
        failed: dict[Way, PeerError] = {}
        for way in needed:
            if way in self._running:
                self._running[way] = self._running.pop(way)  # in the order of their last need
        for way in needed:
            if way not in self._running:
                try:
                    self._make_room(needed)
                    self._enter(way)
                except PeerError as error:
                    failed[way] = error
        return failed

    def _make_room(self, needed: Sequence[Way]) -> None:
        """End idle engines until one more may run and fits into memory."""
        idle = [way for way in self._running if way not in needed]
        while idle and (len(self._running) >= self._most or self._free_memory() < _ROOMY):
            self.end(idle.pop(0))
        free = self._free_memory()
        if free < _FULL:
            raise PeerError(
                f"{free / 2**30:.1f} GiB of memory are free beside {len(self._running)} engines, too few for "
                "one more: end other programs, or compare fewer engines"
            )

    def _enter(self, way: Way) -> None:
        with ExitStack() as stack:
            engine = stack.enter_context(self._launch(way))
            self.versions[way.engine] = engine.version
            self._running[way] = _Running(engine, stack.pop_all())

    def warm_up(self, way: Way, ask: Ask) -> None:
        """Let it answer a few times before it counts, once for each temperature."""
        running = self._running.get(way.server)
        if running is not None and (way, ask.temperature) not in running.warm:
            running.warm.add((way, ask.temperature))
            for number in range(WARM_UPS):
                self.ask(way, replace(ask, seed=ask.seed + number))

    def ask(self, way: Way, ask: Ask) -> Sample:
        """One request. Who fails is ended; the end of its log is told."""
        running = self._running.get(way.server)
        if running is None:
            raise PeerError("it does not run")
        try:
            return running.engine.ask(way, ask)
        except PeerError as error:
            self._running.pop(way.server)
            # The launched engine adds the end of its log to what passes through it.
            running.stack.__exit__(PeerError, error, error.__traceback__)
            raise

    def page(self, way: Way) -> str:
        """The metrics of a running engine."""
        return self._running[way.server].engine.page()

    def end(self, way: Way) -> None:
        """Stop the process."""
        self._running.pop(way.server).stack.close()

    def close(self) -> None:
        """Stop everybody."""
        for way in list(self._running):
            self.end(way)
