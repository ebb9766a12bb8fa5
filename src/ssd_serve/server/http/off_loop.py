"""Long work beside the event loop: in threads, a bounded number at once, in slices that take turns.

Knows nothing about the work.
"""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from ssd_serve.base.errors import OverloadedError

Result = TypeVar("Result")

Steps = Generator[None, None, Result]
"""Work that can pause at each `yield`: it should come every millisecond or so."""

_SLICE_S = 0.02


class OffLoop:
    """Runs long work in threads, `at_once` of them, the shortest first; short work right here."""

    def __init__(self, inline: int, at_once: int) -> None:
        """`inline`: the most units of work (characters, tokens, bytes) that the event loop does itself."""
        self._inline = inline
        self._free = at_once
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    async def run(self, units: int, work: Callable[[], Result]) -> Result:
        """Return `work()`, which is so many units long."""
        return work() if units <= self._inline else await self._turn(units, work)

    async def steps(self, units: int, work: Steps[Result]) -> Result:
        """Return what the steps return. Between slices of them the work of others has its turn, and once the
        caller is cancelled nothing more is done."""
        if units <= self._inline:
            return _finish(work)
        while True:
            done = await self._turn(units, lambda: _advance(work))
            if done is not None:
                return done.value

    async def _turn(self, units: int, work: Callable[[], Result]) -> Result:
        """Wait for a thread and use it. It counts as used until it is free, though the caller may leave."""
        if not self._free:
            mine = asyncio.get_running_loop().create_future()
            # Works of about one size take turns.
            heapq.heappush(self._waiting, (units.bit_length(), next(self._order), mine))
            try:
                await mine
            except asyncio.CancelledError:
                if not mine.cancelled():
                    self._release()
                raise
        else:
            self._free -= 1
        try:
            running = asyncio.get_running_loop().run_in_executor(None, work)
        except RuntimeError:
            self._release()
            raise OverloadedError("this machine has no thread left; try again later", 1.0) from None
        running.add_done_callback(self._ended)
        return await asyncio.shield(running)

    def _ended(self, work: "asyncio.Future[Result]") -> None:
        self._release()
        if not work.cancelled():
            work.exception()  # whoever waited may be gone

    def _release(self) -> None:
        """The thread goes to the next one that still waits."""
        while self._waiting:
            *_, waiting = heapq.heappop(self._waiting)
            if not waiting.done():
                waiting.set_result(None)
                return
        self._free += 1


class _Done(Generic[Result]):
    def __init__(self, value: Result) -> None:
        self.value = value


def _finish(work: Steps[Result]) -> Result:
    try:
        while True:
            next(work)
    except StopIteration as end:
        result: Result = end.value
        return result


def _advance(work: Steps[Result]) -> _Done[Result] | None:
    """On a thread: one slice. At each step the event loop may go on."""
    until = time.monotonic() + _SLICE_S
    try:
        while time.monotonic() < until:
            next(work)
            time.sleep(0)
    except StopIteration as end:
        return _Done(end.value)
    return None
