"""Connections of clients: limits on their number, on the time to send a request, and on unread answers.

A connection is idle without a request, receiving while a request arrives, and active while it runs.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, Literal, Protocol, cast

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ssd_serve.server.access.auth import OPEN_PATHS
from ssd_serve.server.errors import unavailable
from ssd_serve.server.http.middleware import path_within
from ssd_serve.server.limits import Limits

Expected = Literal["head", "body", "request"]
"""The next input of a client: the rest of a head, the rest of a body, or another request."""

_CONNECTION = "connection"
"""Key of the request's connection in the ASGI state."""
_CHUNK = 4096


class LimitedConnection(Protocol):
    """A connection that the limiter counts."""

    def abort(self) -> None:
        """Close the connection at once."""
        ...


class ConnectionLimiter:
    """Counts all connections of a server, and above the limit closes the oldest idle or receiving one."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._idle: dict[LimitedConnection, None] = {}
        self._receiving: dict[LimitedConnection, None] = {}
        self._active: dict[LimitedConnection, None] = {}

    def __len__(self) -> int:
        return len(self._idle) + len(self._receiving) + len(self._active)

    def exhausted_for(self, connection: LimitedConnection | None) -> bool:
        """True if other connections with running requests fill the limit, so that none can be closed."""
        return len(self._active) - (connection in self._active) >= self.limit

    def mark_idle(self, connection: LimitedConnection) -> None:
        """Call for a new connection, and when its request has been answered."""
        self._put(connection, self._idle)
        if len(self) > self.limit:
            others = (each for group in (self._idle, self._receiving) for each in group)
            oldest = next((each for each in others if each is not connection), None)
            if oldest is not None:
                self.remove(oldest)
                oldest.abort()

    def mark_receiving(self, connection: LimitedConnection) -> None:
        """Call when a request starts to arrive."""
        if connection not in self._receiving:
            self._put(connection, self._receiving)

    def mark_active(self, connection: LimitedConnection) -> None:
        """Call when a whole request has arrived."""
        self._put(connection, self._active)

    def remove(self, connection: LimitedConnection) -> None:
        """Call when the connection is closed."""
        for group in (self._idle, self._receiving, self._active):
            group.pop(connection, None)

    def abort_all(self) -> None:
        """Close all connections at once."""
        for connection in [*self._idle, *self._receiving, *self._active]:
            connection.abort()

    def _put(self, connection: LimitedConnection, group: dict[LimitedConnection, None]) -> None:
        self.remove(connection)
        group[connection] = None


class ConnectionLimitMiddleware:
    """ASGI middleware: 503 for requests beyond the limit, except for health checks."""

    def __init__(self, app: ASGIApp, limiter: ConnectionLimiter) -> None:
        self._app = app
        self._limiter = limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope.get("state", {}).get(_CONNECTION)
        exhausted = scope["type"] == "http" and self._limiter.exhausted_for(connection)
        if not exhausted or path_within(scope) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        message = f"all {self._limiter.limit} connections are busy (SSD_MAX_CONNECTIONS); try again later"
        response = unavailable(message, "too_many_connections", 1).response()
        response.headers["connection"] = "close"
        await response(scope, receive, send)


class BoundedConnection(H11Protocol):
    """uvicorn's HTTP connection, with deadlines for input and a minimum rate at which output is read.

    Received bytes are parsed in chunks of 4 KiB, and other tasks run between them. One read of a socket can hold
    forty thousand HTTP chunks of one byte, each of which costs as much as one of a megabyte.
    """

    def __init__(
        self,
        config: Config,
        state: ServerState,
        app_state: dict[str, Any],
        limiter: ConnectionLimiter,
        limits: Limits,
    ) -> None:
        super().__init__(config, state, {**app_state, _CONNECTION: self})
        self._limiter = limiter
        self._limits = limits
        self._expected: Expected | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._read_check: asyncio.TimerHandle | None = None
        self._unparsed = bytearray()
        self._reading_paused = False

    def abort(self) -> None:
        """Close at once; unread output is lost."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # The limit of connections without TLS; the default with TLS is eight times as much.
        transport.set_write_buffer_limits(high=HIGH_WATER_LIMIT)
        self._limiter.mark_idle(self)
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unparsed.clear()
        self._limiter.remove(self)
        self._expect(None)
        self._unset_keepalive_if_required()
        self._stop_read_check()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the first chunk now, and pause reading until all chunks are parsed."""
        self._unparsed += data
        if len(self._unparsed) == len(data):
            self._parse_chunk()
        if self._unparsed and not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()

    def _parse_chunk(self) -> None:
        chunk = bytes(self._unparsed[:_CHUNK])
        del self._unparsed[:_CHUNK]
        super().data_received(chunk)
        self._update()
        if self._unparsed:
            self.loop.call_soon(self._parse_more)

    def _parse_more(self) -> None:
        if self._unparsed:
            self._parse_chunk()
        if self._reading_paused and not self._unparsed:
            self._reading_paused = False
            # uvicorn may have paused reading itself; then it also resumes it.
            if not self.flow.read_paused:
                self.transport.resume_reading()

    def on_response_complete(self) -> None:
        """Called by uvicorn; the next request may have arrived already."""
        super().on_response_complete()
        if not self._active:
            self._limiter.mark_idle(self)
        self._update()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._update()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP, unless an answer is being sent: then only close."""
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            super().send_400_response(msg)
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_read_check()

    @property
    def _active(self) -> bool:
        return not self._fresh and not self.cycle.response_complete

    @property
    def _fresh(self) -> bool:
        """True before the first request."""
        return cast("object | None", self.cycle) is None

    def _update(self) -> None:
        """Set what is expected of the client now, and until when."""
        if self.transport.is_closing():
            self._expect(None)
            if self._read_check is None:
                self._check_reader()  # the last output may stay unread, too
        elif self._active:
            self._expect(None)
            if self.cycle.more_body:
                self._limiter.mark_receiving(self)
            else:
                self._limiter.mark_active(self)
        elif self.conn.their_state is h11.SEND_BODY:  # answered before the whole body arrived
            self._expect("body")
        elif self.conn.trailing_data[0] or self._fresh:
            self._expect("head")
        else:
            self._expect("request")

    def _expect(self, what: Expected | None) -> None:
        """Start the deadline of this input; more bytes of the same input do not extend it."""
        if what is self._expected:
            return
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._expected = what
        if what is not None:
            limits = self._limits
            times = {"head": limits.head_s, "body": limits.body_timeout_s, "request": limits.keep_alive_s}
            self._deadline = self.loop.call_later(times[what], self.abort)

    def _check_reader(self, before: int | None = None) -> None:
        """Repeat while output is unread: abort unless enough of it was read since the last check."""
        unread = self.transport.get_write_buffer_size()
        if before is not None and before - unread < self._limits.min_read_bytes:
            self.abort()
            return
        self._stop_read_check()
        self._read_check = self.loop.call_later(self._limits.unread_s, self._check_reader, unread)

    def _stop_read_check(self) -> None:
        if self._read_check is not None:
            self._read_check.cancel()
            self._read_check = None


