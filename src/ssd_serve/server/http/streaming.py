"""Answers that notice when the client goes away, whole or as server-sent events.

Knows ASGI and the SSE format, not what is sent.
"""

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
_MIN_SIZE = 512
"""Bytes: room for what a round usually brings, and the rest of a chunk."""
PING = b": ping\n\n"
"""A comment: readers of event streams skip it."""


class ClientGoneError(SsdError):
    """The client closed the connection; there is nobody to answer."""


def event(value: dict[str, object]) -> bytes:
    """The data as one server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(name: str, value: Mapping[str, object]) -> bytes:
    """The data as one event that has a name."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(value))


def obfuscated(value: dict[str, object]) -> bytes:
    """One event whose length tells nearly nothing of its text: `_MIN_SIZE` bytes, or the next power of two.

    Whoever listens to encrypted traffic sees lengths. The padding is random, so that nothing on the way can
    compress it.
    """
    missing = _MIN_SIZE
    plain = len(event({**value, "obfuscation": ""}))
    while missing < plain:
        missing *= 2
    missing -= plain
    padding = base64.urlsafe_b64encode(os.urandom(missing))[:missing].decode()
    return event({**value, "obfuscation": padding})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled with `ClientGoneError` as soon as the client disconnects.

    The request body must have been read before.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError("the client closed the connection")
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of server-sent events.

    Headers are sent with the first event (or ping), so that a request which is refused gets its proper
    status. An error after that is sent as an event, without the closing `[DONE]`; `failed` writes it.
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
        self._begun = False
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client goes away."""
        try:
            await while_connected(receive, self._send_all(send))
        except ClientGoneError:
            return
        except Exception as error:
            if not isinstance(error, SsdError):
                logger.exception("a stream failed")
            answer = from_ssd_error(error) if isinstance(error, SsdError) else internal()
            if not self._begun:
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
        # A ping must not slip between the two messages.
        async with self._turn:
            if not self._begun:
                self._begun = True
                start = {"type": "http.response.start", "status": self.status_code}
                await send({**start, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": chunk, "more_body": more})
