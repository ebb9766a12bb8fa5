"""Where channels begin: listening on a unix path or on a TCP port, and connecting to either.

An address is a text that fits in a command line: a path, or `tcp://127.0.0.1:4711`. Knows no messages.
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

from ssd_serve.base.errors import EngineDeadError, PermissionProblemError, SettingsError, SsdError
from ssd_serve.base.logs import Logger
from ssd_serve.base.scarcity import PAUSE_S, is_scarce
from ssd_serve.base.setting_values import STRONG_KEY, is_weak
from ssd_serve.transport.channel import DEFAULT_LIMITS, Channel, ReceiveLimits, SocketChannel
from ssd_serve.transport.handshake import KeyGate, introduce, tune
from ssd_serve.transport.tls import identity

T = TypeVar("T")
_TCP = "tcp://"
_RETRY_S, _LONGEST_RETRY_S = 0.02, 0.2
_TCP_CONNECT_S = 5.0
_HIGHEST_PORT = 65_535
_LONGEST_UNIX_PATH = 100
"""The kernel's limit is 107 bytes on Linux and 103 on macOS."""


class Listener:
    """Accepts channels, without ever blocking. Who may speak: on a unix path only this user, since the socket
    file is 0600 in a folder of its own; on TCP whoever proves that he knows the key."""

    def __init__(self, server: socket.socket, address: str, gate: KeyGate | None = None) -> None:
        server.setblocking(False)
        self._socket = server
        self._gate = gate
        self._deaf_until = -math.inf
        self.address = address

    @classmethod
    def unix(cls, path: str | Path) -> "Listener":
        """Listen on a socket file, replacing what a dead process left there."""
        text = str(path)
        if len(os.fsencode(text)) > _LONGEST_UNIX_PATH:
            raise SettingsError(f"the socket path {text} is too long; choose a shorter SSD_RUN_DIR")
        _require_no_file(text)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            Path(text).unlink(missing_ok=True)
            server.bind(text)
            # Between bind and chmod the folder's 0700 is what protects the socket.
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
        """Listen on a TCP port of one address of this machine; port 0 takes a free one. `on_refusal` is told
        of every peer that does not prove that it knows the key."""
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
        """Listen at an address: a path, or `tcp://host:port`, where peers must know the key."""
        if address.startswith(_TCP):
            return cls.tcp(*_host_and_port(address), key, on_refusal)
        return cls.unix(address)

    @property
    def pending(self) -> int:
        """A listener sends nothing."""
        return 0

    def accept(self, limits: ReceiveLimits = DEFAULT_LIMITS) -> SocketChannel | None:
        """The next peer that connected and may speak, or None."""
        if self._gate is not None:
            proved = self._gate.accept()
            return None if proved is None else SocketChannel(proved[0], limits=limits, sealed=proved[1])
        connection = self.accept_socket()
        return None if connection is None else SocketChannel(connection, limits=limits)

    def await_peer(self, timeout_s: float) -> SocketChannel | None:
        """The same, waiting for it."""
        deadline = time.monotonic() + timeout_s
        while self.wait(max(0.0, deadline - time.monotonic())):
            channel = self.accept()
            if channel is not None:
                return channel
        return None

    def accept_socket(self) -> socket.socket | None:
        """The same as `accept`, for peers of this machine that do not speak in messages."""
        if self._gate is not None:
            raise SettingsError(f"{self.address} is for messages: a bare socket would not be encrypted")
        try:
            return self._socket.accept()[0]
        except (BlockingIOError, ConnectionAbortedError):
            return None
        except OSError as error:
            if not is_scarce(error):
                raise
            self._deaf_until = time.monotonic() + PAUSE_S
            return None

    def wait(self, timeout_s: float) -> bool:
        """Wait until `accept` is worth calling; it may still give None."""
        deaf_s = min(timeout_s, self._deaf_s)
        if deaf_s > 0 and (self._poll(deaf_s) or deaf_s == timeout_s):
            return self._poll(0.0)
        if self._gate is not None:
            self._gate.attend()
        return self._poll(timeout_s - deaf_s)

    def _poll(self, timeout_s: float) -> bool:
        poller, descriptor = select.poll(), self.fileno()
        if descriptor >= 0:
            poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    @property
    def _deaf_s(self) -> float:
        own = max(0.0, self._deaf_until - time.monotonic())
        return own if self._gate is None else self._gate.deaf_s

    def fileno(self) -> int:
        """File descriptor to wait on; -1 for a moment where there is none to accept with."""
        if self._gate is not None:
            return self._gate.fileno()
        return -1 if self._deaf_s > 0 else self._socket.fileno()

    def close(self) -> None:
        """Stop listening and remove the socket file."""
        if self._gate is not None:
            self._gate.close()
        self._socket.close()
        if not self.address.startswith(_TCP):
            Path(self.address).unlink(missing_ok=True)


