"""The HTTP port: bound before anything is loaded. Says clearly why it cannot be had. Knows no HTTP."""

import errno
import socket
import sys

from ssd_serve.errors import PermissionProblemError, PortInUseError, SettingsError

_BACKLOG = 512
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
