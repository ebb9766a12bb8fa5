"""HTTP errors with OpenAI's JSON body, and the mapping of other errors to them."""

import math

from fastapi.responses import JSONResponse
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ssd_serve.base.errors import ContextLengthError, EngineDeadError, OverloadedError, RequestError, SsdError

UNION_TAG = "<"
"""First character of union tags, which error messages leave out of field names."""

_MAX_REPORTED = 3
_MAX_NAMED = 256
_MAX_LISTED = 512
"""pydantic makes an object for every error, so above this count only the count is reported."""


class ApiError(SsdError):
    """An HTTP error. `param` names the invalid field."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, object]:
        """Return the JSON body, which clients of OpenAI and of Anthropic understand."""
        return {
            "type": "error",
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            },
        }

    def response(self) -> JSONResponse:
        """Return the error as an HTTP response."""
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400: the request is invalid."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str, retry_after_s: float = 1.0) -> ApiError:
    """Return a 503: the server cannot generate now."""
    headers = {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
    return ApiError(503, message, kind="server_error", code=code, headers=headers)


def internal(message: str = "internal error; see the server's log") -> ApiError:
    """Return a 500."""
    return ApiError(500, message, kind="server_error", code="internal_error")


def from_ssd_error(error: SsdError) -> ApiError:
    """Return the HTTP error for an error of this project."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        code = "context_length_exceeded" if isinstance(error, ContextLengthError) else "invalid_value"
        return bad_request(str(error), error.field or None, code)
    if isinstance(error, OverloadedError):
        headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        return ApiError(429, str(error), kind="rate_limit_error", code="queue_full", headers=headers)
    if isinstance(error, EngineDeadError):
        return unavailable(str(error), "engine_dead", 10)
    return internal()


def from_validation(error: ValidationError) -> ApiError:
    """Return the 400 that names the invalid fields of a body."""
    count = error.error_count()
    if count > _MAX_LISTED:
        return bad_request(
            f"{count} fields or values are invalid; a body with fewer errors gets their names",
            None,
            "invalid_value",
        )
    details = error.errors(include_url=False, include_context=False, include_input=False)
    first = details[0]
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not JSON: {first['msg']}", code="invalid_json")
    sentences = [_sentence(detail) for detail in details[:_MAX_REPORTED]]
    if len(details) > _MAX_REPORTED:
        sentences.append(f"and {len(details) - _MAX_REPORTED} more")
    codes = {"extra_forbidden": "unknown_field", "missing": "missing_field", "not_built": "not_built"}
    return bad_request("; ".join(sentences), _path(first) or None, codes.get(first["type"], "invalid_value"))


def _path(detail: ErrorDetails) -> str:
    """Return a path such as `messages.0.content`, without union tags and cut to `_MAX_NAMED` characters."""
    path = ".".join(str(part) for part in detail["loc"] if not str(part).startswith((UNION_TAG, "[")))
    return path[:_MAX_NAMED]


def _sentence(detail: ErrorDetails) -> str:
    path = _path(detail) or "body"
    if detail["type"] == "extra_forbidden":
        return f"{path}: unknown field"
    return f"{path}: {detail['msg'][:1].lower()}{detail['msg'][1:]}"
