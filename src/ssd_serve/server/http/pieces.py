"""Hands bytes of a connection on in small pieces, between which others have their turn.

One read of a socket can bring forty thousand chunks of one byte, and parsing HTTP in Python takes as long for
each as for one of a megabyte.
"""

import asyncio
from typing import cast

from uvicorn.protocols.http.h11_impl import H11Protocol

_SIZE = 4096


class Pieces(asyncio.Protocol):
    """Stands between a connection and the protocol that it is for."""

    def __init__(self, protocol: H11Protocol) -> None:
        self._protocol = protocol
        self._transport: asyncio.Transport | None = None
        self._waiting = bytearray()
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._protocol.connection_made(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget what was not handed on: nobody waits for it."""
        self._waiting.clear()
        self._protocol.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Hand on the beginning now; meanwhile nothing more is read."""
        self._waiting += data
        if len(self._waiting) == len(data):
            self._hand_on()
        if self._waiting and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def eof_received(self) -> None:
        self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def _hand_on(self) -> None:
        piece = bytes(self._waiting[:_SIZE])
        del self._waiting[:_SIZE]
        self._protocol.data_received(piece)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._waiting:
            self._hand_on()
        if self._paused and not self._waiting and self._transport is not None:
            self._paused = False
            # Where the protocol has enough for now, it says when it has not.
            if not self._protocol.flow.read_paused:
                self._transport.resume_reading()
