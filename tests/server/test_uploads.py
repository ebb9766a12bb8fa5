"""Tests of the memory limit for request bodies: small bodies never wait, slow uploads are evicted."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import ExitStack

import pytest

from ssd_serve.base.settings import Settings
from ssd_serve.server.http.body import UploadMemory
from ssd_serve.server.limits import Limits
from tests.server.fakes import say
from tests.server.running_server import RunningServer, post, running_server

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"
JSON = {"Content-Type": "application/json"}


async def waits(taking: "asyncio.Future[None]") -> bool:
    await asyncio.sleep(0.02)
    return not taking.done()


async def test_small_bodies_never_wait_for_memory() -> None:
    uploads = UploadMemory(limit=100, free=10, grace_s=60)
    with ExitStack() as first, uploads.open() as second, uploads.open() as small:
        one = first.enter_context(uploads.open())
        await uploads.take(one, 60)
        await uploads.take(one, 90)
        assert uploads.held == 90
        taking = asyncio.ensure_future(uploads.take(second, 20))
        await uploads.take(small, 10)
        assert await waits(taking)
        first.close()
        await taking
        assert uploads.held == 20
    assert uploads.held == 0


async def test_memory_is_given_in_order() -> None:
    uploads, order = UploadMemory(limit=100, free=0, grace_s=60), list[int]()

    async def one(number: int) -> None:
        with uploads.open() as upload:
            await uploads.take(upload, 80)
            order.append(number)
            await asyncio.sleep(0.005)

    await asyncio.gather(*(one(number) for number in range(5)))
    assert order == [0, 1, 2, 3, 4]


async def test_slow_upload_is_evicted_but_not_a_received_one() -> None:
    uploads = UploadMemory(limit=100, free=0, grace_s=0.0)
    with uploads.open() as arrived, uploads.open() as slow, uploads.open() as new:
        await uploads.take(arrived, 50)
        await uploads.take(slow, 40)
        slow.reading = asyncio.get_running_loop().create_future()
        new.started_at = float("inf")
        taking = asyncio.ensure_future(uploads.take(new, 50))
        assert await waits(taking)
        assert slow.evicted
        assert slow.reading.cancelled()
        assert not arrived.evicted
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)


async def test_cancelled_upload_releases_memory() -> None:
    uploads = UploadMemory(limit=100, free=0, grace_s=60)

    with uploads.open() as holder:
        await uploads.take(holder, 100)
        with uploads.open() as leaver:
            taking = asyncio.ensure_future(uploads.take(leaver, 50))
            assert await waits(taking)
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
        assert uploads.held == 100
    assert uploads.held == 0


async def slowly(first: bytes, go: asyncio.Event) -> AsyncGenerator[bytes, None]:
    yield first
    await go.wait()
    yield b'"}'


def body(length: int) -> bytes:
    return json.dumps({"prompt": "a", "bad_words": None, "stop": None, "user": None}).encode() + b" " * length


async def test_evicted_upload_is_answered_503() -> None:
    limits = Limits(max_bodies_bytes=50_000, inline_body_bytes=1_000, body_grace_s=0.1)
    go = asyncio.Event()
    async with running_server(lambda _: say("x"), limits=limits) as server:
        start = b'{"prompt": "' + b"a" * 40_000
        slow = asyncio.ensure_future(server.http.post(PATH, content=slowly(start, go), headers=JSON))
        await asyncio.sleep(0.15)
        quick = await server.http.post(PATH, content=body(30_000), headers=JSON)
        assert quick.status_code == 200
        answer = await slow
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "bodies_full"
    assert answer.headers["retry-after"] == "1"


async def test_upload_without_memory_is_answered_503() -> None:
    limits = Limits(max_bodies_bytes=10_000, inline_body_bytes=1_000, body_timeout_s=0.2)
    async with running_server(lambda _: say("x"), limits=limits) as server:
        answer = await server.http.post(PATH, content=body(20_000), headers=JSON)
        assert (await post(server, PATH, prompt="a"))["choices"]
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "bodies_full")


async def test_full_queue_is_answered_before_the_body_is_read() -> None:
    read = list[bool]()

    async def content() -> AsyncGenerator[bytes, None]:
        read.append(True)
        yield b"{}"

    settings = Settings(max_running=1, max_waiting=0)
    async with running_server(lambda _: say("abc", hold_after=0), settings) as server:
        held = asyncio.ensure_future(post(server, PATH, prompt="a"))
        await until_busy(server)
        for path in (PATH, "/v1/chat/completions"):
            answer = await server.http.post(path, content=content(), headers=JSON)
            assert answer.status_code == 429
        server.engine.released.set()
        await held
    assert read == []


async def until_busy(server: RunningServer) -> None:
    while server.client.active < 1:
        await asyncio.sleep(0.002)
