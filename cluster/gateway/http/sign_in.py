"""Signing in at an OpenID Connect provider: there, and back with a session."""

import html
import logging
from typing import Annotated

from fastapi import Query, Request, Response
from starlette.responses import HTMLResponse, RedirectResponse

from cluster.errors import SightlineError, UnauthenticatedError
from cluster.gateway.http.door import COOKIE
from cluster.gateway.http.forms import SignInWays
from cluster.gateway.http.replies import HttpError, Reply, status_of
from cluster.gateway.http.routes import Gateway, Routes
from cluster.gateway.oidc import CALLBACK, OidcProvider, refused
from cluster.security.oidc import Attempt

log = logging.getLogger(__name__)

ATTEMPT_COOKIE = "sightline_sign_in"
ATTEMPT_S = 600
"""Longest between leaving for the provider and coming back."""
_PATH = "/v1/sign-in"
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Sightline: not signed in</title>
<h1>Not signed in</h1><p role="alert">{sentence}.</p><p><a href="/">Back to the console</a></p></html>"""

router = Routes()


@router.on(f"GET {_PATH}", reply=SignInWays)
async def ways(gateway: Gateway) -> Reply:
    """How people may sign in here."""
    provider = gateway.door.provider
    return Reply({"tokens": gateway.door.tokens, "provider": "" if provider is None else provider.name})


@router.on(f"GET {_PATH}/provider", media="text/html", errors=(404, 503))
async def leave(request: Request, gateway: Gateway) -> Response:
    """To the provider; the browser keeps what it needs to come back."""
    provider = _provider(gateway.door.provider)
    attempt = Attempt.begin()
    try:
        gateway.door.limit_sign_in(request)
        address = await provider.address(attempt)
    except SightlineError as error:
        return _page(error)
    reply = RedirectResponse(address, 303, {"Cache-Control": "no-store"})
    reply.set_cookie(
        ATTEMPT_COOKIE, attempt.text, ATTEMPT_S, path=_PATH, httponly=True, samesite="lax", secure=_secure(request)
    )
    return reply


@router.on(f"GET {CALLBACK}", media="text/html", errors=(401, 404, 503))
async def come_back(
    request: Request,
    gateway: Gateway,
    code: Annotated[str, Query(max_length=4096, description="What the provider gives in exchange for tokens.")] = "",
    state: Annotated[str, Query(max_length=256, description="Of the sign-in that was begun.")] = "",
    error: Annotated[str, Query(max_length=256, description="Why the provider signed nobody in.")] = "",
) -> Response:
    """From the provider: a session, and on to the console."""
    provider = _provider(gateway.door.provider)
    attempt = Attempt.read(request.cookies.get(ATTEMPT_COOKIE, ""))
    try:
        gateway.door.limit_sign_in(request)
        if attempt is None or attempt.state != state:
            raise UnauthenticatedError("this sign-in was not begun in this browser, or too long ago; sign in again")
        if error or not code:
            raise refused(error)
        principal = await provider.redeem(code, attempt)
        session = await gateway.door.keep_session(request, principal, provider.config.session)
    except SightlineError as failure:
        gateway.door.note_sign_in(request, CALLBACK, None, failure)
        reply: Response = _page(failure)
    else:
        gateway.door.note_sign_in(request, CALLBACK, principal, None)
        reply = RedirectResponse("/", 303, {"Cache-Control": "no-store"})
        age_s = int(provider.config.session)
        reply.set_cookie(COOKIE, session, age_s, httponly=True, samesite="strict", secure=_secure(request))
    reply.delete_cookie(ATTEMPT_COOKIE, path=_PATH, httponly=True, samesite="lax")
    return reply


def _provider(provider: OidcProvider | None) -> OidcProvider:
    if provider is None:
        raise HttpError(404, "nobody signs in at a provider here; use a token")
    return provider


def _secure(request: Request) -> bool:
    return request.url.scheme == "https" or request.headers.get("X-Forwarded-Proto") == "https"


def _page(error: SightlineError) -> Response:
    log.info("sign-in: %s", error)
    text = _PAGE.format(sentence=html.escape(str(error).rstrip(".")))
    return HTMLResponse(text, status_of(error), {"Cache-Control": "no-store"})
