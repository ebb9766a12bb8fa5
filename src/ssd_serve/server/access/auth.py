"""Access to the server: host names, API keys, rate limits and /metrics, and warnings about exposing settings.

Browsers send the host name of the page. Without the check of host names, a web page with a name that resolves to
this machine (DNS rebinding) could use a server on loopback that needs no key.
"""

import ipaddress
from collections.abc import Collection

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ssd_serve.base.settings import Settings
from ssd_serve.server.access.keys import OPERATOR, Holder, Keyring, KnownKey
from ssd_serve.server.access.tenants import Tenant, Tenants
from ssd_serve.server.errors import ApiError
from ssd_serve.server.http.middleware import path_within
from ssd_serve.server.page import is_page_path

OPEN_PATHS = frozenset({"/health", "/ping"})
METRICS_PATH = "/metrics"
_MAX_SHOWN = 255


class AuthMiddleware:
    """ASGI middleware: 401 without a known key, 429 above a limit, before the body is read.

    If `metrics_key` is set, /metrics accepts no other key. If `metrics_port` is set, only that port has
    /metrics, and apart from health checks it has nothing else.
    """

    def __init__(
        self, app: ASGIApp, tenants: Tenants, metrics_key: str | None = None, metrics_port: int | None = None
    ) -> None:
        self._app = app
        self._tenants = tenants
        own = None if metrics_key is None else Keyring([KnownKey(metrics_key, Holder("metrics"))])
        self._metrics_keys = own
        self._metrics_port = metrics_port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            tenant = self._authorize(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = tenant

        async def send_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(tenant.headers())
            await send(message)

        await self._app(scope, receive, send_limits if tenant.headers() else send)

    def _authorize(self, scope: Scope) -> Tenant:
        """Return the tenant of the request. Raises `ApiError` if the request is refused."""
        path, at_metrics_port = path_within(scope), self._at_metrics_port(scope)
        if path in OPEN_PATHS:
            return self._tenants.anonymous
        if at_metrics_port is not None and at_metrics_port != (path == METRICS_PATH):
            raise ApiError(404, f"there is nothing at {path} on this port")
        if is_page_path(path) and scope["method"] in ("GET", "HEAD"):
            return self._tenants.anonymous
        if path == METRICS_PATH:
            self._authorize_metrics(scope, at_metrics_port is not None)
            return self._tenants.anonymous
        tenant = self._tenant(scope)
        if scope["method"] == "POST":
            tenant.begin_request()
        return tenant

    def _at_metrics_port(self, scope: Scope) -> bool | None:
        """True if the request came to SSD_METRICS_PORT; None if that is not set."""
        if self._metrics_port is None:
            return None
        server: tuple[str, int | None] | None = scope.get("server")
        return server is not None and server[1] == self._metrics_port

    def _tenant(self, scope: Scope) -> Tenant:
        if not self._tenants.keys_needed:
            return self._tenants.anonymous
        tenant = self._tenants.find(_bearer(scope))
        if tenant is None:
            self._tenants.unknown_keys += 1
            raise _unknown_key("this server needs an API key: send the header 'Authorization: Bearer <key>'")
        return tenant

    def _authorize_metrics(self, scope: Scope, own_port: bool) -> None:
        if self._metrics_keys is not None:
            if self._metrics_keys.holder(_bearer(scope)) is None:
                raise _unknown_key("the metrics need SSD_METRICS_KEY: send 'Authorization: Bearer <key>'")
        elif not own_port and self._tenants.keys_needed and self._tenant(scope).name != OPERATOR:
            raise ApiError(
                403,
                "the metrics show all keys: they need SSD_METRICS_KEY, SSD_METRICS_PORT or SSD_API_KEY",
                code="metrics_key_needed",
            )


def _bearer(scope: Scope) -> bytes:
    """Return the key of a request, or nothing. Anthropic's clients send it in `x-api-key`."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    given = {name: value for name, value in reversed(headers) if name in (b"authorization", b"x-api-key")}
    scheme, _, token = given.get(b"authorization", b"").partition(b" ")
    return token if scheme.lower() == b"bearer" else given.get(b"x-api-key", b"")


def _unknown_key(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def tenant_of(request: Request) -> Tenant:
    """Return the tenant that sent this request."""
    tenant: Tenant = request.state.tenant
    return tenant


def allowed_hosts(settings: Settings, loopback: bool) -> frozenset[str] | None:
    """Return the names that are allowed in addition to loopback's; None: any. `loopback`: the address is local."""
    if settings.allowed_hosts is not None:
        named = frozenset(settings.allowed_hosts.split(","))
        return None if "*" in named else named
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
