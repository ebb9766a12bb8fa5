"""Runs long work in threads, a bounded number at once, in time slices that take turns."""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Generator
from typing import TypeVar

from ssd_serve.base.errors import OverloadedError

Result = TypeVar("Result")

Steps = Generator[None, None, Result]
"""Work that can pause at each `yield`, which should come every millisecond or so."""

_SLICE_S = 0.02


class WorkerPool:
    """Runs long work in `threads` threads, the shortest first, and short work on the event loop."""

    def __init__(self, inline: int, threads: int) -> None:
        """`inline`: the most units of work (characters, tokens, bytes) that the event loop does itself."""
        self._inline = inline
        self._free = threads
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    async def run(self, units: int, work: Callable[[], Result]) -> Result:
        """Return `work()`, which takes so many units."""
        return work() if units <= self._inline else await self._in_thread(units, work)

    async def steps(self, units: int, work: Steps[Result]) -> Result:
        """Return the result of the steps. Other work runs between slices; cancelling the caller stops them."""
        if units <= self._inline:
            return _finish(work)
        while True:
            done = await self._in_thread(units, lambda: _run_slice(work))
            if done is not None:
                return done[0]

    async def _in_thread(self, units: int, work: Callable[[], Result]) -> Result:
        """Wait for a thread and use it. The thread counts as used until it ends, even if the caller leaves."""
        if not self._free:
            turn = asyncio.get_running_loop().create_future()
            # Works of about one size take turns.
            heapq.heappush(self._waiting, (units.bit_length(), next(self._order), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
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
            work.exception()  # marks the exception as retrieved if the caller has left

    def _release(self) -> None:
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


def _finish(work: Steps[Result]) -> Result:
    try:
        while True:
            next(work)
    except StopIteration as end:
        result: Result = end.value
        return result


def _run_slice(work: Steps[Result]) -> tuple[Result] | None:
    """Run one slice on a thread; `sleep(0)` at each step lets the event loop run. None: there is more to do."""
    until = time.monotonic() + _SLICE_S
    try:
        while time.monotonic() < until:
            next(work)
            time.sleep(0)
    except StopIteration as end:
        return (end.value,)
    return None
