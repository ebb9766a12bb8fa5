"""Where channels begin: listening on a unix path or on loopback, and connecting to either.

An address is a text that fits in a command line: a path, or `tcp://127.0.0.1:4711`. Knows no messages.
"""

import os
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path

from ssd_serve.cluster.channel import SocketChannel
from ssd_serve.errors import EngineDeadError, PermissionProblemError, SettingsError

_TCP = "tcp://"
_RETRY_S = 0.02
_LONGEST_UNIX_PATH = 100
"""The kernel's limit is 107 bytes on Linux and 103 on macOS."""


class Listener:
    """Accepts channels. Only this user can connect: the socket file is 0600 in a folder of its own."""

    def __init__(self, server: socket.socket, address: str) -> None:
        server.setblocking(False)
        self._socket = server
        self.address = address

    @classmethod
    def unix(cls, path: str | Path) -> "Listener":
        """Listen on a socket file, replacing what a dead process left there."""
        text = str(path)
        if len(os.fsencode(text)) > _LONGEST_UNIX_PATH:
            raise SettingsError(f"the socket path {text} is too long; choose a shorter SSD_RUN_DIR")
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
    def loopback(cls, port: int = 0) -> "Listener":
        """Listen on a TCP port of this machine alone; 0 takes a free one."""
        server = socket.create_server(("127.0.0.1", port))
        return cls(server, f"{_TCP}127.0.0.1:{server.getsockname()[1]}")

    @property
    def pending(self) -> int:
        """A listener sends nothing."""
        return 0

    def accept(self) -> SocketChannel | None:
        """The next peer that connected, or None."""
        connection = self.accept_socket()
        return None if connection is None else SocketChannel(connection)

    def accept_socket(self) -> socket.socket | None:
        """The same, for peers that do not speak in messages."""
        try:
            return self._socket.accept()[0]
        except (BlockingIOError, ConnectionAbortedError):
            return None

    def wait(self, timeout_s: float) -> bool:
        """Wait until somebody wants to connect."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    def fileno(self) -> int:
        """File descriptor to wait on."""
        return self._socket.fileno()

    def close(self) -> None:
        """Stop listening and remove the socket file."""
        self._socket.close()
        if not self.address.startswith(_TCP):
            Path(self.address).unlink(missing_ok=True)


def connect(
    address: str, timeout_s: float = 10.0, *, give_up: Callable[[], bool] = lambda: False
) -> SocketChannel:
    """Connect to a listener, trying again until it is there.

    `give_up` is asked between tries: True when the peer will never come. Raises `EngineDeadError`.
    """
    return SocketChannel(connect_socket(address, timeout_s, give_up=give_up))


def connect_socket(
    address: str, timeout_s: float, *, give_up: Callable[[], bool] = lambda: False
) -> socket.socket:
    """The same as a bare socket."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _connect_once(address)
        except (FileNotFoundError, ConnectionError, BlockingIOError) as error:
            if give_up() or time.monotonic() >= deadline:
                raise EngineDeadError(f"nobody answers at {address}: {error}") from error
        except OSError as error:
            raise EngineDeadError(f"cannot connect to {address}: {error}") from error
        time.sleep(_RETRY_S)


def _connect_once(address: str) -> socket.socket:
    if address.startswith(_TCP):
        host, _, port = address.removeprefix(_TCP).rpartition(":")
        return socket.create_connection((host, int(port)), timeout=5.0)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection
