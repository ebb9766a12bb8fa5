"""Reads JSON bodies into pydantic models: bounded in size, time and sum, strict about types.

Knows nothing about what the models mean. FastAPI's own body parsing is not used, because it buffers without
a bound and coerces types.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request

from ssd_serve.base.messages import Ready
from ssd_serve.server.bodies.parsing import TokenNumbers, parse
from ssd_serve.server.bodies.uploads import Upload, Uploads, no_room
from ssd_serve.server.errors import ApiError
from ssd_serve.server.http.off_loop import OffLoop
from ssd_serve.server.http.streaming import while_connected
from ssd_serve.server.limits import Limits
from ssd_serve.server.openai.envelope import Envelope, for_log
from ssd_serve.server.openai.fields import Strict

logger = logging.getLogger(__name__)

Body = TypeVar("Body", bound=Strict)
Result = TypeVar("Result")


class Bodies:
    """All bodies of one server."""

    def __init__(self, limits: Limits, envelope: Envelope) -> None:
        self._limits = limits
        self._envelope = envelope
        self._uploads = Uploads(limits.max_bodies_bytes, limits.inline_body_bytes, limits.body_grace_s)
        # One at once: a call of a parser stops the event loop for as long as it runs.
        self._parsing = OffLoop(limits.inline_body_bytes, at_once=1)
        self._tokens = TokenNumbers.of(0, 0)

    @property
    def held(self) -> int:
        """Bytes of all bodies that take part in the bound of their sum."""
        return self._uploads.held

    async def use(
        self,
        request: Request,
        model: type[Body],
        ready: Ready,
        work: Callable[[Body], Coroutine[Any, Any, Result]],
    ) -> Result:
        """What `work` makes of the validated body, which nothing holds any longer then. Ends with the client:
        whoever closes the connection has no more work done."""
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            # Also keeps web pages from posting here without a CORS preflight.
            raise ApiError(
                415, "send the header 'Content-Type: application/json'", code="unsupported_media_type"
            )
        tokens = self._token_numbers(ready)
        with self._uploads.open() as upload:
            # Popped where it is parsed: nobody holds it beside the body that is made of it.
            received = [await self._receive(request, upload)]

            async def parse_and_work() -> Result:
                body = await self._parsing.run(len(received[0]), read)
                if request.state.ignored:
                    logger.warning("ignored fields of a request: %s", for_log(request.state.ignored))
                return await work(body)

            def read() -> Body:
                body = parse(received.pop(), model, tokens)
                request.state.ignored = self._envelope.ignored(body)
                return body

            return await while_connected(request.receive, parse_and_work())

    def _token_numbers(self, ready: Ready) -> TokenNumbers:
        if self._tokens.context != ready.context or len(self._tokens.numbers) != ready.vocabulary:
            self._tokens = TokenNumbers.of(ready.context, ready.vocabulary)
        return self._tokens

    async def _receive(self, request: Request, upload: Upload) -> bytearray:
        reading = asyncio.ensure_future(self._read_bounded(request, upload))
        upload.reading = reading
        try:
            return await asyncio.wait_for(reading, self._limits.body_timeout_s)
        except asyncio.TimeoutError:
            if upload.waiting:
                raise no_room() from None
            raise ApiError(408, "the request body took too long to arrive", code="timeout") from None
        except asyncio.CancelledError:
            if upload.turned_away:
                raise no_room() from None
            raise
        finally:
            upload.reading = None

    async def _read_bounded(self, request: Request, upload: Upload) -> bytearray:
        most = self._limits.max_body_bytes
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > most:
            raise _too_large(most)
        raw = bytearray()
        async for part in request.stream():
            if len(raw) + len(part) > most:
                raise _too_large(most)
            await self._uploads.take(upload, len(raw) + len(part))
            raw += part
        return raw


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {most} bytes", code="body_too_large")
