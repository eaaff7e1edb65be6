"""Who somebody is: the token in a cookie that no page can read, for browsers."""

from __future__ import annotations

from aiohttp import web
from pydantic import Field

from cluster.gateway.http.body import Body, read
from cluster.gateway.http.door import COOKIE, Door
from cluster.gateway.http.forms import OPEN, Me, Nothing, Route
from cluster.gateway.http.replies import HttpError, reply
from cluster.security.roles import Principal

DAYS = 30
"""How long a browser keeps a session; the token's own end, or its revocation, ends it earlier."""


class Login(Body):
    """``token``: as `sightline tokens create` printed it."""

    token: str = Field(max_length=1024)


class SessionRoutes:
    """See :meth:`routes`."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def routes(self) -> list[Route]:
        path = "/v1/session"
        return [
            Route("GET", "/v1/me", OPEN, self.me, "Whose token the request has.", Me, errors=(401,)),
            Route(
                "POST", path, OPEN, self.begin, "Keep a token in a cookie, for browsers.", Me, body=Login, errors=(401,)
            ),
            Route("DELETE", path, OPEN, self.end, "Forget the cookie.", Nothing),
        ]

    async def me(self, request: web.Request) -> web.Response:
        return reply(self._body(self._door.identify(request)))

    async def begin(self, request: web.Request) -> web.Response:
        secret = (await read(request, Login)).token.strip()
        body = self._body(self._door.identify_secret(secret))
        response = reply(body)
        if self._door.guarded:
            if not secret.isascii() or not secret.isprintable() or set(secret) & set(' ",;\\'):
                raise HttpError(401, "this is no token")
            # The token itself: whoever ends it ends its sessions, at every gateway, and nothing is kept here.
            response.set_cookie(
                COOKIE,
                secret,
                max_age=DAYS * 86_400,
                httponly=True,
                samesite="Strict",
                # Who ends TLS in front of the gateway says so; who lies about it harms its own cookie.
                secure=request.secure or request.headers.get("X-Forwarded-Proto") == "https",
                path="/",
            )
        return response

    async def end(self, _request: web.Request) -> web.Response:
        response = reply({})
        response.del_cookie(COOKIE, path="/", httponly=True, samesite="Strict")
        return response

    def _body(self, principal: Principal) -> dict[str, object]:
        return {
            "name": principal.name,
            "roles": sorted(principal.roles),
            "cameras": list(principal.cameras),
            "authenticated": self._door.guarded,
        }
