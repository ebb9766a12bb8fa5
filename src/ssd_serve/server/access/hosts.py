"""The check of host names, and warnings about settings that expose the server.

Browsers send the host name of the page. Without this check, a web page with a name that resolves to this machine
(DNS rebinding) could use a server on loopback that needs no key.
"""

import ipaddress
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from ssd_serve.base.settings import Settings
from ssd_serve.server.errors import ApiError

ANY = "*"
_MAX_SHOWN = 255


def allowed_hosts(settings: Settings, loopback: bool) -> frozenset[str] | None:
    """Return the names that are allowed in addition to loopback's; None: any. `loopback`: the address is local."""
    if settings.allowed_hosts is not None:
        named = frozenset(settings.allowed_hosts.split(","))
        return None if ANY in named else named
    has_keys = settings.api_key is not None or settings.api_keys_file is not None
    return frozenset() if loopback and not has_keys else None


class AllowedHosts:
    """ASGI middleware: 421 for requests to other names. A client that sends no name is not a browser."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = next((value for name, value in scope["headers"] if name == b"host"), b"")
            host = host_name(given.decode("latin-1"))
            if host and host not in self._allowed and not _is_loopback(host):
                message = (
                    f"this server is not called {host[:_MAX_SHOWN]!r}: "
                    "name it in SSD_ALLOWED_HOSTS (with commas between, * for any)"
                )
                await ApiError(421, message, code="host_not_allowed").response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def host_name(header: str) -> str:
    """Return the host of a Host header, without port and brackets, in lower case."""
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


def exposure_warnings(settings: Settings, loopback: bool) -> list[str]:
    """Return log lines about access without a key. `loopback`: only this machine reaches the address."""
    if loopback:
        return []
    found: list[str] = []
    if settings.api_key is None and settings.api_keys_file is None:
        found.append(
            "anyone who reaches this address may use the model; set SSD_API_KEY or SSD_API_KEYS_FILE"
        )
    if settings.metrics_port is not None and settings.metrics_key is None:
        found.append("anyone who reaches SSD_METRICS_PORT may read the metrics; set SSD_METRICS_KEY")
    return found


def metrics_may_show_cached(settings: Settings) -> bool:
    """True if the metrics may count tokens found in the prefix cache.

    Two scrapes around one request on an idle server reveal its cached tokens. So the count is hidden if
    several users share SSD_API_KEY and the metrics have no separate key or port.
    """
    separate = settings.metrics_key is not None or settings.metrics_port is not None
    shared_key = settings.api_key is not None and settings.api_keys_file is None
    return separate or settings.tell_cached_tokens or not shared_key
