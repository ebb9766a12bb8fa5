"""Bytes of a connection in pieces: all of them, in order, with turns for others and a bound."""

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.protocols.http.h11_impl import H11Protocol

from ssd_serve.server.http.connections import ChunkedReader

pytestmark = pytest.mark.anyio


class Transport:
    """Remembers whether it may read."""

    reading = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Listener:
    """Takes pieces; may have enough, as uvicorn's protocol may."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.flow = self
        self.read_paused = False
        self.lost = False

    def connection_made(self, transport: object) -> None:
        pass

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True


def connected() -> tuple[ChunkedReader, Listener, Transport]:
    listener, transport = Listener(), Transport()
    pieces = ChunkedReader(cast(H11Protocol, listener))
    pieces.connection_made(cast(Any, transport))
    return pieces, listener, transport


async def until(done: Any) -> None:
    for _ in range(1_000):
        if done():
            return
        await asyncio.sleep(0)
    raise AssertionError("did not happen")


@given(st.lists(st.binary(min_size=1, max_size=20_000), min_size=1, max_size=6))
def test_chunked_reader_keeps_order(reads: list[bytes]) -> None:
    async def send() -> None:
        pieces, listener, transport = connected()
        for data in reads:
            await until(lambda: transport.reading)
            pieces.data_received(data)
        await until(lambda: b"".join(listener.pieces) == b"".join(reads))
        assert max(map(len, listener.pieces)) <= 4096
        await until(lambda: transport.reading)

    asyncio.run(send())


async def test_chunked_reader_yields_between_chunks_and_pauses_reading() -> None:
    pieces, listener, transport = connected()
    pieces.data_received(b"x" * 40_000)
    assert len(listener.pieces) == 1
    assert not transport.reading
    turns = 0
    while len(listener.pieces) < 10:
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 9
    await until(lambda: transport.reading)


async def test_chunked_reader_passes_small_reads_on() -> None:
    pieces, listener, transport = connected()
    pieces.data_received(b"GET")
    assert (listener.pieces, transport.reading) == ([b"GET"], True)


async def test_chunked_reader_respects_flow_control() -> None:
    pieces, listener, transport = connected()
    listener.read_paused = True
    pieces.data_received(b"x" * 5_000)
    await until(lambda: len(listener.pieces) == 2)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not transport.reading


async def test_chunked_reader_drops_data_of_a_closed_connection() -> None:
    pieces, listener, _ = connected()
    pieces.data_received(b"x" * 40_000)
    pieces.connection_lost(None)
    for _ in range(20):
        await asyncio.sleep(0)
    assert listener.lost
    assert len(listener.pieces) == 1
