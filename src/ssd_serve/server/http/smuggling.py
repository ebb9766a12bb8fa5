"""Refuses requests that a proxy in front may read otherwise: what it takes for a body could be answered as a
request of its own (request smuggling, RFC 9112, sections 6.1 and 11.2)."""

from starlette.types import ASGIApp, Receive, Scope, Send

from ssd_serve.server.errors import bad_request

_SPOKEN = frozenset({"1.0", "1.1"})


class OneMeaning:
    """ASGI middleware: 400, and the end of the connection, for requests of two lengths or of another HTTP."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through or answer it."""
        message = _trouble(scope) if scope["type"] == "http" else None
        if message is None:
            await self._app(scope, receive, send)
            return
        response = bad_request(message, code="ambiguous_request").response()
        response.headers["connection"] = "close"
        await response(scope, receive, send)


def _trouble(scope: Scope) -> str | None:
    if scope["http_version"] not in _SPOKEN:
        return f"HTTP/{scope['http_version']} is not spoken here; use HTTP/1.1"
    names = {name for name, _ in scope["headers"]}
    if {b"content-length", b"transfer-encoding"} <= names:
        return "send either Content-Length or Transfer-Encoding, not both"
    return None
