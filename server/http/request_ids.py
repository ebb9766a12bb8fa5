"""The name of each request: the client's own or a fresh one, told in every answer to it. Knows no routes."""

import logging
import re
import uuid

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ssd_serve.server.errors import internal

logger = logging.getLogger(__name__)

HEADER = "X-Request-Id"
NAME = r"[\x21-\x7e]{1,128}"
"""What a client may call a request."""


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
        begun = False

        async def send_named(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                if logger.isEnabledFor(logging.DEBUG):
                    whose = f"request {name}{_holder(scope)}"
                    logger.debug("%s: %s %r %d", whose, scope["method"], scope["path"], message["status"])
                MutableHeaders(scope=message).setdefault(HEADER, name)
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except Exception:
            if begun:
                raise
            logger.exception("request %s%s failed", name, _holder(scope))
            await internal().response()(scope, receive, send_named)


def _holder(scope: Scope) -> str:
    """Whose request it is, once that is known, as a log says it."""
    holder = getattr(scope["state"].get("tenant"), "name", "")
    return f" of {holder}" if holder else ""


def request_name(request: Request, asked: str | None) -> str:
    """The name by the header, else the one `asked` for in the body, else the fresh one."""
    fresh = str(request.state.request_name)
    return fresh if request.state.named_by_client or asked is None else asked
