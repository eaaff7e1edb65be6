"""The OpenAPI 3.1 document of the gateway's HTTP, made from its routes and the types of their replies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from cluster.gateway.http.door import COOKIE
from cluster.gateway.http.forms import OPEN, Failure, OpenAiFailure, Route

_ALWAYS = (400, 403, 503)
_GUARDED = (401, 429)
_SAID = {
    400: "The request is wrong.",
    401: "No token, or one that is unknown or has expired.",
    403: "The token may not do this, or not with this camera; or the request came from another web page.",
    404: "It is not there.",
    409: "Not in its present state.",
    416: "No such range.",
    429: "Too many requests, or no room.",
    503: "Another process is not there right now.",
    504: "It took too long.",
}
_MOST = 80


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """All of ``routes``; schemas of replies are under ``components``."""
    types: list[tuple[Any, Any]] = [(Failure, "serialization"), (OpenAiFailure, "serialization")]
    for route in routes:
        types += [(route.reply, "serialization")] if route.reply is not None else []
        types += [(route.body, "validation")] if route.body is not None else []
    unique = list(dict.fromkeys(types))
    schemas, shared = TypeAdapter.json_schemas(
        [(kind, mode, TypeAdapter(kind)) for kind, mode in unique], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(path_of(route), {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Sightline",
            "version": "1",
            "description": "What the gateway answers over HTTP. Errors have a status and one sentence.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": shared["$defs"],
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "An API token."},
                "session": {
                    "type": "apiKey",
                    "in": "cookie",
                    "name": COOKIE,
                    "description": "Made by POST /v1/session.",
                },
            },
        },
    }


def path_of(route: Route) -> str:
    """The route's path as OpenAPI writes it: without patterns."""
    return re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.path)


def _operation(route: Route, schemas: Any) -> dict[str, Any]:
    in_path = re.findall(r"\{(\w+)\}", path_of(route))
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in in_path]
    parameters += [
        {"name": each.name, "in": "query", "description": each.text, "schema": {"type": each.kind}}
        for each in route.query
    ]
    content: dict[str, Any] = {}
    if route.reply is not None:
        content = {"schema": schemas[route.reply, "serialization"]}
    failure = schemas[OpenAiFailure if route.openai else Failure, "serialization"]
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": {route.media: content}}}
    statuses = {*_ALWAYS, *route.errors, *(() if route.rule == OPEN else _GUARDED)}
    for status in sorted(statuses):
        responses[str(status)] = {"description": _SAID[status], "content": {"application/json": {"schema": failure}}}
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", route.name).strip("_").lower(),
        "summary": route.text if len(route.text) <= _MOST else route.text.split(". ")[0].split(";")[0],
        "description": route.text,
        "parameters": parameters,
        "responses": responses,
        "security": [] if route.rule == OPEN else [{"token": []}, {"session": []}],
    }
    if route.body is not None:
        form = schemas[route.body, "validation"]
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": form}}}
    return operation
