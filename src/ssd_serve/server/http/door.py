"""Where connections come in: how many may, and what must happen before one can speak HTTP."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.server import ServerState

from ssd_serve.server.http.connections import BoundedConnection, Crowd
from ssd_serve.server.http.pieces import Pieces
from ssd_serve.server.limits import Limits
from ssd_serve.base.settings import Settings

_AT_ONCE = 32
"""Connections accepted before the first of them can make room for others."""
_QUEUE = 512
"""Connections that the system holds until they are accepted."""
_OTHERS = 160
"""Descriptors for everything else, and for those accepted at once."""


def max_connections(settings: Settings, descriptors: int) -> int:
    """As set, or far more than requests can run and wait; never more than leave descriptors for the rest."""
    capacity = settings.max_running + settings.max_waiting
    wanted = settings.max_connections or 4 * capacity + 64
    return min(wanted, max(descriptors - _OTHERS, descriptors // 2))


@dataclass(frozen=True, slots=True)
class Door:
    """What a newcomer meets: the crowd that it joins, and TLS where that is spoken."""

    crowd: Crowd
    limits: Limits
    tls: ssl.SSLContext | None

    def welcome(self, config: Config, state: ServerState, app_state: dict[str, Any]) -> asyncio.Protocol:
        """The protocol of a new connection."""

        def let_in() -> asyncio.Protocol:
            return Pieces(BoundedConnection(config, state, app_state, self.crowd, self.limits))

        if self.tls is None:
            return let_in()
        return Doorman(self.tls, self.crowd, self.limits, let_in)


async def open_door(welcome: Callable[[], asyncio.Protocol], sock: socket.socket) -> asyncio.Server:
    """Begin to accept connections."""
    server = await asyncio.get_running_loop().create_server(welcome, sock=sock, backlog=_AT_ONCE)
    # To asyncio one number means both; a short queue would turn newcomers away in a rush.
    sock.listen(_QUEUE)
    return server


class Doorman(asyncio.Protocol):
    """A connection before it is encrypted: one of the crowd, with a deadline for its handshake."""

    def __init__(
        self, tls: ssl.SSLContext, crowd: Crowd, limits: Limits, let_in: Callable[[], asyncio.Protocol]
    ) -> None:
        """`let_in` makes the protocol that gets the connection once it is encrypted."""
        self._tls = tls
        self._crowd = crowd
        self._limits = limits
        self._let_in = let_in
        self._early: list[bytes] = []
        self._plain: asyncio.Transport | None = None
        self._shaking: asyncio.Task[None] | None = None

    def leave(self) -> None:
        """Close the connection at once."""
        if self._plain is not None:
            self._plain.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come."""
        self._plain = cast(asyncio.Transport, transport)
        self._plain.pause_reading()  # until there is somebody who can decrypt it
        self._crowd.rests(self)
        self._shaking = asyncio.ensure_future(self._shake_hands(self._plain))

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection was closed before it was let in."""
        del exc
        self._crowd.left(self)

    def data_received(self, data: bytes) -> None:
        """What comes with the last word of the handshake."""
        self._early.append(data)

    async def _shake_hands(self, plain: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        try:
            encrypted = await loop.start_tls(
                plain, self, self._tls, server_side=True, ssl_handshake_timeout=self._limits.head_s
            )
        except OSError:  # among them what TLS has to complain of, and a time that is over
            encrypted = None
        self._crowd.left(self)
        if encrypted is None or encrypted.is_closing():
            plain.abort()
            return
        protocol = self._let_in()
        encrypted.set_protocol(protocol)
        protocol.connection_made(encrypted)
        for data in self._early:
            protocol.data_received(data)
