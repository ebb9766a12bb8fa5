"""ASGI middleware of every request: root path, request id, and the guard against request smuggling."""

import logging
import re
import uuid
from contextvars import ContextVar

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ssd_serve.server.errors import bad_request, internal

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
REQUEST_ID_PATTERN = r"[\x21-\x7e]{1,128}"
_HTTP_VERSIONS = frozenset({"1.0", "1.1"})
_LOGGED_REQUEST: ContextVar[str] = ContextVar("request")


class RootPath:
    """Sets the root path of the application, whether the proxy in front strips that path or not."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = str(scope["path"])
            whole = path == self._root or path.startswith(f"{self._root}/")
            scope = {**scope, "root_path": self._root, "path": path if whole else self._root + path}
        await self._app(scope, receive, send)


def path_within(scope: Scope) -> str:
    """Return the path of a request below the root path."""
    return str(scope["path"]).removeprefix(str(scope.get("root_path", "")))


class RequestSmugglingGuard:
    """Answers 400 and closes the connection for requests that a proxy in front may parse differently.

    Such a request has both length headers, or another HTTP version: a proxy may then take part of its body
    for a request (RFC 9112, sections 6.1 and 11.2).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = _ambiguity(scope) if scope["type"] == "http" else None
        if message is None:
            await self._app(scope, receive, send)
            return
        response = bad_request(message, code="ambiguous_request").response()
        response.headers["connection"] = "close"
        await response(scope, receive, send)


def _ambiguity(scope: Scope) -> str | None:
    if scope["http_version"] not in _HTTP_VERSIONS:
        return f"HTTP/{scope['http_version']} is not supported; use HTTP/1.1"
    names = {name for name, _ in scope["headers"]}
    if {b"content-length", b"transfer-encoding"} <= names:
        return "send either Content-Length or Transfer-Encoding, not both"
    return None


class RequestIds:
    """Gives each request an id, adds it to the answer, and answers 500 for unhandled errors.

    Middleware outside of this one can therefore add headers to the answer to every error.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        identifier = given if re.fullmatch(REQUEST_ID_PATTERN, given) else uuid.uuid4().hex
        scope.setdefault("state", {}).update(request_id=identifier, id_by_client=identifier == given)
        log_as_request(identifier)
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if logger.isEnabledFor(logging.DEBUG):
                    fields = {"method": scope["method"], "path": scope["path"], "status": message["status"]}
                    logger.debug("answered", extra={"fields": {**fields, **_key_name(scope)}})
                MutableHeaders(scope=message).setdefault(REQUEST_ID_HEADER, identifier)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            if started:
                raise
            logger.exception("a request failed", extra={"fields": _key_name(scope)})
            await internal().response()(scope, receive, send_with_id)


def _key_name(scope: Scope) -> dict[str, str]:
    name = getattr(scope["state"].get("tenant"), "name", "")
    return {"key": name} if name else {}


def request_id(request: Request, in_body: str | None) -> str:
    """Return the id from the header, else the one in the body, else the generated one."""
    generated = str(request.state.request_id)
    return generated if request.state.id_by_client or in_body is None else in_body


def log_as_request(identifier: str) -> None:
    """Put this request id on all later log lines of the current task."""
    _LOGGED_REQUEST.set(identifier)


def request_log_fields() -> dict[str, object]:
    """Return the field `request` of a log line, if the line belongs to a request."""
    identifier = _LOGGED_REQUEST.get("")
    return {"request": identifier} if identifier else {}
