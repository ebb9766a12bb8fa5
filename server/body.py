"""Reads a JSON body into a pydantic model: bounded in size and time, strict about types.

Knows nothing about what the models mean. FastAPI's own body parsing is not used, because it buffers without
a bound and coerces types.
"""

import asyncio
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from ssd_serve.server.errors import ApiError, from_validation
from ssd_serve.server.limits import Limits

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, model: type[Body], limits: Limits) -> Body:
    """Return the validated body, or raise the `ApiError` that says what is wrong with it."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        # Also keeps web pages from posting here without a CORS preflight.
        raise ApiError(415, "send the header 'Content-Type: application/json'", code="unsupported_media_type")
    try:
        raw = await asyncio.wait_for(_read_bounded(request, limits.max_body_bytes), limits.body_timeout_s)
    except asyncio.TimeoutError:
        raise ApiError(408, "the request body took too long to arrive", code="timeout") from None
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error) from None


async def _read_bounded(request: Request, most: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > most:
        raise _too_large(most)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise _too_large(most)
        parts.append(part)
    return b"".join(parts)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {most} bytes", code="body_too_large")
