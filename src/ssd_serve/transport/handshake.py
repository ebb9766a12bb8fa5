"""Both ends of a fresh TCP connection prove that they know one key, before the first message: by TLS.

Here is what a listener does for those who have not proved it yet, of whom there may be many and hostile ones,
and what a connector does. Knows bytes and sockets, no messages.
"""

import contextlib
import math
import select
import selectors
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable

from ssd_serve.base.errors import ProtocolError, SettingsError
from ssd_serve.base.scarcity import PAUSE_S, is_scarce
from ssd_serve.transport.tls import Identity, TlsStream

_LOOK_EVERY_S = 0.2
_GREETING_S = 5.0
_MAX_GREETINGS = 64
"""More strangers than that, and the oldest of the address that sends most of them leaves."""
_MAX_NEW, _MAX_STEPS = 8, 16
"""In one call of `accept`, which the target's loop makes every round: a step costs it up to 0.2 ms."""
_MAX_HELLO_BYTES = 16 * 1024
"""A handshake takes about one kilobyte."""
_PART_BYTES = 4096


def tune(connection: socket.socket) -> None:
    """Send small messages at once, and notice a machine that is gone, although nobody says so."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 10_000),
    ):
        if hasattr(socket, option):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class Handshake:
    """The listener's end: shakes hands with the peer, without ever blocking."""

    def __init__(self, connection: socket.socket, peer: str, sealed: TlsStream, deadline: float) -> None:
        """`deadline`: the time (`time.monotonic`) until which the peer must have proved itself."""
        connection.setblocking(False)
        self.connection = connection
        self.peer = peer
        self.sealed = sealed
        self.deadline = deadline
        self._heard = 0

    def advance(self) -> bool:
        """Go on as far as the peer has; True when it has proved itself. Raises `ProtocolError` when it has
        not, and never will."""
        try:
            while True:
                part = self.connection.recv(_PART_BYTES)
                self._heard += len(part)
                if not part or self._heard > _MAX_HELLO_BYTES:
                    break
                if self.sealed.shake(part, self._send):
                    return True
        except BlockingIOError:
            return False
        except ssl.SSLError:
            raise ProtocolError("it does not know the key (SSD_CLUSTER_KEY)") from None
        except OSError as error:
            raise ProtocolError(f"it left before it proved that it knows the key: {error}") from error
        if self._heard > _MAX_HELLO_BYTES:
            raise ProtocolError("it does not know the key (SSD_CLUSTER_KEY)")
        raise ProtocolError("it left before it proved that it knows the key")

    def _send(self, data: bytes) -> None:
        """So few bytes always fit into the buffer of a fresh socket."""
        try:
            sent = self.connection.send(data)
        except BlockingIOError:
            sent = 0
        if sent != len(data):
            raise ConnectionResetError("it takes no bytes")


