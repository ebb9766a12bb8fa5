"""Optional bearer token for every path but those that say whether the server lives. Knows no routes."""

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from ssd_serve.server.errors import ApiError
from ssd_serve.server.root_path import path_within

OPEN_PATHS = frozenset({"/health", "/ping"})


class BearerAuth:
    """ASGI middleware: 401 unless `Authorization: Bearer <key>` is right; compared in constant time."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through or answer it."""
        if scope["type"] != "http" or path_within(scope) in OPEN_PATHS or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "this server wants an API key: send the header 'Authorization: Bearer <key>'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, token = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._expected)
