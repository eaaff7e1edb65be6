"""The door of the gateway's HTTP: who asks, whether they may, and what a browser may do with the reply."""

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from email.utils import formatdate
from urllib.parse import urlsplit

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster import metrics
from cluster.errors import SightlineError, UnavailableError
from cluster.gateway.guard import Credentials, Guard
from cluster.gateway.http.replies import HttpError, failure, status_of
from cluster.hosts import is_loopback
from cluster.security.roles import ANYBODY, RULES, SIGN_IN, Principal, Role, serve_as
from cluster.security.sessions import Sessions, SessionStore

log = logging.getLogger(__name__)

OPEN = ""
"""The rule of what anybody may have: nothing that a camera saw is in it."""
COOKIE = "sightline_session"
REQUEST_ID = "X-Request-Id"
OPENAI = ("/v1/chat/completions", "/v1/models")
"""Beginnings of the paths whose errors have the form that OpenAI's clients read."""

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        # blob: is what MediaSource plays.
        "default-src 'self'; media-src 'self' blob:; object-src 'none'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Server": "sightline",
}


def raw_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """As ASGI has them."""
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]


_RAW = raw_headers(HEADERS)

NOBODY = Principal("nobody", frozenset(), ())
"""For whom a request is served that asked for no token."""


class Door:
    """Decides over requests; ``host`` is where the gateway listens.

    ``guard``: who asks every request for its token; None: nobody, and all of them may do everything. ``sessions``: of
    all gateways; None: this one has its own.
    """

    def __init__(self, guard: Guard | None, host: str, sessions: SessionStore | None = None) -> None:
        self.guard = guard
        self._sessions = Sessions() if sessions is None else sessions
        # A page whose name was made to lead here (DNS rebinding) is told by that name.
        self._names_matter = guard is None and is_loopback(host)

    async def identify(self, request: Request) -> Principal:
        """Whose token or session a request has. Raises ``UnauthenticatedError``, and ``UnavailableError`` where nobody
        says whether it has a session."""
        return ANYBODY if self.guard is None else self.guard.identify(await self._credentials(request))

    async def recheck(self, request: Request, principal: Principal, cameras: Sequence[str] = ()) -> Principal | None:
        """Who may still see a stream that ``principal`` began, None: nobody. A token that was revoked, has expired or
        lost a camera sees no more, nor does a session that has ended; while nobody can say, the stream goes on."""
        try:
            with contextlib.suppress(UnavailableError):
                principal = await self.identify(request)
            principal.require(Role.VIEW, cameras)
        except SightlineError:
            return None
        return principal

    async def begin_session(self, request: Request, secret: str) -> tuple[Principal, str]:
        """Whose token ``secret`` is, and the id of a session with it; no id where nobody is asked for tokens. Raises
        ``UnauthenticatedError``, ``CapacityError``."""
        if self.guard is None:
            return ANYBODY, ""
        principal = self.guard.admit(f"Bearer {secret}", SIGN_IN, peer_of(request))
        return principal, await self._sessions.begin_session(principal.name, secret, _browser(request))

    async def keep_session(self, request: Request, principal: Principal, lifetime_s: float) -> str:
        """Id of a session of somebody whom the provider vouches for."""
        return await self._sessions.begin_session(principal.name, principal, _browser(request), lifetime_s)

    async def end_session(self, request: Request) -> None:
        session = request.cookies.get(COOKIE)
        # Not one that somebody made up: to look for it costs the store little, and what is asked at once is bounded.
        if session and await self._sessions.credential_of_session(session, _browser(request)) is not None:
            await self._sessions.end_session(session)

    async def _credentials(self, request: Request) -> Credentials:
        """The ``Authorization`` header, or what the session has that the cookie names."""
        if (header := request.headers.get("Authorization")) is not None:
            return header
        if not (session := request.cookies.get(COOKIE)):
            return None
        kept = await self._sessions.credential_of_session(session, _browser(request))
        return f"Bearer {kept}" if isinstance(kept, str) else kept

    async def admit(self, request: Request, rule: str) -> None:
        """Serves the request from here on for whom it comes from; a rule that names no method of gRPC is checked with
        the cameras of path and query, the others where the method is called. Raises ``SightlineError``: it may not be
        made, or not now."""
        peer = peer_of(request)
        serve_as(ANYBODY if self.guard is None else NOBODY, peer)
        if rule == OPEN:
            return
        if self.guard is not None:
            principal = self.guard.admit(await self._credentials(request), rule, peer)
            request.state.who = principal.name
            serve_as(principal, peer)
            if not rule.startswith("/"):
                camera = RULES[rule].camera
                path = request.path_params
                named = [path[camera]] if camera in path else names(request.query_params.get(camera, ""))
                self.guard.check(principal, rule, named)
        # An application that no HttpServer serves has no limits.
        if (connection := getattr(request.state, "connection", None)) is not None:
            connection.admit()

    def check_page(self, request: Request) -> None:
        """Pages that are not ours must not ask, with the cookie or the network position of who looks at them. Raises
        ``HttpError``: 403."""
        host = request.headers.get("Host", "")
        origin = request.headers.get("Origin")
        site, mode = request.headers.get("Sec-Fetch-Site", "none"), request.headers.get("Sec-Fetch-Mode", "")
        elsewhere = site in ("cross-site", "same-site") and mode != "navigate"
        if elsewhere or (origin is not None and _host_of(origin) != host.lower()):
            raise HttpError(
                403, "requests from other web pages are not answered; ask from a program, or from the console"
            )
        if self._names_matter and not _is_address(host):
            raise HttpError(403, f"this gateway is not called {host!r}; use its address, or localhost")


