"""Routes that need no camera: console files, probes, metrics, sessions, sign-in at an OpenID Connect provider, and the
OpenAPI document."""

import asyncio
import html
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import Annotated, Any

from fastapi import Query, Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from pydantic import Field
from starlette.responses import HTMLResponse, RedirectResponse

from cluster.errors import SightlineError, UnauthenticatedError, UnavailableError
from cluster.gateway.claims import Attempt
from cluster.gateway.guard import Guard
from cluster.gateway.http.forms import Health, Me, Nothing, SignInWays
from cluster.gateway.http.replies import HttpError, Reply, packed, status_of
from cluster.gateway.http.request_guard import COOKIE, RequestGuard, peer_of
from cluster.gateway.http.routes import Backend, Body, Gateway, Routes
from cluster.gateway.oidc import CALLBACK, OidcProvider, refused
from cluster.security.roles import METRICS, Principal, current_principal
from cluster.security.sessions import LIFETIME_S

log = logging.getLogger(__name__)

LATE_S = 30.0
"""Seconds without an answer from the controller after which the gateway is not ready."""
router = Routes()
# Limits concurrent scrapes to two; further ones queue without blocking anything else.
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
    """The metrics of ``registry``, without series of cameras that ``principal`` may not see."""

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
    # On a thread, since it queries other processes.
    seen = _Seen(gateway.registry, current_principal())
    data = await asyncio.get_running_loop().run_in_executor(_scrapes, encode, seen)
    return await packed(request, Response(data, headers={"Content-Type": kind, "Cache-Control": "no-store"}))


@router.on("GET /v1/openapi.json", reply=dict[str, Any])
async def describe(request: Request) -> Reply:
    """This OpenAPI document."""
    return Reply(request.app.openapi())


class Login(Body):
    """``token``: as `sightline tokens create` printed it."""

    token: str = Field(max_length=1024)


@router.on("GET /v1/me", reply=Me, errors=(401,))
async def me(request: Request, gateway: Gateway) -> Reply:
    """The principal of the request's token or session."""
    return _me(gateway.request_guard, await gateway.request_guard.identify(request))


@router.on("POST /v1/session", reply=Me, errors=(401, 429))
async def begin_session(request: Request, body: Login, gateway: Gateway) -> Reply:
    """Begin a browser session with a token; its cookie is valid for this browser only, for 12 hours."""
    who, session = await gateway.request_guard.begin_session(request, body.token.strip())
    reply = _me(gateway.request_guard, who)
    if session:
        age_s = int(LIFETIME_S)
        reply.set_cookie(COOKIE, session, age_s, httponly=True, samesite="strict", secure=_secure(request))
    return reply


@router.on("DELETE /v1/session", reply=Nothing)
async def end_session(request: Request, gateway: Gateway) -> Reply:
    """Sign out: the session ends, and the browser forgets its cookie."""
    reply = Reply({})
    reply.delete_cookie(COOKIE, httponly=True, samesite="strict")
    try:
        await gateway.request_guard.end_session(request)
    except UnavailableError as error:
        # Delete the cookie anyway, so that the browser's next user is not signed in once the controller answers.
        raise HttpError(503, str(error), Set_Cookie=reply.headers["set-cookie"]) from None
    return reply


def _me(request_guard: RequestGuard, who: Principal) -> Reply:
    names = {"name": who.name, "roles": sorted(who.roles), "cameras": list(who.cameras)}
    return Reply({**names, "authenticated": request_guard.guard is not None})


def _secure(request: Request) -> bool:
    # Set by a TLS proxy; a client that forges it only affects its own cookie.
    return request.url.scheme == "https" or request.headers.get("X-Forwarded-Proto") == "https"


