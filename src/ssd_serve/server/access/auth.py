"""API-key authentication, rate limits, and access to /metrics."""

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ssd_serve.server.access.keys import OPERATOR, Holder, Keyring, KnownKey
from ssd_serve.server.access.tenants import Tenant, Tenants
from ssd_serve.server.errors import ApiError
from ssd_serve.server.http.middleware import path_within

OPEN_PATHS = frozenset({"/health", "/ping"})
METRICS_PATH = "/metrics"


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
