"""Tests of the worker pool: turns, shortest work first, cancellation."""

import asyncio
import threading

import pytest

from ssd_serve.base.errors import OverloadedError
from ssd_serve.server.http.worker_pool import Steps, WorkerPool

pytestmark = pytest.mark.anyio
LONG = 10**6


def counting(done: list[str], name: str, steps: int, begun: threading.Event | None = None) -> Steps[str]:
    for _ in range(steps):
        done.append(name)
        if begun is not None:
            begun.set()
        threading.Event().wait(0.005)
        yield
    return name


async def test_worker_pool_runs_short_work_inline() -> None:
    off_loop = WorkerPool(inline=10, threads=1)
    here = threading.current_thread()
    assert await off_loop.run(10, threading.current_thread) is here
    assert await off_loop.run(11, threading.current_thread) is not here
    assert await off_loop.steps(10, counting([], "short", 2)) == "short"


async def test_worker_pool_works_of_one_length_take_turns() -> None:
    off_loop, done = WorkerPool(0, threads=1), list[str]()
    await asyncio.gather(*(off_loop.steps(LONG, counting(done, name, 24)) for name in "ab"))
    assert done.index("b") < 24 - 1
    assert sorted(done) == ["a"] * 24 + ["b"] * 24


async def test_worker_pool_prefers_the_shortest() -> None:
    off_loop, done, go = WorkerPool(0, threads=1), list[str](), threading.Event()
    first = asyncio.ensure_future(off_loop.run(1, go.wait))
    await asyncio.sleep(0)
    others = [
        asyncio.ensure_future(off_loop.run(units, lambda name=name: done.append(name)))  # type: ignore[misc]
        for name, units in (("long", LONG), ("short", 8), ("middle", 5_000))
    ]
    await asyncio.sleep(0.01)
    go.set()
    await asyncio.gather(first, *others)
    assert done == ["short", "middle", "long"]


async def test_worker_pool_stops_cancelled_work() -> None:
    off_loop, done, begun = WorkerPool(0, threads=1), list[str](), threading.Event()
    working = asyncio.ensure_future(off_loop.steps(LONG, counting(done, "x", 10_000, begun)))
    queued = asyncio.ensure_future(off_loop.run(LONG, lambda: done.append("queued")))
    await asyncio.to_thread(begun.wait)
    working.cancel()
    queued.cancel()
    await asyncio.gather(working, queued, return_exceptions=True)
    # The thread is free as soon as the running slice ends.
    assert await off_loop.run(LONG, lambda: len(done)) < 100
    assert "queued" not in done


async def test_worker_pool_counts_threads_until_they_end() -> None:
    off_loop, go, done = WorkerPool(0, threads=1), threading.Event(), list[int]()
    left = asyncio.ensure_future(off_loop.run(LONG, go.wait))
    await asyncio.sleep(0.01)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    following = asyncio.ensure_future(off_loop.run(LONG, lambda: done.append(1)))
    await asyncio.sleep(0.05)
    assert done == []
    go.set()
    await following
    assert done == [1]


async def test_worker_pool_errors_free_the_thread() -> None:
    off_loop = WorkerPool(0, threads=1)

    def failing() -> Steps[None]:
        yield
        raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await off_loop.steps(LONG, failing())
        with pytest.raises(ZeroDivisionError):
            await off_loop.run(LONG, lambda: 1 // 0)
    assert await off_loop.run(LONG, lambda: 1) == 1


async def test_worker_pool_without_threads_is_overloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    off_loop = WorkerPool(0, threads=1)
    loop = asyncio.get_running_loop()

    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "run_in_executor", fail)
        for _ in range(3):
            with pytest.raises(OverloadedError):
                await off_loop.run(LONG, lambda: 1)
    assert await off_loop.run(LONG, lambda: 1) == 1