ATTEMPT_COOKIE = "sightline_sign_in"
ATTEMPT_S = 600
"""Longest time at the provider during a sign-in, in seconds."""
_MOST_ATTEMPTS = 8
_PATH = "/v1/sign-in"
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Sightline: not signed in</title>
<h1>Not signed in</h1><p role="alert">{sentence}.</p><p><a href="/">Back to the console</a></p></html>"""


@router.on(f"GET {_PATH}", reply=SignInWays)
async def ways(gateway: Gateway) -> Reply:
    """The available ways to sign in."""
    guard = gateway.request_guard.guard
    provider = None if guard is None else guard.provider
    return Reply({"tokens": guard is not None and guard.tokens, "provider": "" if provider is None else provider.name})


@router.on(f"GET {_PATH}/provider", media="text/html", errors=(404, 503))
async def redirect_to_provider(request: Request, gateway: Gateway) -> Response:
    """Redirect to the provider; a cookie keeps the state of the sign-in."""
    _, provider = _guard_and_provider(gateway)
    attempt = Attempt.begin()
    try:
        address = await provider.address(attempt)
    except SightlineError as error:
        return _error_page(error)
    reply = RedirectResponse(address, 303, {"Cache-Control": "no-store"})
    _set_attempts(reply, request, [attempt, *_attempts(request)][:_MOST_ATTEMPTS])
    return reply


@router.on(f"GET {CALLBACK}", media="text/html", errors=(401, 404, 503))
async def finish_sign_in(
    request: Request,
    gateway: Gateway,
    code: Annotated[str, Query(max_length=4096, description="Authorization code from the provider.")] = "",
    state: Annotated[str, Query(max_length=256, description="State of the sign-in that was begun.")] = "",
    error: Annotated[str, Query(max_length=256, description="Error from the provider, if sign-in failed.")] = "",
) -> Response:
    """Return from the provider: begin a session and redirect to the console."""
    guard, provider = _guard_and_provider(gateway)
    attempts = {each.state: each for each in _attempts(request)}
    attempt = attempts.pop(state, None)
    try:
        if attempt is None:
            raise UnauthenticatedError("this sign-in was not begun in this browser, or too long ago; sign in again")
        if error or not code:
            raise refused(error)
        # Limited only here, once per sign-in: behind a proxy all users share one address.
        provider.rate.acquire(peer_of(request))
        principal = await provider.redeem(code, attempt)
        session = await gateway.request_guard.keep_session(request, principal, provider.config.session)
    except SightlineError as failure:
        guard.note_sign_in(None, failure, peer_of(request))
        reply: Response = _error_page(failure)
    else:
        guard.note_sign_in(principal, None, peer_of(request))
        reply = RedirectResponse("/", 303, {"Cache-Control": "no-store"})
        age_s = int(provider.config.session)
        reply.set_cookie(COOKIE, session, age_s, httponly=True, samesite="strict", secure=_secure(request))
    _set_attempts(reply, request, list(attempts.values()))
    return reply


def _attempts(request: Request) -> list[Attempt]:
    """Sign-ins in progress in this browser, one per tab."""
    found = map(Attempt.read, request.cookies.get(ATTEMPT_COOKIE, "").split("~"))
    return [each for each in found if each is not None]


def _set_attempts(reply: Response, request: Request, attempts: Sequence[Attempt]) -> None:
    text, age_s = "~".join(each.text for each in attempts), ATTEMPT_S if attempts else 0
    reply.set_cookie(ATTEMPT_COOKIE, text, age_s, path=_PATH, httponly=True, samesite="lax", secure=_secure(request))


def _guard_and_provider(gateway: Backend) -> tuple[Guard, OidcProvider]:
    guard = gateway.request_guard.guard
    if guard is None or guard.provider is None:
        raise HttpError(404, "this gateway has no sign-in provider; use a token")
    return guard, guard.provider


def _error_page(error: SightlineError) -> Response:
    log.info("sign-in: %s", error)
    text = _PAGE.format(sentence=html.escape(str(error).rstrip(".")))
    return HTMLResponse(text, status_of(error), {"Cache-Control": "no-store"})
