"""Connections of clients: bounded in number, in the time for saying what they want, and in what they leave
unread.

A connection is idle while its client says nothing or has not said all of a head, and busy while a request
runs that is all there. Builds on uvicorn's protocol; does not know what requests mean.
"""

import asyncio
from typing import Any, Literal, Protocol, cast

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ssd_serve.server.access.auth import OPEN_PATHS
from ssd_serve.server.errors import unavailable
from ssd_serve.server.http.root_path import path_within
from ssd_serve.server.limits import Limits

Expected = Literal["head", "body", "request"]
"""What an idle client has to send: the rest of a head or of a body, or another request if it likes."""


_GUEST = "guest"
"""Where the state of a request has the connection that it came by."""


class Guest(Protocol):
    """One connection of a crowd."""

    def leave(self) -> None:
        """Close the connection at once."""
        ...


class Crowd:
    """All connections of a server. Where there are too many, those that are idle make room, oldest first, and
    then those whose request is still being sent."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._idle: dict[Guest, None] = {}
        self._sending: dict[Guest, None] = {}
        self._busy: dict[Guest, None] = {}

    def __len__(self) -> int:
        return len(self._idle) + len(self._sending) + len(self._busy)

    def too_busy_for(self, guest: Guest | None) -> bool:
        """As many requests of others run as there may be connections: nobody is left who could make room."""
        return len(self._busy) - (guest in self._busy) >= self.most

    def rests(self, guest: Guest) -> None:
        """It has come, or its request has been answered."""
        self._put(guest, self._idle)
        if len(self) > self.most:
            waiting = (one for group in (self._idle, self._sending) for one in group if one is not guest)
            oldest = next(waiting, None)
            if oldest is not None:
                self.left(oldest)
                oldest.leave()

    def sends(self, guest: Guest) -> None:
        """A request of it has begun, and is not all there."""
        if guest not in self._sending:
            self._put(guest, self._sending)

    def works(self, guest: Guest) -> None:
        """A request of it runs."""
        self._put(guest, self._busy)

    def left(self, guest: Guest) -> None:
        """Its connection is closed."""
        for group in (self._idle, self._sending, self._busy):
            group.pop(guest, None)

    def dismiss(self) -> None:
        """Close all of them."""
        for guest in [*self._idle, *self._sending, *self._busy]:
            guest.leave()

    def _put(self, guest: Guest, group: dict[Guest, None]) -> None:
        self.left(guest)
        group[guest] = None


class CrowdControl:
    """ASGI middleware: 503 for requests beyond the limit, but for those who ask whether the server lives."""

    def __init__(self, app: ASGIApp, crowd: Crowd) -> None:
        self._app = app
        self._crowd = crowd

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through or answer it."""
        guest = scope.get("state", {}).get(_GUEST)
        if scope["type"] != "http" or not self._crowd.too_busy_for(guest) or path_within(scope) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        message = f"all {self._crowd.most} connections are busy (SSD_MAX_CONNECTIONS); try again later"
        response = unavailable(message, "too_many_connections", 1).response()
        response.headers["connection"] = "close"
        await response(scope, receive, send)


class BoundedConnection(H11Protocol):
    """uvicorn's connection of one client, with bounds."""

    def __init__(
        self, config: Config, state: ServerState, app_state: dict[str, Any], crowd: Crowd, limits: Limits
    ) -> None:
        super().__init__(config, state, {**app_state, _GUEST: self})
        self._crowd = crowd
        self._limits = limits
        self._expected: Expected | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None

    def leave(self) -> None:
        """Close at once; what the client has not read is lost."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        # As without TLS, whose own default is eight times as much.
        transport.set_write_buffer_limits(high=HIGH_WATER_LIMIT)
        self._crowd.rests(self)
        self._settle()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self._crowd.left(self)
        self._expect(None)
        self._unset_keepalive_if_required()
        self._stop_judging()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Something of a request has come."""
        super().data_received(data)
        self._settle()

    def on_response_complete(self) -> None:
        """A request has been answered; the next one may have come already."""
        super().on_response_complete()
        if not self._working:
            self._crowd.rests(self)
        self._settle()

    def timeout_keep_alive_handler(self) -> None:
        """No other request has come."""
        super().timeout_keep_alive_handler()
        self._settle()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP. Where it comes amid an answer there is nothing left to say."""
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            super().send_400_response(msg)
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        """The client does not take what it is sent as fast as that is written."""
        super().pause_writing()
        self._judge_reader()

    def resume_writing(self) -> None:
        """The client has taken nearly everything."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_judging()

    @property
    def _working(self) -> bool:
        return not self._fresh and not self.cycle.response_complete

    @property
    def _fresh(self) -> bool:
        """No request has come yet."""
        return cast("object | None", self.cycle) is None

    def _settle(self) -> None:
        """After whatever has happened: what is expected of the client now, and until when."""
        if self.transport.is_closing():
            self._expect(None)
            if self._reading is None:
                self._judge_reader()  # last words may go unread, too
        elif self._working:
            self._expect(None)
            if self.cycle.more_body:
                self._crowd.sends(self)
            else:
                self._crowd.works(self)
        elif self.conn.their_state is h11.SEND_BODY:  # answered before it was all there
            self._expect("body")
        elif self.conn.trailing_data[0] or self._fresh:
            self._expect("head")
        else:
            self._expect("request")

    def _expect(self, what: Expected | None) -> None:
        """Give the client its time for this, once: what comes in drips gets no more."""
        if what is self._expected:
            return
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._expected = what
        if what is not None:
            limits = self._limits
            times = {"head": limits.head_s, "body": limits.body_timeout_s, "request": limits.keep_alive_s}
            self._deadline = self.loop.call_later(times[what], self.leave)

    def _judge_reader(self, before: int | None = None) -> None:
        """Again and again while something is unread: whether enough of it was taken since."""
        left = self.transport.get_write_buffer_size()
        if before is not None and before - left < self._limits.min_read_bytes:
            self.leave()
            return
        self._stop_judging()
        self._reading = self.loop.call_later(self._limits.unread_s, self._judge_reader, left)

    def _stop_judging(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
