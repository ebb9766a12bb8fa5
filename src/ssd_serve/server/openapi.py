"""The OpenAPI document: bodies, statuses and content types of every path, in one table.

Models describe bodies and responses. Rules that depend on the loaded model (vocabulary, context) are
described in words, with status 400.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, TypeAdapter

from ssd_serve.server import information
from ssd_serve.server.access.auth import METRICS_PATH
from ssd_serve.server.access.tenants import RATE_HEADERS
from ssd_serve.server.anthropic import CountRequest, MessagesRequest
from ssd_serve.server.http.middleware import REQUEST_ID_HEADER
from ssd_serve.server.openai import protocol
from ssd_serve.server.openai import response_models as answers
from ssd_serve.server.openai.responses_protocol import ResponsesRequest
from ssd_serve.server.openai.unknown_fields import IGNORED_HEADER

Schema = dict[str, Any]

JSON = "application/json"
EVENTS = "text/event-stream"
PLAIN = "text/plain"
_SCHEME = "key"
_REFERENCE = "#/components/schemas/{model}"
_PUBLISHED_NAMES = {"SpeculationOptions": "SpeculationWish", "DecisionReason": "Why"}
"""Published schema names of renamed classes: clients are generated from the document."""

_PROBLEMS = {
    400: "The body is not JSON or breaks a rule; `param` names the field. Rules beyond the schemas: token "
    "ids are below the model's vocabulary; prompt and output fit its context; prompts are not empty; "
    "texts have no lone surrogates; `min_tokens` is at most `max_tokens`; prompts x `n` are no more than "
    "one request may have; `best_of` is `n`; two names of one field do not differ; `bad_words` and "
    "`min_tokens` leave some of `allowed_token_ids`; `generated_token_ids` has one list for each choice; "
    "the model's chat template accepts the messages, and keeps the last one where it is continued; a "
    "message of a user or a system has `content`; a message of a tool names its call; the "
    "model's format of tool calls is known; log-probabilities of a prompt are requested once, and not "
    "streamed. An unknown field gives 400 where its name is close to a known one, or where the server "
    "is strict. `/v1/responses` and `/v1/messages` have one choice (`n`).",
    401: "The key is missing or wrong.",
    403: "Metrics cover all keys: only the operator's key may read them.",
    404: "The model is not served here.",
    408: "The body took too long to arrive.",
    413: "The body is larger than the server reads, or has more values.",
    415: "The content type is not application/json.",
    421: "The host name is not allowed; the operator can allow it.",
    429: "The queue is full, or the key has used up what it may ask for in a minute.",
    500: "A fault of the server, or of its engine.",
    503: "No token can be generated now; `code` says why: loading, restarting, shutting down, dead, or "
    "all connections are busy, or there is no memory for another body.",
}
_RETRY: Schema = {
    "Retry-After": {
        "required": True,
        "description": "seconds after which to try again",
        "schema": {"type": "integer", "minimum": 1},
    }
}
_LIMITS: Schema = {
    name: {"description": "where there are limits a minute", "schema": {"type": "string"}}
    for name in RATE_HEADERS
}
_HEADERS: dict[int, Schema] = {
    401: {"WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}}},
    429: {**_RETRY, **_LIMITS},
    503: _RETRY,
}
_IGNORED: Schema = {
    IGNORED_HEADER: {
        "description": "fields of the request that are not known here and changed nothing, with commas",
        "schema": {"type": "string"},
    }
}
_NAME_HEADER: Schema = {
    "required": True,
    "description": "the request's name: the one that was given, or a fresh one",
    "schema": {"type": "string", "minLength": 1},
}
_NAME_PARAMETER: Schema = {
    "name": REQUEST_ID_HEADER,
    "in": "header",
    "description": "a name for this request: up to 128 visible characters of ASCII; others are ignored",
    "schema": {"type": "string"},
}
_MODEL_PARAMETER: Schema = {
    "name": "name",
    "in": "path",
    "required": True,
    "description": "a model's id; it may hold slashes",
    "schema": {"type": "string", "minLength": 1},
}


@dataclass(frozen=True, slots=True)
class Operation:
    """A path of the API. `answer` is the type of its response, or the content type of a text."""

    summary: str
    answer: type | str
    problems: Sequence[int] = ()
    """Statuses besides those of every path: 421, 500, 503, and 401 where a key is required."""
    body: type[BaseModel] | None = None
    example: Mapping[str, object] | None = None
    chunk: type | None = None
    """Type of an event of the stream."""
    open: bool = False
    """True where no key is required."""
    methods: Sequence[str] = ("get", "head")
    parameters: Sequence[Schema] = ()
    links: Schema = field(default_factory=dict[str, Any])
    """OpenAPI links of a success."""


def _post(
    summary: str,
    answer: type,
    body: type[BaseModel],
    example: Mapping[str, object],
    chunk: type | None = None,
    links: Schema | None = None,
) -> Operation:
    problems = (400, 404, 408, 413, 415, 429)
    return Operation(summary, answer, problems, body, example, chunk, methods=("post",), links=links or {})


_ASK = [{"role": "user", "content": "What is speculative decoding?"}]
_CARD_LINK = {"operationId": "get_v1_models_name", "parameters": {"name": "$response.body#/data/0/id"}}
_TEXT_LINK = {"operationId": "post_detokenize", "requestBody": {"tokens": "$response.body#/tokens"}}
OPERATIONS: dict[str, Operation] = {
    "/health": Operation("can a token be generated now?", information.Health, open=True),
    "/ping": Operation("the same as /health", information.Health, open=True, methods=("get", "head", "post")),
    "/v1/models": Operation("the served model", information.ModelList, links={"card": _CARD_LINK}),
    "/v1/models/{name}": Operation(
        "one model", information.ModelCard, (404,), parameters=(_MODEL_PARAMETER,)
    ),
    "/version": Operation("the version of the package", information.Version),
    "/load": Operation("requests in flight, and why it speculates or not", information.Load),
    "/server_info": Operation("what serves, on what, and how it is set", information.ServerInfo),
    METRICS_PATH: Operation("figures for Prometheus", PLAIN),
    "/openapi.json": Operation("this document", dict),
    "/v1/completions": _post(
        "go on with a text",
        answers.Completion,
        protocol.CompletionRequest,
        {"prompt": "Once upon a time", "max_tokens": 16},
        answers.CompletionChunk,
    ),
    "/v1/chat/completions": _post(
        "answer in a conversation",
        answers.ChatCompletion,
        protocol.ChatRequest,
        {"messages": _ASK, "max_tokens": 16, "stream": True},
        answers.ChatChunk,
    ),
    "/v1/responses": _post(
        "answer in a conversation, as OpenAI's newer API does; nothing is kept",
        answers.Answered,
        ResponsesRequest,
        {"input": "What is speculative decoding?", "max_output_tokens": 16},
        answers.ResponseEvent,
    ),
    "/v1/messages": _post(
        "answer in a conversation, as Anthropic's API does",
        answers.AnsweredMessage,
        MessagesRequest,
        {"messages": _ASK, "max_tokens": 16},
        answers.MessageEvent,
    ),
    "/v1/messages/count_tokens": _post(
        "how many tokens a conversation has", answers.CountedTokens, CountRequest, {"messages": _ASK}
    ),
    "/tokenize": _post(
        "the token ids of a text or a conversation",
        answers.Tokens,
        protocol.TokenizeRequest,
        {"prompt": "Once upon a time"},
        links={"text": _TEXT_LINK},
    ),
    "/detokenize": _post(
        "the text of token ids", answers.Text, protocol.DetokenizeRequest, {"tokens": [1, 2, 3]}
    ),
}


@dataclass(frozen=True, slots=True)
class SecuritySchemes:
    """Paths that require a key: all but the open ones, or only the metrics."""

    keyed: bool = False
    metrics_keyed: bool = False

    def locks(self, path: str, operation: Operation) -> bool:
        """True where a path requires a key."""
        return not operation.open and (self.keyed or (self.metrics_keyed and path == METRICS_PATH))

    def problems(self, path: str, operation: Operation) -> list[int]:
        """Return all statuses of a path besides 200."""
        locked = self.locks(path, operation)
        only_for_some = locked and path == METRICS_PATH
        anywhere = (421, 500, 503, *((401,) if locked else ()), *((403,) if only_for_some else ()))
        return sorted({*operation.problems, *anywhere})


def describe(app: FastAPI, schemes: SecuritySchemes) -> None:
    """Make `app.openapi()` return this document."""

    def document() -> Schema:
        if app.openapi_schema is None:
            app.openapi_schema = build_document(app.title, app.version, schemes)
        return app.openapi_schema

    # FastAPI documents this way of changing the document.
    setattr(app, "openapi", document)  # noqa: B010


def build_document(title: str, version: str, schemes: SecuritySchemes) -> Schema:
    """Return the OpenAPI document of all routes."""
    schemas, references = _schemas()
    components: Schema = {
        "schemas": schemas,
        "responses": {str(status): _problem(status, references[answers.Error]) for status in _PROBLEMS},
    }
    if schemes.keyed or schemes.metrics_keyed:
        components["securitySchemes"] = {_SCHEME: {"type": "http", "scheme": "bearer"}}
    paths = {
        path: {method: _operation(path, method, each, references, schemes) for method in each.methods}
        for path, each in OPERATIONS.items()
    }
    info = {"title": title, "version": version}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


@cache
def _schemas() -> tuple[Schema, dict[type, Schema]]:
    """Return the schemas of all models, and a reference to each; they take long to make."""
    bodies = [each.body for each in OPERATIONS.values() if each.body is not None]
    kinds: list[type] = [answers.Error]
    for each in OPERATIONS.values():
        kinds += [one for one in (each.answer, each.chunk) if isinstance(one, type) and one is not dict]
    found, shared = TypeAdapter.json_schemas(
        [
            *((body, "validation", TypeAdapter(body)) for body in bodies),
            *((one, "serialization", TypeAdapter(one)) for one in dict.fromkeys(kinds)),
        ],
        ref_template=_REFERENCE,
    )
    return _published(shared["$defs"]), {kind: _published(schema) for (kind, _), schema in found.items()}


def _published(schema: Schema) -> Schema:
    text = json.dumps(schema)
    for name, published in _PUBLISHED_NAMES.items():
        text = re.sub(rf'"(#/components/schemas/)?{name}"', rf'"\g<1>{published}"', text)
    found: Schema = json.loads(text)
    return found


def _operation(
    path: str, method: str, operation: Operation, references: Mapping[type, Schema], schemes: SecuritySchemes
) -> Schema:
    entry: Schema = {
        "summary": operation.summary,
        "operationId": method + re.sub(r"\W+", "_", path).rstrip("_"),
        "parameters": [*operation.parameters, _NAME_PARAMETER],
        "responses": {
            "200": {
                "description": "Success.",
                "headers": {
                    REQUEST_ID_HEADER: _NAME_HEADER,
                    **({**_LIMITS, **_IGNORED} if operation.body else {}),
                },
                "content": _content(operation, references),
                **({"links": operation.links} if operation.links and method != "head" else {}),
            },
            **{
                str(each): {"$ref": f"#/components/responses/{each}"}
                for each in schemes.problems(path, operation)
            },
        },
    }
    if operation.body is not None:
        content: Schema = {"schema": references[operation.body], "example": operation.example}
        entry["requestBody"] = {"required": True, "content": {JSON: content}}
    if schemes.locks(path, operation):
        entry["security"] = [{_SCHEME: []}]
    return entry


def _content(operation: Operation, references: Mapping[type, Schema]) -> Schema:
    if isinstance(operation.answer, str):
        return {operation.answer: {"schema": {"type": "string"}}}
    content: Schema = {JSON: {"schema": references.get(operation.answer, {"type": "object"})}}
    if operation.chunk is not None:
        events = {"anyOf": [references[operation.chunk], references[answers.Error]]}
        data: Schema = {
            "type": "string",
            "anyOf": [{"const": "[DONE]"}, {"contentMediaType": JSON, "contentSchema": events}],
        }
        content[EVENTS] = {
            "itemSchema": {"type": "object", "properties": {"data": data}, "required": ["data"]}
        }
    return content


def _problem(status: int, error: Schema) -> Schema:
    return {
        "description": f"{HTTPStatus(status).phrase}. {_PROBLEMS[status]}",
        "headers": {REQUEST_ID_HEADER: _NAME_HEADER, **_HEADERS.get(status, {})},
        "content": {JSON: {"schema": error}},
    }
