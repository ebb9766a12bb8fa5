"""Which names a server may be called by: a web page whose own name leads to this machine is not let in.

Browsers send the name that the page has; what is on loopback only is protected by nothing else without a key.
"""

import ipaddress
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from ssd_serve.server.errors import ApiError
from ssd_serve.base.settings import Settings

ANY = "*"
_LONGEST_NAME = 255


def allowed_hosts(settings: Settings, alone: bool) -> frozenset[str] | None:
    """Names beside those of loopback; None: any. `alone`: only this machine reaches the address."""
    if settings.allowed_hosts is not None:
        named = frozenset(settings.allowed_hosts.split(","))
        return None if ANY in named else named
    has_keys = settings.api_key is not None or settings.api_keys_file is not None
    return frozenset() if alone and not has_keys else None


class AllowedHosts:
    """ASGI middleware: 421 for requests to other names. Who sends no name is no browser."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through or answer it."""
        if scope["type"] == "http":
            given = next((value for name, value in scope["headers"] if name == b"host"), b"")
            host = name_of(given.decode("latin-1"))
            if host and host not in self._allowed and not _is_loopback(host):
                message = (
                    f"this server is not called {host[:_LONGEST_NAME]!r}: "
                    "name it in SSD_ALLOWED_HOSTS (with commas between, * for any)"
                )
                await ApiError(421, message, code="host_not_allowed").response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def name_of(header: str) -> str:
    """The host of a Host header, without port and brackets, in lower case."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].removesuffix(".")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
