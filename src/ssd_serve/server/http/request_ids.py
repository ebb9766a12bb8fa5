"""The name of each request: the client's own or a fresh one, told in every answer to it. Knows no routes."""

import logging
import re
import uuid
from contextvars import ContextVar

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ssd_serve.server.errors import internal

logger = logging.getLogger(__name__)

HEADER = "X-Request-Id"
NAME = r"[\x21-\x7e]{1,128}"
"""What a client may call a request."""
_CURRENT: ContextVar[str] = ContextVar("request")


def named_in_logs(name: str) -> None:
    """Lines that are logged for the request, from now on, tell this name."""
    _CURRENT.set(name)


def request_in_logs() -> dict[str, object]:
    """The name of the request that a line is logged for, if it is for one."""
    name = _CURRENT.get("")
    return {"request": name} if name else {}


class RequestIds:
    """ASGI middleware: names requests, and answers 500 where an error would leave without one of our answers.

    Inside of it every error has an answer that other middleware can still add headers to.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its name, and the answer back with it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        name = given if re.fullmatch(NAME, given) else uuid.uuid4().hex
        scope.setdefault("state", {}).update(request_name=name, named_by_client=name == given)
        named_in_logs(name)
        begun = False

        async def send_named(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                if logger.isEnabledFor(logging.DEBUG):
                    told = {"method": scope["method"], "path": scope["path"], "status": message["status"]}
                    logger.debug("answered", extra={"fields": {**told, **_holder(scope)}})
                MutableHeaders(scope=message).setdefault(HEADER, name)
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except Exception:
            if begun:
                raise
            logger.exception("a request failed", extra={"fields": _holder(scope)})
            await internal().response()(scope, receive, send_named)


def _holder(scope: Scope) -> dict[str, str]:
    """Whose request it is, once that is known."""
    holder = getattr(scope["state"].get("tenant"), "name", "")
    return {"key": holder} if holder else {}


def request_name(request: Request, asked: str | None) -> str:
    """The name by the header, else the one `asked` for in the body, else the fresh one."""
    fresh = str(request.state.request_name)
    return fresh if request.state.named_by_client or asked is None else asked
