"""Listening on a unix path or a TCP port, connecting to either, and reconnecting in the background.

An address is a path or `tcp://127.0.0.1:4711`. Knows no messages.
"""

import math
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ssd_serve.base.cluster_key import STRONG_KEY, is_weak
from ssd_serve.base.errors import EngineDeadError, PermissionProblemError, SettingsError, SsdError
from ssd_serve.base.logs import Logger
from ssd_serve.base.resources import RETRY_PAUSE_S, is_exhausted
from ssd_serve.transport.channel import DEFAULT_LIMITS, Channel, ReceiveLimits, SocketChannel
from ssd_serve.transport.handshake import KeyGate, connect_tls, tune
from ssd_serve.transport.tls import identity

T = TypeVar("T")
_TCP = "tcp://"
_RETRY_S, _LONGEST_RETRY_S = 0.02, 0.2
_TCP_CONNECT_S = 5.0
_HIGHEST_PORT = 65_535
_LONGEST_UNIX_PATH = 100
"""The kernel's limit is 107 bytes on Linux and 103 on macOS."""


class Listener:
    """Accepts channels without blocking.

    A unix path admits only this user: the socket file is 0600 in a private folder. TCP admits peers that know
    the key.
    """

    def __init__(self, server: socket.socket, address: str, gate: KeyGate | None = None) -> None:
        server.setblocking(False)
        self._socket = server
        self._gate = gate
        self._paused_until = -math.inf
        self.address = address

    @classmethod
    def unix(cls, path: str | Path) -> "Listener":
        """Listen on a socket file, replacing one that a dead process left."""
        text = str(path)
        if len(os.fsencode(text)) > _LONGEST_UNIX_PATH:
            raise SettingsError(f"the socket path {text} is too long; choose a shorter SSD_RUN_DIR")
        _require_no_file(text)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            Path(text).unlink(missing_ok=True)
            server.bind(text)
            # Between bind and chmod the folder's mode 0700 protects the socket.
            os.chmod(text, 0o600)
            server.listen()
        except OSError as error:
            server.close()
            raise PermissionProblemError(
                f"cannot create the socket {text}: {error.strerror}; set SSD_RUN_DIR to a writable folder"
            ) from error
        return cls(server, text)

    @classmethod
    def tcp(
        cls, host: str, port: int, key: str, on_refusal: Callable[[str], None] = lambda _why: None
    ) -> "Listener":
        """Listen on a TCP port of one address of this machine; port 0 takes a free one.

        `on_refusal` is called with the reason for every peer that does not know the key.
        """
        _check_key(key, f"listening on {host}")
        own = identity(key)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            server = socket.create_server((host, port), family=family)
        except OSError as error:
            raise SettingsError(f"cannot listen on {host}, port {port}: {error.strerror}") from error
        name = f"[{host}]" if ":" in host else host
        server.setblocking(False)
        address = f"{_TCP}{name}:{server.getsockname()[1]}"
        return cls(server, address, KeyGate(server, own, on_refusal))

    @classmethod
    def at(
        cls, address: str, key: str = "", on_refusal: Callable[[str], None] = lambda _why: None
    ) -> "Listener":
        """Listen at a path, or at `tcp://host:port`, where peers must know the key."""
        if address.startswith(_TCP):
            return cls.tcp(*_host_and_port(address), key, on_refusal)
        return cls.unix(address)

    @property
    def pending(self) -> int:
        """Always 0."""
        return 0

    def accept(self, limits: ReceiveLimits = DEFAULT_LIMITS) -> SocketChannel | None:
        """The next admitted peer; None: none yet."""
        if self._gate is not None:
            proved = self._gate.accept()
            return None if proved is None else SocketChannel(proved[0], limits=limits, tls=proved[1])
        connection = self.accept_socket()
        return None if connection is None else SocketChannel(connection, limits=limits)

    def await_peer(self, timeout_s: float) -> SocketChannel | None:
        """`accept`, waiting up to `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.wait(max(0.0, deadline - time.monotonic())):
            channel = self.accept()
            if channel is not None:
                return channel
        return None

    def accept_socket(self) -> socket.socket | None:
        """`accept` of a bare socket on a unix path, for peers that do not use messages."""
        if self._gate is not None:
            raise SettingsError(f"{self.address} carries messages: a bare socket would not be encrypted")
        try:
            return self._socket.accept()[0]
        except (BlockingIOError, ConnectionAbortedError):
            return None
        except OSError as error:
            if not is_exhausted(error):
                raise
            self._paused_until = time.monotonic() + RETRY_PAUSE_S
            return None

    def wait(self, timeout_s: float) -> bool:
        """Wait until `accept` may return a peer; it may still return None."""
        paused_s = min(timeout_s, self._paused_s)
        if paused_s > 0 and (self._poll(paused_s) or paused_s == timeout_s):
            return self._poll(0.0)
        if self._gate is not None:
            self._gate.update_pause()
        return self._poll(timeout_s - paused_s)

    def _poll(self, timeout_s: float) -> bool:
        poller, descriptor = select.poll(), self.fileno()
        if descriptor >= 0:
            poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    @property
    def _paused_s(self) -> float:
        own = max(0.0, self._paused_until - time.monotonic())
        return own if self._gate is None else self._gate.paused_s

    def fileno(self) -> int:
        """File descriptor to poll; -1 while accepting is paused."""
        if self._gate is not None:
            return self._gate.fileno()
        return -1 if self._paused_s > 0 else self._socket.fileno()

    def close(self) -> None:
        """Stop listening and remove the socket file."""
        if self._gate is not None:
            self._gate.close()
        self._socket.close()
        if not self.address.startswith(_TCP):
            Path(self.address).unlink(missing_ok=True)


def _require_no_file(path: str) -> None:
    """Refuse to replace a file that is no socket, which a setting may name by mistake."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return  # no file, or `bind` reports the error
    if not stat.S_ISSOCK(mode):
        raise SettingsError(f"{path} exists and is no socket: name another path, or remove it yourself")


