"""The application behind the gateway's HTTP port, put together from its topics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry

from cluster.gateway.guard import Guard
from cluster.gateway.http import openapi
from cluster.gateway.http.body import MAX_BODY_BYTES, STALL, STALL_S
from cluster.gateway.http.calls import Calls
from cluster.gateway.http.cameras import CameraRoutes
from cluster.gateway.http.door import ROUTES, Door, nothing_here, secure
from cluster.gateway.http.events import PING_S, EventRoutes
from cluster.gateway.http.fleet import FleetRoutes
from cluster.gateway.http.forms import Route
from cluster.gateway.http.incidents import IncidentRoutes
from cluster.gateway.http.live import Live
from cluster.gateway.http.memory import Answering, MemoryRoutes
from cluster.gateway.http.openai import OpenAiRoutes, openai_failure
from cluster.gateway.http.pages import STATIC, PageRoutes
from cluster.gateway.http.pictures import PictureRoutes
from cluster.gateway.http.replies import failure
from cluster.gateway.http.server import expect
from cluster.gateway.http.session import SessionRoutes

NO_LIMIT = 2**20


def make_application(
    services: Mapping[str, Any],
    live: Live,
    registry: CollectorRegistry,
    *,
    guard: Guard | None = None,
    host: str = "127.0.0.1",
    static: Path = STATIC,
    max_asks: int = 32,
    longest_answer: int = NO_LIMIT,
    ping_s: float = PING_S,
    stall_s: float = STALL_S,
) -> web.Application:
    """All of it, to be served by :class:`~cluster.gateway.http.server.HttpServer`.

    Args:
        services: the gateway's gRPC services by full name.
        live: what events, history and the fleet are made of.
        registry: of ``/metrics``.
        guard: who asks every request for its token; None asks nobody.
        host: where it will listen.
        static: the console's files.
        max_asks: free questions that are answered at once.
        longest_answer: most tokens that the cluster gives an answer.
        ping_s, stall_s: between signs of life to browsers; longest that a body may take.
    """
    door = Door(guard, host, {False: failure, True: openai_failure})
    calls = Calls(services, guard)
    answering = Answering(calls, max_asks)
    table: list[Route] = []
    pages = PageRoutes(live, registry, lambda: openapi.document(table), static)
    for topic in (
        pages,
        SessionRoutes(door),
        CameraRoutes(calls, live),
        FleetRoutes(calls, live),
        IncidentRoutes(calls),
        PictureRoutes(calls),
        MemoryRoutes(calls, answering),
        EventRoutes(door, live, ping_s=ping_s),
        OpenAiRoutes(calls, answering, longest_answer),
    ):
        table += topic.routes()
    application = web.Application(middlewares=[door.middleware], client_max_size=MAX_BODY_BYTES)
    application[STALL] = stall_s
    application[ROUTES] = {}
    for route in table:
        resource = application.router.add_resource(route.path)
        application[ROUTES][resource.add_route(route.method, route.handler, expect_handler=expect)] = route
        if route.method == "GET" and route.media != "text/event-stream":
            application[ROUTES][resource.add_route("HEAD", route.handler, expect_handler=expect)] = route
    # What matches nothing else comes here too: what aiohttp itself answers quotes headers that may be no text.
    application.router.add_resource("/{rest:.*}").add_route("*", _nothing, expect_handler=expect)
    application.on_response_prepare.append(secure)
    application.on_cleanup.append(_closing(pages))
    return application


def table_of(application: web.Application) -> list[Route]:
    """Its routes, in order."""
    return list(dict.fromkeys(application[ROUTES].values()))


async def _nothing(request: web.Request) -> web.StreamResponse:
    raise await nothing_here(request)


def _closing(pages: PageRoutes) -> Any:
    async def close(_application: web.Application) -> None:
        pages.close()

    return close
