"""The door of the gateway's HTTP: who asks, whether they may, and what a browser may do with the reply."""

from __future__ import annotations

import ipaddress
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from cluster import metrics
from cluster.errors import SightlineError
from cluster.gateway.guard import Guard
from cluster.gateway.http.forms import OPEN, Route
from cluster.gateway.http.replies import HttpError, status_of
from cluster.gateway.http.server import admit
from cluster.hosts import is_loopback
from cluster.security.roles import ANYBODY, RULES, Principal, serving

log = logging.getLogger(__name__)

COOKIE = "sightline_session"
REQUEST_ID = "X-Request-Id"
ID = web.RequestKey("id", str)
WHO = web.RequestKey("who", str)
STARTED = web.RequestKey("started", bool)

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}

ROUTES: web.AppKey[dict[web.AbstractRoute, Route]] = web.AppKey("routes", dict)

Failure = Callable[[BaseException, str], web.Response]


class Door:
    """Middleware of the application; ``host`` is where it listens.

    ``guard``: who asks every request for its token; None: nobody, and all of them may do everything.
    """

    def __init__(self, guard: Guard | None, host: str, failures: Mapping[bool, Failure]) -> None:
        self._guard = guard
        self._loopback_only = is_loopback(host)
        self._failures = failures

    def identify(self, request: web.Request) -> Principal:
        """Whose token the request has, in its header or in the session's cookie. Raises ``UnauthenticatedError``."""
        return ANYBODY if self._guard is None else self._guard.identify(authorization(request))

    @property
    def guarded(self) -> bool:
        """Whether tokens are asked for."""
        return self._guard is not None

    def identify_secret(self, secret: str) -> Principal:
        """Whose token this is. Raises ``UnauthenticatedError``."""
        return ANYBODY if self._guard is None else self._guard.identify(f"Bearer {secret}")

    @property
    def middleware(self) -> Any:
        """Lets requests through to their route's handler, and makes replies of what it raises."""

        @web.middleware
        async def door(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            began_s = time.monotonic()
            request_id = _request_id(request)
            request[ID] = request_id
            route = request.app[ROUTES].get(request.match_info.route)
            error: BaseException | None = None
            try:
                _check_page(request, names_matter=self._guard is None and self._loopback_only)
                if route is None:
                    raise await nothing_here(request)
                with serving(self._admit(request, route)):
                    return await handler(request)
            except SightlineError as known:
                error = known
            except web.HTTPRequestEntityTooLarge as large:
                error = HttpError(413, f"the request is larger than {large.text or 'may be'}")
            except (ConnectionError, web.HTTPException):
                raise
            except Exception as unknown:
                log.exception("request %s %s %s failed", request_id, request.method, request.path)
                error = unknown
            finally:
                _log(request, request_id, error, time.monotonic() - began_s)
            if request.get(STARTED):
                # A second reply in the middle of the first would look like a part of it.
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError("the reply broke off")
            return self._failures[route is not None and route.openai](error, request_id)

        return door

    def _admit(self, request: web.Request, route: Route) -> Principal:
        if route.rule == OPEN:
            return ANYBODY if self._guard is None else NOBODY
        if self._guard is None:
            admit(request)
            return ANYBODY
        principal = self._guard.admit(authorization(request), route.rule)
        request[WHO] = principal.name
        if not route.rule.startswith("/"):
            # Rules of gRPC's methods are checked where the method is called, which knows its cameras.
            camera = RULES[route.rule].camera
            named = [request.match_info[camera]] if camera in request.match_info else names(request, camera)
            self._guard.check(principal, route.rule, named)
        admit(request)
        return principal


NOBODY = Principal("nobody", frozenset(), ())
"""For whom a request is served that asked for no token."""


def names(request: web.Request, key: str) -> list[str]:
    """Cameras of a query, between commas."""
    return [name for name in request.query.get(key, "").split(",") if name] if key else []


def authorization(request: web.Request) -> str | None:
    """The ``Authorization`` header, or one made of the session's cookie."""
    header = request.headers.get("Authorization")
    if header is not None:
        return header
    secret = request.cookies.get(COOKIE, "")
    return f"Bearer {secret}" if secret else None


async def secure(request: web.Request, response: web.StreamResponse) -> None:
    """Signal of the application: what browsers are told with every reply."""
    request[STARTED] = True
    metrics.http_replies.labels(f"{response.status // 100}xx").inc()
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers.setdefault(REQUEST_ID, request.get(ID, ""))
    response.headers["Server"] = "sightline"


def _check_page(request: web.Request, *, names_matter: bool) -> None:
    """Pages that are not ours must not ask, with the cookie or the network position of who looks at them.

    ``names_matter``: nobody is asked for a token, and only this machine gets here. A page whose name was made to lead
    here (DNS rebinding) is told by that name.
    """
    host = request.headers.get("Host", "")
    origin = request.headers.get("Origin")
    if origin is not None and _host_of(origin) != host.lower():
        raise HttpError(403, "requests from other web pages are not answered; ask from a program, or from the console")
    site, mode = request.headers.get("Sec-Fetch-Site", "none"), request.headers.get("Sec-Fetch-Mode", "")
    if site in ("cross-site", "same-site") and mode != "navigate":
        raise HttpError(403, "requests from other web pages are not answered; ask from a program, or from the console")
    if names_matter and not _is_address(host):
        raise HttpError(403, f"this gateway is not called {host!r}; use its address, or localhost")


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower() or origin
    except ValueError:
        return origin


def _is_address(host: str) -> bool:
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


async def nothing_here(request: web.Request) -> HttpError:
    """No route is for this path, or none for this method of it."""
    methods: set[str] = set()
    for resource in request.app.router.resources():
        methods |= (await resource.resolve(request))[1]
    allowed = methods - {"*", "HEAD"}
    if allowed:
        use = ", ".join(sorted(allowed))
        return HttpError(405, f"{request.method} is not for this path; use {use}", Allow=use)
    return HttpError(404, f"there is no {request.rel_url.raw_path}; /v1/openapi.json says what there is")


def _request_id(request: web.Request) -> str:
    """The client's own, where it is one word; it is in the log and in the reply."""
    given = request.headers.get(REQUEST_ID, "")
    return given if given.isascii() and given.replace("-", "").isalnum() and len(given) <= 64 else secrets.token_hex(6)


def _log(request: web.Request, request_id: str, error: BaseException | None, took_s: float) -> None:
    # Never the query or a header: there may be secrets.
    level = logging.INFO if error is not None and status_of(error) >= 400 else logging.DEBUG
    outcome = f"{status_of(error)} {error}" if error is not None else "ok"
    who = request.get(WHO, "-")
    log.log(
        level,
        "request %s %s %s by %s: %s (%.0f ms)",
        request_id,
        request.method,
        request.path,
        who,
        outcome,
        1e3 * took_s,
    )