def connect(
    address: str,
    timeout_s: float = 10.0,
    *,
    key: str = "",
    limits: ReceiveLimits = DEFAULT_LIMITS,
    give_up: Callable[[], bool] = lambda: False,
) -> SocketChannel:
    """Connect to a listener, retrying until it exists. On TCP both ends prove that they know `key`.

    `give_up` is called between tries and returns True if the peer will never come. Raises `EngineDeadError`,
    or `SettingsError` if the keys differ.
    """
    check_address(address, key)
    if not address.startswith(_TCP):
        return SocketChannel(connect_socket(address, timeout_s, give_up=give_up), limits=limits)
    own = identity(key)

    def once(deadline: float) -> SocketChannel:
        connection = socket.create_connection(_host_and_port(address), timeout=_TCP_CONNECT_S)
        try:
            tune(connection)
            tls = connect_tls(connection, own, address, deadline, give_up)
            return SocketChannel(connection, limits=limits, tls=tls)
        except BaseException:
            connection.close()
            raise

    return _retry(once, address, timeout_s, give_up)


def connect_socket(
    path: str, timeout_s: float, *, give_up: Callable[[], bool] = lambda: False
) -> socket.socket:
    """`connect` to a unix path, as a bare socket."""

    def once(_deadline: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            raise
        return connection

    return _retry(once, path, timeout_s, give_up)


def _retry(once: Callable[[float], T], address: str, timeout_s: float, give_up: Callable[[], bool]) -> T:
    deadline, pause_s = time.monotonic() + timeout_s, _RETRY_S
    while True:
        try:
            return once(deadline)
        except (FileNotFoundError, ConnectionError, BlockingIOError, TimeoutError) as error:
            if give_up() or time.monotonic() >= deadline:
                raise EngineDeadError(f"no process answers at {address}: {error}") from error
        except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
            scarce = isinstance(error, OSError) and is_exhausted(error)
            if not scarce or give_up() or time.monotonic() >= deadline:
                raise EngineDeadError(f"cannot connect to {address}: {error}") from error
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_RETRY_S)


def check_address(address: str, key: str) -> None:
    """Raises `SettingsError` for an address that is neither a path nor `tcp://host:port`, or for TCP
    without a key."""
    if address.startswith(_TCP):
        _host_and_port(address)
        _check_key(key, f"connecting to {address}")
    elif "/" not in address:
        raise SettingsError(f"the address {address} must look like tcp://127.0.0.1:4711")


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix(_TCP).rpartition(":")
    if not host or not port.isdecimal() or int(port) > _HIGHEST_PORT:
        raise SettingsError(f"the address {address} must look like tcp://127.0.0.1:4711")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _check_key(key: str, doing: str) -> None:
    if is_weak(key):
        raise SettingsError(f"{doing} needs a key that both ends know: set SSD_CLUSTER_KEY to {STRONG_KEY}")


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_CONNECT_S = 30.0
"""Timeout of one try: a verifier does not accept connections while it loads its model."""


class Reconnector:
    """Connects to one address again and again in a background thread; poll `take` for each connection."""

    def __init__(
        self,
        address: str,
        log: Logger,
        reach: Callable[[str], Channel] | None = None,
        key: str = "",
        longest_pause_s: float = _LONGEST_PAUSE_S,
        limits: ReceiveLimits = DEFAULT_LIMITS,
    ) -> None:
        """`reach` connects or raises (default: `connect` with `key`)."""
        self._longest_pause_s = longest_pause_s
        self.address = address
        self._log = log
        self._reach = reach or (lambda address: connect(address, _CONNECT_S, key=key, limits=limits))
        self._pause_s = 0.0
        self._thread: threading.Thread | None = None
        self._connected: Channel | None = None
        self._failing = False

    def take(self) -> Channel | None:
        """The next connection, or None if there is none yet."""
        if self._thread is None:
            thread = threading.Thread(target=self._connect, name="reconnect", daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError):  # no thread now: the caller polls again
                return None
            self._thread = thread
        if self._thread.is_alive():
            return None
        self._thread = None
        channel, self._connected = self._connected, None
        return channel

    def on_success(self) -> None:
        """The connection works: reconnect without a pause when it ends."""
        self._pause_s = 0.0

    def on_refusal(self) -> None:
        """The peer refused: reconnect after the longest pause."""
        self._pause_s = self._longest_pause_s

    def _connect(self) -> None:
        time.sleep(self._pause_s)
        self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), self._longest_pause_s)
        try:
            self._connected = self._reach(self.address)
            self._failing = False
        except SsdError as error:
            if not self._failing:
                self._log.warning("waiting for a verifier", address=self.address, why=str(error))
            self._failing = True
