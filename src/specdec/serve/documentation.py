"""The OpenAPI document: bodies are parsed by ourselves, so they are described by ourselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from specdec.serve.schema import ChatBody, CompletionBody, DetokenizeBody, Strict, TokenizeBody

BODIES: tuple[type[Strict], ...] = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)

_REF = "#/components/schemas/{model}"

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def takes(body: type[Strict], *, streams: bool = False) -> dict[str, Any]:
    """What OpenAPI says of a route with this body."""
    schema = {"$ref": _REF.format(model=body.__name__)}
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    if streams:
        events = {"schema": {"type": "string", "description": "Frames of JSON, the last one [DONE]."}}
        extra["responses"] = {"200": {"description": "The answer", "content": {"text/event-stream": events}}}
    return extra


def describe(app: FastAPI) -> None:
    """Give the application its document, with bodies and errors."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, definitions = models_json_schema([(body, "validation") for body in BODIES], ref_template=_REF)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(definitions["$defs"], Error=ERROR)
            failure = {
                "description": "An error",
                "content": {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}},
            }
            for operations in document["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
                    operation["responses"]["default"] = failure
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
