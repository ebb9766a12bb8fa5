"""Holds every answer of an application against its own OpenAPI document.

Stricter than the document: an object that the document describes may have no other fields.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jsonschema import Draft202012Validator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ssd_serve.server.page import is_page_path

CLIENT_GONE = 499
WITHOUT_OPERATION = {404, 405}
"""Statuses of an unknown path or method."""
PAGE_STATUSES = {200, 304, 307}
"""Of the page, which is no part of the document."""
MAX_EVENTS = 100
"""Events at the start and at the end of a stream that are checked."""


@dataclass
class _Answer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytearray = field(default_factory=bytearray)
    whole: bool = False


class Contract:
    def __init__(self, app: ASGIApp, document: dict[str, Any], root_path: str | None) -> None:
        self._app = app
        self._document = strict(document)
        self._root = root_path or ""
        self.broken: list[str] = []
        self.seen: set[tuple[str, str, int, str]] = set()
        """Path, method, status and content type of every answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer()

        async def listen(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            elif message["type"] == "http.response.body":
                answer.body += message.get("body", b"")
                answer.whole = not message.get("more_body", False)
            await send(message)

        await self._app(scope, receive, listen)
        if not answer.whole or answer.status == CLIENT_GONE:
            return
        if is_page_path(str(scope["path"]).removeprefix(self._root)) and answer.status in PAGE_STATUSES:
            return
        request = f"{scope['method']} {scope['path']}"
        try:
            path = str(scope["path"]).removeprefix(self._root)
            self.broken += (f"{request}: {what}" for what in self._check(scope["method"], path, answer))
        except Exception as error:  # the client in this process would swallow it
            self.broken.append(f"{request}: {error!r}")

    def _check(self, method: str, path: str, answer: _Answer) -> Iterator[str]:
        document = self._document
        template = next((each for each in document["paths"] if _fits(each, path)), None)
        operation = document["paths"].get(template, {}).get(method.lower())
        content_type = answer.headers.get("content-type", "").partition(";")[0]
        if operation is None:
            if method == "OPTIONS" and content_type == "text/plain":
                return  # a browser asks for permission (CORS)
            if answer.status in WITHOUT_OPERATION or answer.status == 401:
                yield from _errors(document, _reference(document, "Error"), json.loads(answer.body))
            else:
                yield f"{answer.status}, and the document has no such operation"
            return
        self.seen.add((str(template), method, answer.status, content_type))
        told = operation["responses"].get(str(answer.status))
        if told is None:
            if answer.status == 404 and b"on this port" in answer.body:
                return  # the port of the metrics is not what the document describes
            yield f"{answer.status} is not in the document"
            return
        told = document["components"]["responses"][told["$ref"].split("/")[-1]] if "$ref" in told else told
        yield from (
            f"{answer.status} without {name}"
            for name, header in told["headers"].items()
            if header.get("required") and name.lower() not in answer.headers
        )
        content = told["content"].get(content_type)
        if content is None:
            yield f"{answer.status} with {content_type}, which is not in the document"
        elif method != "HEAD":
            yield from _check_body(document, content, answer.body)


def _check_body(document: dict[str, Any], content: dict[str, Any], body: bytearray) -> Iterator[str]:
    if "itemSchema" in content:
        schema = content["itemSchema"]["properties"]["data"]["anyOf"][1]["contentSchema"]
        lines = body.decode().splitlines()
        events = [line[6:] for line in lines if line.startswith("data: {")]
        if len(events) > MAX_EVENTS:  # a long stream repeats itself
            events = [*events[: MAX_EVENTS // 2], *events[-MAX_EVENTS // 2 :]]
        yield from _errors(
            document, {"type": "array", "items": schema}, [json.loads(event) for event in events]
        )
    elif content["schema"] != {"type": "string"}:
        yield from _errors(document, content["schema"], json.loads(body))


def _errors(document: dict[str, Any], schema: dict[str, Any], value: Any) -> Iterator[str]:
    whole = {**schema, "components": document["components"]}
    for error in Draft202012Validator(whole).iter_errors(value):
        yield f"{error.json_path}: {error.message[:300]}"


def _reference(document: dict[str, Any], name: str) -> dict[str, Any]:
    assert name in document["components"]["schemas"]
    return {"$ref": f"#/components/schemas/{name}"}


def _fits(template: str, path: str) -> bool:
    before, parameter, _ = template.partition("{")
    return path.startswith(before) if parameter else path == template


def strict(document: dict[str, Any]) -> dict[str, Any]:
    schemas: dict[str, Any] = document["components"]["schemas"]
    closed = {
        name: {"additionalProperties": False, **schema} if "properties" in schema else schema
        for name, schema in schemas.items()
    }
    return {**document, "components": {**document["components"], "schemas": closed}}
