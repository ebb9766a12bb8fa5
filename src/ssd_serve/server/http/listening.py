"""The HTTP port and its TLS certificate. The port is bound before anything is loaded."""

import asyncio
import errno
import ipaddress
import socket
import ssl
import sys
from collections.abc import Callable
from pathlib import Path

from ssd_serve.base.errors import PermissionProblemError, PortInUseError, SettingsError
from ssd_serve.base.settings import Settings
from ssd_serve.base.settings_sources import flag_name, variable_name

_CERTIFICATE, _KEY = "SSD_TLS_CERTIFICATE", "SSD_TLS_KEY"
_BACKLOG = 512
"""Connections that the system holds until they are accepted."""
_ACCEPTED_AT_ONCE = 32
"""Connections accepted in a row, before the first of them can close idle ones."""
_RESERVED_DESCRIPTORS = 160
"""Descriptors for everything but clients, and for connections accepted at once."""
_UNACKNOWLEDGED_S = 120.0
"""A client that acknowledges nothing for so long is disconnected."""


def max_connections(settings: Settings, descriptors: int) -> int:
    """Return the connection limit: as set, or 4 times the request capacity, if descriptors allow that."""
    capacity = settings.max_running + settings.max_waiting
    wanted = settings.max_connections or 4 * capacity + 64
    return min(wanted, max(descriptors - _RESERVED_DESCRIPTORS, descriptors // 2))


def listen_all(settings: Settings) -> list[socket.socket]:
    """Listen on the ports of a server, the API's first."""
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


def listen(
    host: str, port: int, unacknowledged_s: float = _UNACKNOWLEDGED_S, setting: str = "port"
) -> socket.socket:
    """Return a listening TCP socket, so that no other process takes the port while models load.

    On Linux the system disconnects clients that acknowledge nothing for `unacknowledged_s`.
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
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1e3 * unacknowledged_s))
        server.bind(address)
        server.listen(_BACKLOG)
    except OSError as error:
        server.close()
        raise _explained(error, host, port, setting) from error
    return server


async def accept_connections(
    make_protocol: Callable[[], asyncio.Protocol], sock: socket.socket
) -> asyncio.Server:
    """Start to accept connections on a listening socket."""
    server = await asyncio.get_running_loop().create_server(
        make_protocol, sock=sock, backlog=_ACCEPTED_AT_ONCE
    )
    # asyncio uses one number for both; a short backlog would refuse clients in a burst.
    sock.listen(_BACKLOG)
    return server


def is_loopback(sock: socket.socket) -> bool:
    """True if only this machine can reach the socket."""
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


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """Return the TLS context of the server's sockets; None if no certificate is set.

    Raises `SettingsError` if one of the two files is unset, missing or invalid, and `PermissionProblemError`
    if this user may not read it.
    """
    certificate, key = settings.tls_certificate, settings.tls_key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        missing, given = (_CERTIFICATE, _KEY) if certificate is None else (_KEY, _CERTIFICATE)
        raise SettingsError(f"{given} alone is not enough for HTTPS: set {missing} too")
    _check_readable(certificate, _CERTIFICATE)
    _check_readable(key, _KEY)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, _refuse_password)
    except ssl.SSLError as error:
        reason = (error.reason or "unknown format").replace("_", " ").lower()
        raise SettingsError(
            f"{certificate} ({_CERTIFICATE}) and {key} ({_KEY}) are not a certificate chain and its key, "
            f"both PEM: {reason}"
        ) from error
    return context


def _check_readable(path: Path, variable: str) -> None:
    try:
        with path.open("rb"):
            pass
    except PermissionError as error:
        raise PermissionProblemError(
            f"{path} ({variable}) cannot be read by this user: change its owner or mode"
        ) from error
    except OSError as error:
        raise SettingsError(f"{path} ({variable}) cannot be read: {error.strerror}") from error


def _refuse_password() -> str:
    raise SettingsError(f"the key of {_KEY} is encrypted: name one that is not, readable by this user only")
