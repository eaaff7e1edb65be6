"""What needs no camera: the console's files, probes, metrics, sessions, and the description of all of it."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import Any

from fastapi import Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from pydantic import Field

from cluster.errors import UnavailableError
from cluster.gateway.http.door import COOKIE, Door
from cluster.gateway.http.forms import Health, Me, Nothing
from cluster.gateway.http.replies import HttpError, Reply, packed
from cluster.gateway.http.routes import Body, Gateway, Routes
from cluster.security.roles import METRICS, Principal, current_principal
from cluster.security.sessions import LIFETIME_S

LATE_S = 30.0
"""Without a word from the controller for so long, cameras cannot be served."""
router = Routes()
# Scrapes of two servers at once; more of them wait, and hold up nothing else.
_scrapes = ThreadPoolExecutor(2, thread_name_prefix="metrics")


@router.on("GET /", media="text/html", errors=(404,))
async def index(request: Request, gateway: Gateway) -> Response:
    """The console."""
    return await file(request, "index.html", gateway)


@router.on("GET /console/{path:path}", media="*/*", errors=(404,))
async def file(request: Request, path: str, gateway: Gateway) -> Response:
    """A file of the console."""
    try:
        return gateway.files.reply(request, path)
    except FileNotFoundError as error:
        raise HttpError(404, str(error)) from None


@router.on("GET /healthz", reply=Health)
async def healthy() -> Reply:
    """Whether the gateway serves."""
    return Reply({"status": "ok"})


@router.on("GET /readyz", reply=Health)
async def ready(gateway: Gateway) -> Reply:
    """Whether cameras can be served."""
    live = gateway.live
    trouble = "" if time.monotonic() - live.seen_s < LATE_S else live.trouble or "the controller does not answer"
    if not trouble and not live.replicas:
        trouble = "no replica is ready yet"
    if trouble:
        raise UnavailableError(trouble)
    return Reply({"status": "ok"})


class _Seen(Collector):
    """What is in ``registry``, without the series of cameras that ``principal`` may not see."""

    def __init__(self, registry: CollectorRegistry, principal: Principal) -> None:
        self._registry, self._sees = registry, principal.sees

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            seen = copy(metric)
            seen.samples = [
                each for each in metric.samples if "camera" not in each.labels or self._sees(each.labels["camera"])
            ]
            yield seen


@router.on("GET /metrics", METRICS, media="text/plain")
async def scrape(request: Request, gateway: Gateway) -> Response:
    """Metrics of all processes, for Prometheus."""
    encode, kind = choose_encoder(request.headers.get("Accept", ""))
    # On a thread: it asks other processes.
    seen = _Seen(gateway.registry, current_principal())
    data = await asyncio.get_running_loop().run_in_executor(_scrapes, encode, seen)
    return await packed(request, Response(data, headers={"Content-Type": kind, "Cache-Control": "no-store"}))


@router.on("GET /v1/openapi.json", reply=dict[str, Any])
async def describe(request: Request) -> Reply:
    """This description."""
    return Reply(request.app.openapi())


class Login(Body):
    """``token``: as `sightline tokens create` printed it."""

    token: str = Field(max_length=1024)


@router.on("GET /v1/me", reply=Me, errors=(401,))
async def me(request: Request, gateway: Gateway) -> Reply:
    """Whose token the request has."""
    return _me(gateway.door, await gateway.door.identify(request))


@router.on("POST /v1/session", reply=Me, errors=(401,))
async def begin_session(request: Request, body: Login, gateway: Gateway) -> Reply:
    """Begin a session with a token, for browsers; its cookie is good for this browser alone, and for 12 hours."""
    who, session = await gateway.door.begin_session(request, body.token.strip())
    reply = _me(gateway.door, who)
    if session:
        # Who ends TLS in front of the gateway says so; who lies about it harms its own cookie.
        secure = request.url.scheme == "https" or request.headers.get("X-Forwarded-Proto") == "https"
        reply.set_cookie(COOKIE, session, max_age=int(LIFETIME_S), httponly=True, samesite="strict", secure=secure)
    return reply


@router.on("DELETE /v1/session", reply=Nothing)
async def end_session(request: Request, gateway: Gateway) -> Reply:
    """Sign out: the session ends, and the browser forgets its cookie."""
    await gateway.door.end_session(request)
    reply = Reply({})
    reply.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return reply


def _me(door: Door, who: Principal) -> Reply:
    names = {"name": who.name, "roles": sorted(who.roles), "cameras": list(who.cameras)}
    return Reply({**names, "authenticated": door.guarded})
