"""TLS handshakes over fresh TCP connections, by which both ends prove that they know the cluster key.

The listener's side never blocks and withstands many hostile peers. Knows bytes and sockets, no messages.
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
from ssd_serve.base.resources import RETRY_PAUSE_S, is_exhausted
from ssd_serve.transport.tls import Identity, TlsStream

_LOOK_EVERY_S = 0.2
_HANDSHAKE_S = 5.0
_MAX_HANDSHAKES = 64
"""Limit of unfinished handshakes; beyond it the oldest one of the busiest address is dropped."""
_MAX_NEW, _MAX_STEPS = 8, 16
"""Limits of one `accept`, which the target's loop calls every round: a step takes up to 0.2 ms."""
_MAX_HELLO_BYTES = 16 * 1024
"""A handshake takes about one kilobyte."""
_PART_BYTES = 4096


def tune(connection: socket.socket) -> None:
    """Disable Nagle's algorithm and enable keep-alive, so that a lost machine is noticed."""
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
    """The listener's side of one handshake, without blocking."""

    def __init__(self, connection: socket.socket, peer: str, tls: TlsStream, deadline: float) -> None:
        """The handshake must end before `deadline` (`time.monotonic`)."""
        connection.setblocking(False)
        self.connection = connection
        self.peer = peer
        self.tls = tls
        self.deadline = deadline
        self._received = 0

    def advance(self) -> bool:
        """Process what has arrived; True when the peer has proved that it knows the key.

        Raises `ProtocolError` if it does not know the key or has left.
        """
        try:
            while True:
                part = self.connection.recv(_PART_BYTES)
                self._received += len(part)
                if not part or self._received > _MAX_HELLO_BYTES:
                    break
                if self.tls.handshake(part, self._send):
                    return True
        except BlockingIOError:
            return False
        except ssl.SSLError:
            raise ProtocolError("the peer does not know the key (SSD_CLUSTER_KEY)") from None
        except OSError as error:
            raise ProtocolError(f"the peer left before it proved that it knows the key: {error}") from error
        if self._received > _MAX_HELLO_BYTES:
            raise ProtocolError("the peer does not know the key (SSD_CLUSTER_KEY)")
        raise ProtocolError("the peer left before it proved that it knows the key")

    def _send(self, data: bytes) -> None:
        """Send handshake bytes, which always fit into the buffer of a fresh socket."""
        try:
            sent = self.connection.send(data)
        except BlockingIOError:
            sent = 0
        if sent != len(data):
            raise ConnectionResetError("the peer takes no bytes")


class KeyGate:
    """Accepts the peers of a TCP socket that know the key; silent, slow or wrong ones delay no others."""

    def __init__(
        self,
        server: socket.socket,
        own: Identity,
        on_refusal: Callable[[str], None],
        timeout_s: float = _HANDSHAKE_S,
    ) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._own = own
        self._on_refusal = on_refusal
        self._handshakes: list[Handshake] = []
        # One descriptor that is readable when the socket or an unfinished handshake is.
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._is_paused = False
        self._paused_until = -math.inf

    def accept(self) -> tuple[socket.socket, TlsStream] | None:
        """The next peer that knows the key; None: none yet."""
        proved = self._next()
        self.update_pause()
        return proved

    @property
    def paused_s(self) -> float:
        """Seconds until new peers are accepted again, after the process ran out of descriptors."""
        return max(0.0, self._paused_until - time.monotonic())

    def update_pause(self) -> None:
        """Resume or pause accepting new peers."""
        paused = self.paused_s > 0
        if paused is not self._is_paused:
            self._is_paused = paused
            if paused:
                self._selector.unregister(self._server)
            else:
                self._selector.register(self._server, selectors.EVENT_READ)

    def fileno(self) -> int:
        """A descriptor that is readable when `accept` may return a peer."""
        return self._selector.fileno()

    def close(self) -> None:
        """Close all unfinished handshakes."""
        self._selector.close()
        for handshake in self._handshakes:
            handshake.connection.close()
        self._handshakes.clear()

    def _next(self) -> tuple[socket.socket, TlsStream] | None:
        ready: list[Handshake | None] = [key.data for key, _ in self._selector.select(0)]
        if None in ready:
            self._accept_new()
            ready = [key.data for key, _ in self._selector.select(0)]
        for handshake in [each for each in ready if each is not None][:_MAX_STEPS]:
            try:
                proved = handshake.advance()
            except ProtocolError as error:
                self._refuse(handshake, str(error))
                continue
            if proved:
                self._forget(handshake)
                return handshake.connection, handshake.tls
        now = time.monotonic()
        for handshake in [each for each in self._handshakes if now >= each.deadline]:
            self._refuse(handshake, "the peer did not prove in time that it knows the key")
        return None

    def _accept_new(self) -> None:
        for _ in range(_MAX_NEW):
            try:
                connection, address = self._server.accept()
            except BlockingIOError:
                return
            except OSError as error:  # the peer has gone again, or descriptors are exhausted
                if is_exhausted(error):
                    self._paused_until = time.monotonic() + RETRY_PAUSE_S
                return
            try:
                tune(connection)
            except OSError:
                connection.close()
                continue
            if len(self._handshakes) >= _MAX_HANDSHAKES:
                self._drop_oldest()
            tls = TlsStream(self._own, listening=True)
            deadline = time.monotonic() + self._timeout_s
            handshake = Handshake(connection, str(address[0]), tls, deadline)
            self._selector.register(connection, selectors.EVENT_READ, handshake)
            self._handshakes.append(handshake)

    def _drop_oldest(self) -> None:
        """Drop the oldest handshake of the busiest address: an honest peer takes some milliseconds."""
        [(busiest, _)] = Counter(handshake.peer for handshake in self._handshakes).most_common(1)
        oldest = next(handshake for handshake in self._handshakes if handshake.peer == busiest)
        self._refuse(oldest, "too many unfinished handshakes")

    def _refuse(self, handshake: Handshake, why: str) -> None:
        self._forget(handshake)
        handshake.connection.close()
        self._on_refusal(f"{handshake.peer}: {why}")

    def _forget(self, handshake: Handshake) -> None:
        self._handshakes.remove(handshake)
        self._selector.unregister(handshake.connection)


def connect_tls(
    connection: socket.socket,
    own: Identity,
    address: str,
    deadline: float,
    give_up: Callable[[], bool],
) -> TlsStream:
    """The connector's handshake.

    Raises `SettingsError` if the peer has another key or is no process of ssd-serve, `OSError` if it is gone
    or silent.
    """
    tls = TlsStream(own, listening=False)
    received = b""
    try:
        while not tls.handshake(received, connection.sendall):
            received = _part(connection, deadline, give_up)
    except ssl.SSLCertVerificationError:
        raise SettingsError(
            f"the process at {address} has another key: set the same SSD_CLUSTER_KEY for both"
        ) from None
    except ssl.SSLError as error:
        raise SettingsError(
            f"what answers at {address} is no process of ssd-serve, or of another version ({error.reason})"
        ) from None
    return tls


def _part(connection: socket.socket, deadline: float, give_up: Callable[[], bool]) -> bytes:
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    while True:
        rest = deadline - time.monotonic()
        if poller.poll(1000 * max(0.0, min(_LOOK_EVERY_S, rest))):
            break
        if rest <= 0 or give_up():
            raise TimeoutError("the peer is silent")
    part = connection.recv(_PART_BYTES)
    if not part:
        raise ConnectionResetError("the peer closed the connection")
    return part