def _require_no_file(path: str) -> None:
    """Only a socket may be replaced: a setting that names a file by mistake must not cost that file."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return  # nothing there, or `bind` says what is wrong
    if not stat.S_ISSOCK(mode):
        raise SettingsError(f"{path} is there and is no socket: name another path, or remove it yourself")


def connect(
    address: str,
    timeout_s: float = 10.0,
    *,
    key: str = "",
    limits: ReceiveLimits = DEFAULT_LIMITS,
    give_up: Callable[[], bool] = lambda: False,
) -> SocketChannel:
    """Connect to a listener, trying again until it is there. On TCP both ends prove that they know `key`.

    `give_up` is asked between tries: True when the peer will never come. Raises `EngineDeadError`, and
    `SettingsError` where the keys differ.
    """
    check_address(address, key)
    if not address.startswith(_TCP):
        return SocketChannel(connect_socket(address, timeout_s, give_up=give_up), limits=limits)
    own = identity(key)

    def once(deadline: float) -> SocketChannel:
        connection = socket.create_connection(_host_and_port(address), timeout=_TCP_CONNECT_S)
        try:
            tune(connection)
            sealed = introduce(connection, own, address, deadline, give_up)
            return SocketChannel(connection, limits=limits, sealed=sealed)
        except BaseException:
            connection.close()
            raise

    return _persistently(once, address, timeout_s, give_up)


def connect_socket(
    path: str, timeout_s: float, *, give_up: Callable[[], bool] = lambda: False
) -> socket.socket:
    """The same on a unix path only, as a bare socket."""

    def once(_deadline: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            raise
        return connection

    return _persistently(once, path, timeout_s, give_up)


def _persistently(
    once: Callable[[float], T], address: str, timeout_s: float, give_up: Callable[[], bool]
) -> T:
    deadline, pause_s = time.monotonic() + timeout_s, _RETRY_S
    while True:
        try:
            return once(deadline)
        except (FileNotFoundError, ConnectionError, BlockingIOError, TimeoutError) as error:
            if give_up() or time.monotonic() >= deadline:
                raise EngineDeadError(f"nobody answers at {address}: {error}") from error
        except (OSError, UnicodeError) as error:  # UnicodeError: a host name that cannot be one
            scarce = isinstance(error, OSError) and is_scarce(error)
            if not scarce or give_up() or time.monotonic() >= deadline:
                raise EngineDeadError(f"cannot connect to {address}: {error}") from error
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_RETRY_S)


def check_address(address: str, key: str) -> None:
    """What no second try mends: an address that is neither a path nor `tcp://host:port`, or no key for TCP.
    Raises `SettingsError`."""
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
_PATIENCE_S = 30.0
"""A verifier that loads its model greets nobody meanwhile."""


class Reconnector:
    """Connections to one address, one after the other. Ask `answer` until it gives the next."""

    def __init__(
        self,
        address: str,
        log: Logger,
        reach: Callable[[str], Channel] | None = None,
        key: str = "",
        longest_pause_s: float = _LONGEST_PAUSE_S,
        limits: ReceiveLimits = DEFAULT_LIMITS,
    ) -> None:
        """`key`: what both ends of a TCP connection know. `reach` connects, or raises after a while."""
        self._longest_pause_s = longest_pause_s
        self.address = address
        self._log = log
        self._reach = reach or (lambda address: connect(address, _PATIENCE_S, key=key, limits=limits))
        self._pause_s = 0.0
        self._thread: threading.Thread | None = None
        self._connected: Channel | None = None
        self._failing = False

    def take(self) -> Channel | None:
        """The next connection, once there is one. Does not wait."""
        if self._thread is None:
            thread = threading.Thread(target=self._dial, name="dial", daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError):  # the system has no thread now: asked again soon
                return None
            self._thread = thread
        if self._thread.is_alive():
            return None
        self._thread = None
        channel, self._connected = self._connected, None
        return channel

    def on_success(self) -> None:
        """The connection serves: when it ends, the next is tried at once."""
        self._pause_s = 0.0

    def on_refusal(self) -> None:
        """The connection is of no use now: the next is tried after the longest pause."""
        self._pause_s = self._longest_pause_s

    def _dial(self) -> None:
        time.sleep(self._pause_s)
        self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), self._longest_pause_s)
        try:
            self._connected = self._reach(self.address)
            self._failing = False
        except SsdError as error:
            if not self._failing:
                self._log.warning("waiting for a verifier", address=self.address, why=str(error))
            self._failing = True
