"""Answers that stop when the client disconnects: whole ones, and streams of server-sent events."""

import asyncio
import base64
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from ssd_serve.base.errors import SsdError
from ssd_serve.server.errors import ApiError, from_ssd_error, internal

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
_MIN_EVENT_BYTES = 512
"""Fits the text of a usual round, and the other fields of a chunk."""
PING = b": ping\n\n"
"""A comment, which readers of event streams skip."""


class ClientGoneError(SsdError):
    """The client closed the connection, so no answer is sent."""


def event(value: dict[str, object]) -> bytes:
    """Encode the value as a server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(name: str, value: Mapping[str, object]) -> bytes:
    """Encode the value as a server-sent event with a name."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(value))


def obfuscated(value: dict[str, object]) -> bytes:
    """Encode the value as an event padded to `_MIN_EVENT_BYTES`, or to the next power of two.

    An observer of encrypted traffic sees lengths, and could infer text from them. The padding is random, so
    that a proxy cannot compress it.
    """
    missing = _MIN_EVENT_BYTES
    plain = len(event({**value, "obfuscation": ""}))
    while missing < plain:
        missing *= 2
    missing -= plain
    padding = base64.urlsafe_b64encode(os.urandom(missing))[:missing].decode()
    return event({**value, "obfuscation": padding})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`, or cancel it and raise `ClientGoneError` if the client disconnects.

    The request body must have been read before.
    """
    working = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError("the client closed the connection")
    finally:
        working.cancel()
        disconnect.cancel()
        await asyncio.gather(working, disconnect, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of server-sent events.

    Headers are sent with the first event or ping, so that an error before it has its own status. `failed`
    encodes a later error as an event, which ends the stream without `[DONE]`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        ping_s: float,
        failed: Callable[[ApiError], bytes],
    ) -> None:
        super().__init__(headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._ping_s = ping_s
        self._failed = failed
        self._turn = asyncio.Lock()
        self._started = False
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client disconnects."""
        try:
            await while_connected(receive, self._send_all(send))
        except ClientGoneError:
            return
        except Exception as error:
            if not isinstance(error, SsdError):
                logger.exception("a stream failed")
            answer = from_ssd_error(error) if isinstance(error, SsdError) else internal()
            if not self._started:
                await answer.response()(scope, receive, send)
            else:
                await self._send(send, self._failed(answer), more=False)

    async def _send_all(self, send: Send) -> None:
        pinging = asyncio.ensure_future(self._send_pings(send))
        try:
            async with aclosing(self._events) as events:
                async for chunk in events:
                    await self._send(send, chunk)
        finally:
            pinging.cancel()
            await asyncio.gather(pinging, return_exceptions=True)
        await self._send(send, b"", more=False)

    async def _send_pings(self, send: Send) -> None:
        self._sent_at = time.monotonic()
        while True:
            await asyncio.sleep(max(0.0, self._sent_at + self._ping_s - time.monotonic()))
            if time.monotonic() - self._sent_at >= self._ping_s:
                await self._send(send, PING)

    async def _send(self, send: Send, chunk: bytes, more: bool = True) -> None:
        self._sent_at = time.monotonic()
        # Keeps a ping from coming between the two messages.
        async with self._turn:
            if not self._started:
                self._started = True
                start = {"type": "http.response.start", "status": self.status_code}
                await send({**start, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": chunk, "more_body": more})