class DoorMiddleware:
    """Around the routes of ``app``: headers of every reply, a reply to every error, a line in the log."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app, self._door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began_s = time.monotonic()
        scope.setdefault("state", {})
        request = Request(scope, receive)
        if request.method == "HEAD":
            # The server, which has its own scope, knows, and sends no body.
            scope = {**scope, "method": "GET", "head": True}
        request_id = _request_id(request)
        error: BaseException | None = None
        started = False

        async def told(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                metrics.http_replies.labels(f"{message['status'] // 100}xx").inc()
                own = {REQUEST_ID: request_id, "Date": formatdate(usegmt=True)}
                message["headers"] = [*message["headers"], *_RAW, *raw_headers(own)]
            await send(message)

        try:
            self._door.check_page(request)
            if request.headers.get("Expect", "100-continue").lower() != "100-continue":
                # Not quoted: it may be no text at all.
                raise HttpError(417, "of Expect only 100-continue is known")
            await self._app(scope, receive, told)
        except Exception as caught:
            error = caught
            if not isinstance(error, SightlineError):
                log.exception("request %s %s %s failed", request_id, request.method, scope["path"])
        finally:
            _log(request, request_id, error, time.monotonic() - began_s)
        if error is None:
            return
        connection = getattr(request.state, "connection", None)
        if started:
            # A second reply in the middle of the first would look like a part of it.
            if connection is not None:
                connection.end()
                await asyncio.sleep(0)
            return
        if connection is not None and "close" in request.headers.get("Connection", "").lower():
            await connection.drop_rest(receive)
        await failure(error, request_id, openai=scope["path"].startswith(OPENAI))(scope, receive, told)


def names(text: str) -> list[str]:
    """Cameras of a query, between commas."""
    return [name for name in text.split(",") if name]


def peer_of(request: Request) -> str:
    """Address that a request comes from."""
    return request.client.host if request.client is not None else ""


def _browser(request: Request) -> str:
    """What all requests of one browser to this gateway have in common."""
    return f"{request.headers.get('Host', '')}\n{request.headers.get('User-Agent', '')}"


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


def _request_id(request: Request) -> str:
    """The client's own, where it is one word; it is in the log and in the reply."""
    given = request.headers.get(REQUEST_ID, "")
    return given if given.isascii() and given.replace("-", "").isalnum() and len(given) <= 64 else secrets.token_hex(6)


def _log(request: Request, request_id: str, error: BaseException | None, took_s: float) -> None:
    # Never the query or a header: there may be secrets.
    level = logging.INFO if error is not None and status_of(error) >= 400 else logging.DEBUG
    outcome = f"{status_of(error)} {error}" if error is not None else "ok"
    who = getattr(request.state, "who", "-")
    told = (request_id, request.method, request.scope["path"], who, outcome, 1e3 * took_s)
    log.log(level, "request %s %s %s by %s: %s (%.0f ms)", *told)
