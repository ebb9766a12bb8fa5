"""The HTTP port before the HTTP server runs: bound at once, answering 503 while everything is loaded.

Says clearly why a port cannot be had. Knows just enough HTTP to say "not yet".
"""

import contextlib
import errno
import json
import select
import socket
import ssl
import sys
import threading

from ssd_serve.errors import PermissionProblemError, PortInUseError, SettingsError

_BACKLOG = 512
_LOOK_EVERY_S = 0.1
_SLOWEST_CLIENT_S = 0.5
_LARGEST_HEAD = 65536
_PATIENCE_S = 120.0
"""A client that takes nothing for so long is cut off: its machine is gone, or it does not read."""


def listen(host: str, port: int, patience_s: float = _PATIENCE_S) -> socket.socket:
    """A listening TCP socket. Listening at once keeps the port from being taken while models load.

    Where the system can do it (Linux), it cuts off clients that take nothing for `patience_s`.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise SettingsError(f"the host '{host}' is no address: {error.strerror}; see SSD_HOST") from error
    server = socket.socket(family, kind, protocol)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "linux":  # connections inherit it
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1e3 * patience_s))
        server.bind(address)
        server.listen(_BACKLOG)
    except OSError as error:
        server.close()
        raise _explained(error, host, port) from error
    return server


def _explained(error: OSError, host: str, port: int) -> Exception:
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(
            f"port {port} on {host} is taken by another process: stop it, or choose another port with "
            f"--port or SSD_PORT (0 takes a free one)"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return PermissionProblemError(f"this user may not listen on port {port}: choose one from 1024 up")
    if error.errno == errno.EADDRNOTAVAIL:
        return SettingsError(f"{host} is not an address of this machine; see SSD_HOST")
    return SettingsError(f"cannot listen on {host}:{port}: {error.strerror}")


class NotYet:
    """Answers every request with 503 from a thread until `stop`; then the socket is the HTTP server's.

    `tls`: what it takes to speak HTTPS; None for HTTP.
    """

    def __init__(self, sock: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        self._socket = sock
        self._tls = tls
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="not-yet", daemon=True)

    def __enter__(self) -> "NotYet":
        self._socket.setblocking(False)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop answering. A second call changes nothing."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            readable, _, _ = select.select([self._socket], [], [], _LOOK_EVERY_S)
            if readable:
                with contextlib.suppress(OSError):
                    connection, _ = self._socket.accept()
                    with connection:
                        self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_SLOWEST_CLIENT_S)
        if self._tls is None:
            _say_not_yet(connection)
            return
        with self._tls.wrap_socket(connection, server_side=True) as encrypted:
            _say_not_yet(encrypted)


def _say_not_yet(connection: socket.socket) -> None:
    """Read the request's head, answer, and let the client close: closing first could cut off the answer."""
    head = b""
    while b"\r\n\r\n" not in head and len(head) < _LARGEST_HEAD:
        data = connection.recv(4096)
        if not data:
            return
        head += data
    connection.sendall(_not_yet())
    if isinstance(connection, ssl.SSLSocket):
        connection = connection.unwrap()
    connection.shutdown(socket.SHUT_WR)
    while connection.recv(4096):
        pass


def _not_yet() -> bytes:
    error = {"message": "loading: starting", "type": "server_error", "param": None, "code": "loading"}
    body = json.dumps({"error": error}).encode()
    return (
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 2\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    ) + body
