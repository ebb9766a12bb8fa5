"""Who may come in: the keys, what each may ask for in a minute, and the metrics' own door.

Knows no routes but `/metrics` and those that say whether the server lives.
"""

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ssd_serve.server.access.keys import OPERATOR, Holder, Keyring, KnownKey
from ssd_serve.server.access.tenants import Tenant, Tenants
from ssd_serve.server.errors import ApiError
from ssd_serve.server.http.root_path import path_within

OPEN_PATHS = frozenset({"/health", "/ping"})
METRICS_PATH = "/metrics"


class Doorkeeper:
    """ASGI middleware: 401 without a key that is known, 429 above a limit, before anything of a body is read.

    Keys are compared in constant time. `metrics_key` opens the metrics, and nothing else does then;
    `metrics_port` is the one port that has them, and nothing else but the health.
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
        """Let the request through or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            tenant = self._admit(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = tenant

        async def send_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(tenant.headers())
            await send(message)

        await self._app(scope, receive, send_limits if tenant.headers() else send)

    def _admit(self, scope: Scope) -> Tenant:
        """Whose request this is. Raises why it may not come in."""
        path, at_metrics_port = path_within(scope), self._at_metrics_port(scope)
        if path in OPEN_PATHS:
            return self._tenants.anonymous
        if at_metrics_port is not None and at_metrics_port != (path == METRICS_PATH):
            raise ApiError(404, f"there is nothing at {path} on this port")
        if path == METRICS_PATH:
            self._open_metrics(scope, at_metrics_port is not None)
            return self._tenants.anonymous
        tenant = self._tenant(scope)
        if scope["method"] == "POST":
            tenant.begin_request()
        return tenant

    def _at_metrics_port(self, scope: Scope) -> bool | None:
        """Whether the request came to the port of the metrics; None where they have none of their own."""
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
            raise _unknown("this server wants an API key: send the header 'Authorization: Bearer <key>'")
        return tenant

    def _open_metrics(self, scope: Scope, own_port: bool) -> None:
        if self._metrics_keys is not None:
            if self._metrics_keys.holder(_bearer(scope)) is None:
                raise _unknown("the metrics want SSD_METRICS_KEY: send 'Authorization: Bearer <key>'")
        elif not own_port and self._tenants.keys_needed and self._tenant(scope).name != OPERATOR:
            raise ApiError(
                403,
                "the metrics tell of all keys: they are for SSD_METRICS_KEY, SSD_METRICS_PORT or SSD_API_KEY",
                code="metrics_key_needed",
            )


def _bearer(scope: Scope) -> bytes:
    """The key of a request, or nothing. Anthropic's clients have a header of their own for it."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    given = {name: value for name, value in reversed(headers) if name in (b"authorization", b"x-api-key")}
    scheme, _, token = given.get(b"authorization", b"").partition(b" ")
    return token if scheme.lower() == b"bearer" else given.get(b"x-api-key", b"")


def _unknown(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def tenant_of(request: Request) -> Tenant:
    """Whose request this is."""
    tenant: Tenant = request.state.tenant
    return tenant
