"""Reads JSON request bodies into pydantic models, with bounds on size, time and total memory.

FastAPI's own body parsing is not used, because it buffers without a bound and coerces types.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from fastapi import Request

from ssd_serve.base.messages import Ready
from ssd_serve.server.errors import ApiError, unavailable
from ssd_serve.server.http.parsing import TokenNumbers, parse
from ssd_serve.server.http.streaming import while_connected
from ssd_serve.server.http.worker_pool import WorkerPool
from ssd_serve.server.limits import Limits
from ssd_serve.server.openai.fields import Strict
from ssd_serve.server.openai.unknown_fields import UnknownFields, for_log

logger = logging.getLogger(__name__)

Body = TypeVar("Body", bound=Strict)
Result = TypeVar("Result")

_CHECK_EVERY_S = 0.25


class Upload:
    """A body, while it arrives (`reading`) and until its memory is released."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self.held = 0
        self.waiting = False
        self.reading: asyncio.Future[bytearray] | None = None
        self.evicted = False


class UploadMemory:
    """Bounds the received bytes of all bodies together. When they reach the bound, slow uploads are evicted.

    Bodies of at most `free` bytes do not count, so small ones never wait.
    """

    def __init__(self, limit: int, free: int, grace_s: float) -> None:
        self._limit = limit
        self._free = free
        self._grace_s = grace_s
        self._uploads: set[Upload] = set()
        self._turn = asyncio.Lock()
        self._released = asyncio.Event()
        self.held = 0

    @contextmanager
    def open(self) -> Generator[Upload, None, None]:
        """Hold the memory of a body until the end of the block."""
        upload = Upload()
        self._uploads.add(upload)
        try:
            yield upload
        finally:
            self._uploads.discard(upload)
            self.held -= upload.held
            self._released.set()

    async def take(self, upload: Upload, received: int) -> None:
        """Count a body of which `received` bytes have arrived. Waits for memory, first come first served."""
        if received <= self._free:
            return
        upload.waiting = True
        async with self._turn:
            more = received - upload.held
            while self.held + more > self._limit:
                self._evict_slow()
                self._released.clear()
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._released.wait(), _CHECK_EVERY_S)
            upload.held += more
            self.held += more
        upload.waiting = False

    def _evict_slow(self) -> None:
        """Cancel the largest of the uploads that still arrive after the grace period."""
        late = time.monotonic() - self._grace_s
        slow = [
            (one.held, one.reading, one) for one in self._uploads if one.reading and one.started_at < late
        ]
        if slow:
            _, reading, upload = max(slow, key=lambda each: each[0])
            upload.evicted = True
            reading.cancel()


class Bodies:
    """Receives, parses and holds the request bodies of one server."""

    def __init__(self, limits: Limits, envelope: UnknownFields) -> None:
        self._limits = limits
        self._envelope = envelope
        self._memory = UploadMemory(limits.max_bodies_bytes, limits.inline_body_bytes, limits.body_grace_s)
        # One thread: a parser holds the GIL for as long as it runs.
        self._parsing = WorkerPool(limits.inline_body_bytes, threads=1)
        self._tokens = TokenNumbers.of(0, 0)

    @property
    def held(self) -> int:
        """Bytes of all bodies that count towards the bound."""
        return self._memory.held

    async def use(
        self,
        request: Request,
        model: type[Body],
        ready: Ready,
        work: Callable[[Body], Coroutine[Any, Any, Result]],
    ) -> Result:
        """Return `work(body)` for the validated body. `work` is cancelled if the client disconnects."""
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            # Also keeps web pages from posting here without a CORS preflight.
            raise ApiError(
                415, "send the header 'Content-Type: application/json'", code="unsupported_media_type"
            )
        tokens = self._token_numbers(ready)
        with self._memory.open() as upload:
            # Parsing pops the bytes, so that they are not held together with the body made of them.
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
                raise _memory_full() from None
            raise ApiError(408, "the request body took too long to arrive", code="timeout") from None
        except asyncio.CancelledError:
            if upload.evicted:
                raise _memory_full() from None
            raise
        finally:
            upload.reading = None

    async def _read_bounded(self, request: Request, upload: Upload) -> bytearray:
        limit = self._limits.max_body_bytes
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > limit:
            raise _too_large(limit)
        raw = bytearray()
        async for part in request.stream():
            if len(raw) + len(part) > limit:
                raise _too_large(limit)
            await self._memory.take(upload, len(raw) + len(part))
            raw += part
        return raw


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {limit} bytes", code="body_too_large")


def _memory_full() -> ApiError:
    """503: the upload was too slow while others needed its memory, or found none."""
    return unavailable("the server holds as many request bodies as it may; send it again", "bodies_full")
