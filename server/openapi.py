"""Puts the request bodies into the OpenAPI document, since the handlers read their bodies themselves."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema


def describe_bodies(app: FastAPI, bodies: dict[str, type[BaseModel]]) -> None:
    """Make `app.openapi()` describe the body of each POST path."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _build(app, bodies)
        return app.openapi_schema

    # This is the way that FastAPI documents for changing the document.
    setattr(app, "openapi", document)  # noqa: B010


def _build(app: FastAPI, bodies: dict[str, type[BaseModel]]) -> dict[str, Any]:
    document: dict[str, Any] = get_openapi(title=app.title, version=app.version, routes=app.routes)
    references, definitions = models_json_schema(
        [(body, "validation") for body in dict.fromkeys(bodies.values())],
        ref_template="#/components/schemas/{model}",
    )
    components: dict[str, Any] = document.setdefault("components", {}).setdefault("schemas", {})
    components.update(definitions["$defs"])
    for path, body in bodies.items():
        document["paths"][path]["post"]["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": references[body, "validation"]}},
        }
    return document