class TlsHandshake(asyncio.Protocol):
    """A connection before it is encrypted. The limiter counts it, and its handshake has a deadline."""

    def __init__(
        self,
        tls: ssl.SSLContext,
        limiter: ConnectionLimiter,
        timeout_s: float,
        make_protocol: Callable[[], asyncio.Protocol],
    ) -> None:
        """`make_protocol` makes the protocol of the encrypted connection."""
        self._tls = tls
        self._limiter = limiter
        self._timeout_s = timeout_s
        self._make_protocol = make_protocol
        self._early: list[bytes] = []
        self._plain: asyncio.Transport | None = None
        self._handshake: asyncio.Task[None] | None = None

    def abort(self) -> None:
        """Close the connection at once."""
        if self._plain is not None:
            self._plain.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._plain = cast(asyncio.Transport, transport)
        self._plain.pause_reading()  # until start_tls reads
        self._limiter.mark_idle(self)
        self._handshake = asyncio.ensure_future(self._shake_hands(self._plain))

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._limiter.remove(self)

    def data_received(self, data: bytes) -> None:
        """Keep data that arrives together with the end of the handshake."""
        self._early.append(data)

    async def _shake_hands(self, plain: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        try:
            encrypted = await loop.start_tls(
                plain, self, self._tls, server_side=True, ssl_handshake_timeout=self._timeout_s
            )
        except OSError:  # includes TLS errors and the timeout
            encrypted = None
        self._limiter.remove(self)
        if encrypted is None or encrypted.is_closing():
            plain.abort()
            return
        protocol = self._make_protocol()
        encrypted.set_protocol(protocol)
        protocol.connection_made(encrypted)
        for data in self._early:
            protocol.data_received(data)