class KeyGate:
    """Lets in the peers of a listening TCP socket that know the key. A peer that is silent, slow or wrong
    keeps nobody else waiting, however many of them there are."""

    def __init__(
        self,
        server: socket.socket,
        own: Identity,
        on_refusal: Callable[[str], None],
        patience_s: float = _GREETING_S,
    ) -> None:
        self._server = server
        self._patience_s = patience_s
        self._own = own
        self._on_refusal = on_refusal
        self._greetings: list[Handshake] = []
        # One descriptor that is readable when the socket or any of the greeted peers is.
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._deaf = False
        self._deaf_until = -math.inf

    def accept(self) -> tuple[socket.socket, TlsStream] | None:
        """The next peer that has proved itself, or None."""
        proved = self._next()
        self.attend()
        return proved

    @property
    def deaf_s(self) -> float:
        """Seconds until it listens again, where there was no descriptor for a peer."""
        return max(0.0, self._deaf_until - time.monotonic())

    def attend(self) -> None:
        """Listen to new peers if there are descriptors for them."""
        deaf = self.deaf_s > 0
        if deaf is not self._deaf:
            self._deaf = deaf
            if deaf:
                self._selector.unregister(self._server)
            else:
                self._selector.register(self._server, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Readable when `accept` is worth calling."""
        return self._selector.fileno()

    def close(self) -> None:
        """Hang up on everybody who has not proved himself."""
        self._selector.close()
        for greeting in self._greetings:
            greeting.connection.close()
        self._greetings.clear()

    def _next(self) -> tuple[socket.socket, TlsStream] | None:
        ready: list[Handshake | None] = [key.data for key, _ in self._selector.select(0)]
        if None in ready:
            self._greet()
            ready = [key.data for key, _ in self._selector.select(0)]
        for greeting in [each for each in ready if each is not None][:_MAX_STEPS]:
            try:
                proved = greeting.advance()
            except ProtocolError as error:
                self._refuse(greeting, str(error))
                continue
            if proved:
                self._forget(greeting)
                return greeting.connection, greeting.sealed
        now = time.monotonic()
        for greeting in [each for each in self._greetings if now >= each.deadline]:
            self._refuse(greeting, "it did not prove in time that it knows the key")
        return None

    def _greet(self) -> None:
        for _ in range(_MAX_NEW):
            try:
                connection, address = self._server.accept()
            except BlockingIOError:
                return
            except OSError as error:  # one who has gone again, or for whom there is no descriptor
                if is_scarce(error):
                    self._deaf_until = time.monotonic() + PAUSE_S
                return
            try:
                tune(connection)
            except OSError:
                connection.close()
                continue
            if len(self._greetings) >= _MAX_GREETINGS:
                self._make_room()
            sealed = TlsStream(self._own, listening=True)
            deadline = time.monotonic() + self._patience_s
            greeting = Handshake(connection, str(address[0]), sealed, deadline)
            self._selector.register(connection, selectors.EVENT_READ, greeting)
            self._greetings.append(greeting)

    def _make_room(self) -> None:
        """An honest peer needs some milliseconds: the oldest is none, and one address crowds out itself."""
        [(busiest, _)] = Counter(greeting.peer for greeting in self._greetings).most_common(1)
        oldest = next(greeting for greeting in self._greetings if greeting.peer == busiest)
        self._refuse(oldest, "it was silent, and others came")

    def _refuse(self, greeting: Handshake, why: str) -> None:
        self._forget(greeting)
        greeting.connection.close()
        self._on_refusal(f"{greeting.peer}: {why}")

    def _forget(self, greeting: Handshake) -> None:
        self._greetings.remove(greeting)
        self._selector.unregister(greeting.connection)


def introduce(
    connection: socket.socket,
    own: Identity,
    address: str,
    deadline: float,
    give_up: Callable[[], bool],
) -> TlsStream:
    """The connector's end. Raises `SettingsError` when the peer has another key or is something else, and
    `OSError` when it is gone or silent."""
    sealed = TlsStream(own, listening=False)
    received = b""
    try:
        while not sealed.shake(received, connection.sendall):
            received = _part(connection, deadline, give_up)
    except ssl.SSLCertVerificationError:
        raise SettingsError(
            f"the process at {address} has another key: set the same SSD_CLUSTER_KEY for both"
        ) from None
    except ssl.SSLError as error:
        raise SettingsError(
            f"what answers at {address} is no process of ssd-serve, or of another version ({error.reason})"
        ) from None
    return sealed


def _part(connection: socket.socket, deadline: float, give_up: Callable[[], bool]) -> bytes:
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    while True:
        rest = deadline - time.monotonic()
        if poller.poll(1000 * max(0.0, min(_LOOK_EVERY_S, rest))):
            break
        if rest <= 0 or give_up():
            raise TimeoutError("it does not speak")
    part = connection.recv(_PART_BYTES)
    if not part:
        raise ConnectionResetError("it hung up")
    return part
