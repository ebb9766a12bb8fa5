"""Both ends of a fresh TCP connection prove that they know one key, before the first message.

Each proves it with an HMAC-SHA256 over numbers that both have just drawn, so that nothing seen on the wire
can be used again. Proves who speaks at the start; encrypts nothing. Knows bytes and sockets, no messages.
"""

import contextlib
import hmac
import math
import secrets
import select
import selectors
import socket
import time
from collections.abc import Callable

from ssd_serve.cluster.scarcity import PAUSE_S, is_scarce
from ssd_serve.errors import ProtocolError, SettingsError

_MAGIC = b"ssd-tcp1"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_CHALLENGE_BYTES = len(_MAGIC) + _NONCE_BYTES
_ANSWER_BYTES = _NONCE_BYTES + _PROOF_BYTES
_REFUSAL = bytes(_PROOF_BYTES)
_LOOK_EVERY_S = 0.2
_GREETING_S = 5.0
_MOST_GREETINGS = 64
"""More peers that have not proved themselves yet wait in the kernel's queue."""
SHORTEST_KEY = 16
"""Characters: a key is drawn at random, it is no password to remember."""


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


class Greeting:
    """The listener's end: challenges the peer and checks its answer, without ever blocking."""

    def __init__(self, connection: socket.socket, key: str, deadline: float) -> None:
        """`deadline`: the time (`time.monotonic`) until which the peer must have proved itself."""
        connection.setblocking(False)
        self.connection = connection
        self._key = key
        self._deadline = deadline
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._answer = bytearray()
        self._challenged = False

    def advance(self, now: float) -> bool:
        """Go on as far as the peer has; True when it has proved itself. Raises `ProtocolError` when it has
        not, and never will. Takes no byte that comes after the proof."""
        if not self._challenged:
            self._send(_MAGIC + self._nonce)
            self._challenged = True
        while len(self._answer) < _ANSWER_BYTES:
            try:
                part = self.connection.recv(_ANSWER_BYTES - len(self._answer))
            except BlockingIOError:
                if now >= self._deadline:
                    raise ProtocolError("it did not prove in time that it knows the key") from None
                return False
            except OSError as error:
                raise ProtocolError(f"it left before it proved that it knows the key: {error}") from error
            if not part:
                raise ProtocolError("it left before it proved that it knows the key")
            self._answer += part
        nonce, proof = bytes(self._answer[:_NONCE_BYTES]), bytes(self._answer[_NONCE_BYTES:])
        if not hmac.compare_digest(proof, _proof(self._key, b"connector", self._nonce, nonce)):
            with contextlib.suppress(ProtocolError):
                self._send(_REFUSAL)
            raise ProtocolError("it does not know the key (SSD_CLUSTER_KEY)")
        self._send(_proof(self._key, b"listener", self._nonce, nonce))
        return True

    def _send(self, data: bytes) -> None:
        """So few bytes always fit into the buffer of a fresh socket."""
        try:
            sent = self.connection.send(data)
        except OSError as error:
            raise ProtocolError(f"it left before it proved that it knows the key: {error}") from error
        if sent != len(data):
            raise ProtocolError("it takes no bytes")


class Gate:
    """Lets in the peers of a listening TCP socket that know the key. A peer that is silent, slow or wrong
    keeps nobody else waiting."""

    def __init__(
        self,
        server: socket.socket,
        key: str,
        on_refusal: Callable[[str], None],
        patience_s: float = _GREETING_S,
    ) -> None:
        self._server = server
        self._patience_s = patience_s
        self._key = key
        self._on_refusal = on_refusal
        self._greetings: list[tuple[Greeting, str]] = []
        # One descriptor that is readable when the socket or any of the greeted peers is.
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._full = False
        self._deaf_until = -math.inf

    def accept(self) -> socket.socket | None:
        """The next peer that has proved itself, or None."""
        proved = self._next()
        self.attend()
        return proved

    @property
    def deaf_s(self) -> float:
        """Seconds until it listens again, where there was no descriptor for a peer."""
        return max(0.0, self._deaf_until - time.monotonic())

    def attend(self) -> None:
        """Listen to new peers if they can be greeted."""
        full = len(self._greetings) >= _MOST_GREETINGS or self.deaf_s > 0
        if full is not self._full:  # nobody wakes up for those who must wait
            self._full = full
            if full:
                self._selector.unregister(self._server)
            else:
                self._selector.register(self._server, selectors.EVENT_READ)

    def _next(self) -> socket.socket | None:
        self._greet()
        now = time.monotonic()
        for entry in list(self._greetings):
            greeting, peer = entry
            try:
                proved = greeting.advance(now)
            except ProtocolError as error:
                self._leave(entry)
                greeting.connection.close()
                self._on_refusal(f"{peer}: {error}")
                continue
            if proved:
                self._leave(entry)
                return greeting.connection
        return None

    def fileno(self) -> int:
        """Readable when `accept` is worth calling."""
        return self._selector.fileno()

    def close(self) -> None:
        """Hang up on everybody who has not proved himself."""
        self._selector.close()
        for greeting, _peer in self._greetings:
            greeting.connection.close()
        self._greetings.clear()

    def _greet(self) -> None:
        while len(self._greetings) < _MOST_GREETINGS:
            try:
                connection, peer = self._server.accept()
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
            greeting = Greeting(connection, self._key, time.monotonic() + self._patience_s)
            self._selector.register(connection, selectors.EVENT_READ)
            self._greetings.append((greeting, str(peer[0])))

    def _leave(self, entry: tuple[Greeting, str]) -> None:
        self._greetings.remove(entry)
        self._selector.unregister(entry[0].connection)


def introduce(
    connection: socket.socket,
    key: str,
    address: str,
    deadline: float,
    give_up: Callable[[], bool] = lambda: False,
) -> None:
    """The connector's end; blocks, since a listener that loads a model greets nobody meanwhile.

    Raises `ConnectionError` where it is worth trying again, `TimeoutError` after the deadline, and
    `SettingsError` where the keys differ.
    """
    challenge = _exactly(connection, _CHALLENGE_BYTES, deadline, give_up)
    if not challenge.startswith(_MAGIC):
        raise SettingsError(f"what answers at {address} is no process of ssd-serve")
    theirs, own = challenge[len(_MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(own + _proof(key, b"connector", theirs, own))
    answer = _exactly(connection, _PROOF_BYTES, deadline, give_up)
    if answer == _REFUSAL:
        raise SettingsError(
            f"the process at {address} has another key: set the same SSD_CLUSTER_KEY for both"
        )
    if not hmac.compare_digest(answer, _proof(key, b"listener", theirs, own)):
        raise SettingsError(f"the process at {address} does not know the key: is it the one that you mean?")


def _proof(key: str, role: bytes, listeners: bytes, connectors: bytes) -> bytes:
    """The role is part of it: an answer cannot be sent back as the other end's."""
    return hmac.digest(key.encode(), _MAGIC + role + listeners + connectors, "sha256")


def _exactly(connection: socket.socket, count: int, deadline: float, give_up: Callable[[], bool]) -> bytes:
    data = bytearray()
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    while len(data) < count:
        rest = deadline - time.monotonic()
        if not poller.poll(1000 * max(0.0, min(_LOOK_EVERY_S, rest))):
            if rest <= 0 or give_up():
                raise TimeoutError("it does not speak")
            continue
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionResetError("it hung up")
        data += part
    return bytes(data)
