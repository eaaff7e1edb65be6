"""The FastAPI application of the gateway's HTTP port, and its OpenAPI document."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from typing_extensions import is_typeddict

from cluster.alerts.tracker import Rule
from cluster.gateway.console import STATIC, Files
from cluster.gateway.guard import Guard
from cluster.gateway.http import cameras, fleet, forms, incidents, memory, openai, pages, pictures
from cluster.gateway.http.calls import InProcessCalls
from cluster.gateway.http.free_questions import FreeQuestions
from cluster.gateway.http.live import Live
from cluster.gateway.http.request_guard import COOKIE, RequestGuard, RequestGuardMiddleware
from cluster.gateway.http.routes import PING_S, STALL_S, Backend, Route, no_route, wrong_form
from cluster.security.sessions import SessionStore

NO_LIMIT = 2**20
TOPICS = (pages, cameras, fleet, incidents, pictures, memory, openai)
_MOST = 80


def make_application(
    services: Mapping[str, Any],
    live: Live,
    registry: CollectorRegistry,
    *,
    guard: Guard | None = None,
    sessions: SessionStore | None = None,
    host: str = "127.0.0.1",
    static: Path = STATIC,
    max_asks: int = 32,
    longest_answer: int = NO_LIMIT,
    rule: Rule = Rule(),  # frozen
    ping_s: float = PING_S,
    stall_s: float = STALL_S,
) -> FastAPI:
    """Build the application, for :class:`~cluster.gateway.http.server.HttpServer`.

    Args:
        services: the gateway's gRPC services by full name.
        live: source of events, history and fleet figures.
        registry: metrics of ``/metrics``.
        guard: authenticates requests; None: requests need no token.
        sessions: browser sessions shared by all gateways; None: in memory.
        host: address of the listener.
        static: folder of the console's files.
        max_asks: limit of concurrent free questions.
        longest_answer: the cluster's limit of tokens per answer.
        rule: default incident rule of questions.
        ping_s, stall_s: interval of pings to browsers; timeout of reading a request body.
    """
    # No Swagger pages: they load scripts from a CDN, which a gateway may not reach.
    application = FastAPI(
        routes=list(table()),
        openapi_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: no_route, RequestValidationError: wrong_form},
    )
    request_guard, calls = RequestGuard(guard, host, sessions), InProcessCalls(services, guard)
    application.add_middleware(RequestGuardMiddleware, request_guard=request_guard)
    application.state.backend = Backend(
        request_guard,
        calls,
        live,
        FreeQuestions(calls, max_asks),
        Files(static),
        registry,
        longest_answer,
        rule,
        ping_s,
        stall_s,
    )
    application.openapi = document  # type: ignore[method-assign]
    return application


def table() -> list[Route]:
    """All routes, in order."""
    return [route for topic in TOPICS for route in topic.router.routes if isinstance(route, Route)]


@functools.cache
def document() -> dict[str, Any]:
    """FastAPI's OpenAPI document, with media types other than JSON, readable operation ids and our security schemes.

    Cached: building it blocks the event loop for half a second, and anonymous clients may request it.
    """
    found = get_openapi(
        title="Sightline",
        version="1",
        description="The gateway's HTTP API. Errors have a status and a one-sentence message.",
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        servers=[{"url": "/"}],
        routes=table(),
    )
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            text = " ".join(operation["description"].split())
            done = operation["responses"]["200"]
            operation |= {
                "operationId": re.sub(r"\W+", "_", f"{method} {path}").strip("_"),
                "summary": text if len(text) <= _MOST else text.split(". ")[0].split(";")[0],
                "description": text,
            }
            done["content"] = {operation.pop("x-media"): done["content"]["application/json"]}
            if "206" in operation["responses"]:
                operation["responses"]["206"]["content"] = done["content"]
            del operation["x-body-bytes"]
    for name, form in found["components"]["schemas"].items():
        # Replies of dataclasses have all keys, those with a default in Python too.
        if "additionalProperties" not in form and not is_typeddict(getattr(forms, name, None)):
            form["required"] = list(form["properties"])
            for field in form["properties"].values():
                field.pop("default", None)
    session = {"type": "apiKey", "in": "cookie", "name": COOKIE, "description": "Issued by POST /v1/session."}
    found["components"]["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "An API token."},
        "session": session,
    }
    return found
