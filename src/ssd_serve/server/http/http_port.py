"""The HTTP port: bound before anything is loaded. Says clearly why it cannot be had. Knows no HTTP."""

import errno
import ipaddress
import socket
import sys

from ssd_serve.base.errors import PermissionProblemError, PortInUseError, SettingsError
from ssd_serve.base.settings import Settings
from ssd_serve.base.settings_sources import flag_name, variable_name

_BACKLOG = 512
_PATIENCE_S = 120.0
"""A client that takes nothing for so long is cut off: its machine is gone, or it does not read."""


def listen_all(settings: Settings) -> list[socket.socket]:
    """The ports of a server, its own first."""
    if settings.port and settings.metrics_port == settings.port:
        raise SettingsError(f"SSD_METRICS_PORT and SSD_PORT are both {settings.port}: they must differ")
    socks = [listen(settings.host, settings.port)]
    try:
        if settings.metrics_port is not None:
            socks.append(listen(settings.host, settings.metrics_port, setting="metrics_port"))
    except BaseException:
        socks[0].close()
        raise
    return socks


def listen(host: str, port: int, patience_s: float = _PATIENCE_S, setting: str = "port") -> socket.socket:
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
        raise _explained(error, host, port, setting) from error
    return server


def listens_alone(sock: socket.socket) -> bool:
    """Whether only this machine can reach it."""
    return ipaddress.ip_address(sock.getsockname()[0]).is_loopback


def _explained(error: OSError, host: str, port: int, setting: str) -> Exception:
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(
            f"port {port} on {host} is taken by another process: stop it, or choose another port with "
            f"{flag_name(setting)} or {variable_name(setting)}{' (0 takes a free one)' * (setting == 'port')}"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return PermissionProblemError(f"this user may not listen on port {port}: choose one from 1024 up")
    if error.errno == errno.EADDRNOTAVAIL:
        return SettingsError(f"{host} is not an address of this machine; see SSD_HOST")
    return SettingsError(f"cannot listen on {host}:{port}: {error.strerror}")
