"""Authenticates HTTP requests, checks their origin, and adds security headers to replies (``RequestGuard``)."""

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
"""Rule of public routes, whose replies contain nothing that a camera saw."""
COOKIE = "sightline_session"
REQUEST_ID = "X-Request-Id"
OPENAI = ("/v1/chat/completions", "/v1/models")
"""Prefixes of the paths whose errors have OpenAI's format."""

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        # blob: is needed by MediaSource.
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
    """Convert to ASGI headers."""
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]


_RAW = raw_headers(HEADERS)

NOBODY = Principal("nobody", frozenset(), ())
"""Principal of requests to public routes."""


class RequestGuard:
    """Admits requests. ``host``: address on which the gateway listens.

    ``guard``: authenticates requests; None: everybody may do everything. ``sessions``: shared by all gateways; None: in
    memory.
    """

    def __init__(self, guard: Guard | None, host: str, sessions: SessionStore | None = None) -> None:
        self.guard = guard
        self._sessions = Sessions() if sessions is None else sessions
        # Against DNS rebinding: a foreign page whose name resolves to loopback is recognised by that name.
        self._check_host = guard is None and is_loopback(host)

    async def identify(self, request: Request) -> Principal:
        """Principal of a request's token or session. Raises ``UnauthenticatedError``; ``UnavailableError``: sessions
        cannot be looked up."""
        return ANYBODY if self.guard is None else self.guard.identify(await self._credentials(request))

    async def recheck(self, request: Request, principal: Principal, cameras: Sequence[str] = ()) -> Principal | None:
        """Current principal of a stream that ``principal`` began; None: end it, since the token was revoked, expired or
        lost a camera, or the session ended. The stream continues while that cannot be determined."""
        try:
            with contextlib.suppress(UnavailableError):
                principal = await self.identify(request)
            principal.require(Role.VIEW, cameras)
        except SightlineError:
            return None
        return principal

    async def begin_session(self, request: Request, secret: str) -> tuple[Principal, str]:
        """Begin a session with the token ``secret``; returns its principal and the session id, empty if requests need
        no token. Raises ``UnauthenticatedError``, ``CapacityError``."""
        if self.guard is None:
            return ANYBODY, ""
        principal = self.guard.admit(f"Bearer {secret}", SIGN_IN, peer_of(request))
        return principal, await self._sessions.begin_session(principal.name, secret, _browser(request))

    async def keep_session(self, request: Request, principal: Principal, lifetime_s: float) -> str:
        """Begin a session of a principal from the sign-in provider; returns its id."""
        return await self._sessions.begin_session(principal.name, principal, _browser(request), lifetime_s)

    async def end_session(self, request: Request) -> None:
        session = request.cookies.get(COOKIE)
        # Checked first, so that made-up ids cost the store only a bounded look-up.
        if session and await self._sessions.credential_of_session(session, _browser(request)) is not None:
            await self._sessions.end_session(session)

    async def _credentials(self, request: Request) -> Credentials:
        """The ``Authorization`` header, or else the credentials of the cookie's session."""
        if (header := request.headers.get("Authorization")) is not None:
            return header
        if not (session := request.cookies.get(COOKIE)):
            return None
        stored = await self._sessions.credential_of_session(session, _browser(request))
        return f"Bearer {stored}" if isinstance(stored, str) else stored

    async def admit(self, request: Request, rule: str) -> None:
        """Admit a request, and serve it as its principal from here on. If the rule is no gRPC method, the cameras of
        path and query are checked here, otherwise those of the call when it is made. Raises ``SightlineError``."""
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
        # Absent if the application is not served by HttpServer.
        if (connection := getattr(request.state, "connection", None)) is not None:
            connection.admit()

    def check_page(self, request: Request) -> None:
        """Refuse requests from foreign pages, which would use the viewer's cookie or network position (CSRF). Raises
        ``HttpError``: 403."""
        host = request.headers.get("Host", "")
        origin = request.headers.get("Origin")
        site, mode = request.headers.get("Sec-Fetch-Site", "none"), request.headers.get("Sec-Fetch-Mode", "")
        foreign = site in ("cross-site", "same-site") and mode != "navigate"
        if foreign or (origin is not None and _host_of(origin) != host.lower()):
            raise HttpError(403, "requests from other web pages are refused; use a program or the console")
        if self._check_host and not _is_address(host):
            raise HttpError(403, f"this gateway is not called {host!r}; use its address, or localhost")


class RequestGuardMiddleware:
    """ASGI middleware: adds headers to every reply, turns errors into replies, and logs requests."""

    def __init__(self, app: ASGIApp, request_guard: RequestGuard) -> None:
        self._app, self._request_guard = app, request_guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began_s = time.monotonic()
        scope.setdefault("state", {})
        request = Request(scope, receive)
        if request.method == "HEAD":
            # The server keeps the original scope, and sends no body.
            scope = {**scope, "method": "GET", "head": True}
        request_id = _request_id(request)
        error: BaseException | None = None
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                metrics.http_replies.labels(f"{message['status'] // 100}xx").inc()
                own = {REQUEST_ID: request_id, "Date": formatdate(usegmt=True)}
                message["headers"] = [*message["headers"], *_RAW, *raw_headers(own)]
            await send(message)

        try:
            self._request_guard.check_page(request)
            if request.headers.get("Expect", "100-continue").lower() != "100-continue":
                # The value is not quoted: it may not be text.
                raise HttpError(417, "the only supported Expect is 100-continue")
            await self._app(scope, receive, send_with_headers)
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
            # An error reply now would look like part of the one begun.
            if connection is not None:
                connection.end()
                await asyncio.sleep(0)
            return
        if connection is not None and "close" in request.headers.get("Connection", "").lower():
            await connection.drop_rest(receive)
        await failure(error, request_id, openai=scope["path"].startswith(OPENAI))(scope, receive, send_with_headers)


def names(text: str) -> list[str]:
    """Camera names of a comma-separated query parameter."""
    return [name for name in text.split(",") if name]


def peer_of(request: Request) -> str:
    """Address of a request's client."""
    return request.client.host if request.client is not None else ""


def _browser(request: Request) -> str:
    """Fingerprint shared by all requests of one browser to this gateway."""
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
    """The client's request id if it is one word, else a random one; used in the log and the reply."""
    given = request.headers.get(REQUEST_ID, "")
    return given if given.isascii() and given.replace("-", "").isalnum() and len(given) <= 64 else secrets.token_hex(6)


def _log(request: Request, request_id: str, error: BaseException | None, took_s: float) -> None:
    # Without query and headers, which may contain secrets.
    level = logging.INFO if error is not None and status_of(error) >= 400 else logging.DEBUG
    outcome = f"{status_of(error)} {error}" if error is not None else "ok"
    who = getattr(request.state, "who", "-")
    values = (request_id, request.method, request.scope["path"], who, outcome, 1e3 * took_s)
    log.log(level, "request %s %s %s by %s: %s (%.0f ms)", *values)
