"""``OidcProvider``: the sign-in provider over HTTP: discovery, keys, codes for tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from cluster.config.security import OidcConfig
from cluster.errors import ConfigError, ForbiddenError, SightlineError, UnauthenticatedError, UnavailableError
from cluster.security.limits import RateLimit
from cluster.security.oidc import Attempt, Claims, Grant, UnknownKeyError
from cluster.security.roles import Principal

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

CALLBACK = "/v1/sign-in/callback"
TIMEOUT_S = 5.0
"""Of one request to the provider."""
REFRESH_S = 3600.0
"""Age at which the provider's document and keys are read again."""
RETRY_S = 10.0
"""Least time between two readings: a token with an invented key asks the provider nothing more often."""
MOST_BYTES = 2**20


class OidcProvider:
    """Used on one event loop. Its document and keys are read when they are needed, and stay while it is down.

    ``rate``: of sign-ins from one address for which the provider is asked. Raises ``ConfigError``: the secret or the
    authority cannot be read."""

    def __init__(self, config: OidcConfig) -> None:
        self.config = config
        self.claims = Claims(
            config.issuer,
            [Grant(each.group, frozenset(each.roles), tuple(each.cameras)) for each in config.groups],
            config.name_claim,
            config.groups_claim,
            config.clock_skew_s,
        )
        self._redirect = config.url.rstrip("/") + CALLBACK
        self._secret, self._tls = _files(config)
        self._document: dict[str, str | list[str]] = {}
        self._keys: KeySet | None = None
        self._read_s = self._tried_s = float("-inf")
        self._reading = asyncio.Lock()
        self.rate = RateLimit(1.0, 30)
        self._refreshing: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Host of the provider, as people know it."""
        return urlsplit(self.config.issuer).hostname or self.config.issuer

    def refresh(self) -> None:
        """Read document and keys in the background, unless that is under way or was tried a moment ago."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.get_running_loop().create_task(self._refresh(), name="oidc keys")

    async def stop(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait([self._refreshing])

    def verify(self, token: str) -> Principal:
        """Whose bearer JWT it is.

        Raises:
            UnauthenticatedError: it is forged, expired or for somebody else.
            ForbiddenError: no group of it has a role here.
            UnavailableError: its key is being read; it may be tried again.
        """
        assert self.config.bearer_audience is not None, "asked only where bearers are accepted"
        if time.monotonic() - self._read_s > REFRESH_S:
            self.refresh()
        if self._keys is None:
            raise UnavailableError(f"the keys of {self.name} are not read yet; try again")
        try:
            return self.claims.principal(self.claims.verify(token, self._keys, self.config.bearer_audience))
        except UnknownKeyError:
            if time.monotonic() - self._tried_s < RETRY_S:
                raise
            self.refresh()
            raise UnavailableError(f"the new keys of {self.name} are being read; try again") from None

    async def address(self, attempt: Attempt) -> str:
        """Where a browser goes to sign in. Raises ``UnavailableError``: the provider cannot be reached, or says
        nothing useful."""
        await self._read()
        query = {
            "response_type": "code",
            "client_id": self.config.client_id,
            "redirect_uri": self._redirect,
            "scope": " ".join(self.config.scopes),
            "state": attempt.state,
            "nonce": attempt.nonce,
            "code_challenge": attempt.challenge,
            "code_challenge_method": "S256",
        }
        endpoint = self._endpoint("authorization_endpoint")
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(query)}"

    async def redeem(self, code: str, attempt: Attempt) -> Principal:
        """Who has signed in, for the ``code`` that the provider gave to the browser.

        Raises:
            UnauthenticatedError: the provider or we refuse it.
            ForbiddenError: the person is in no group with a role here.
            UnavailableError: the provider cannot be reached.
        """
        await self._read()
        await self._renew()
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._redirect,
            "code_verifier": attempt.verifier,
            "client_id": self.config.client_id,
        }
        headers = {}
        if self._secret:
            methods = self._document.get("token_endpoint_auth_methods_supported", ["client_secret_basic"])
            if "client_secret_basic" in methods:
                import aiohttp

                identity = aiohttp.BasicAuth(quote(self.config.client_id, safe=""), quote(self._secret, safe=""))
                headers["Authorization"] = identity.encode()
            else:
                form["client_secret"] = self._secret
        tokens = await self._ask("POST", self._endpoint("token_endpoint"), data=form, headers=headers)
        claims = await self._verified(str(tokens.get("id_token", "")), attempt.nonce)
        if not self.claims.groups(claims) and "userinfo_endpoint" in self._document:
            claims |= await self._userinfo(str(tokens.get("access_token", "")), claims)
        return self.claims.principal(claims)

    async def _verified(self, token: str, nonce: str) -> dict[str, Any]:
        assert self._keys is not None, "read before"
        try:
            return self.claims.verify(token, self._keys, self.config.client_id, nonce=nonce)
        except UnknownKeyError:
            # The provider has changed its keys since.
            await self._read(again=True)
            return self.claims.verify(token, self._keys, self.config.client_id, nonce=nonce)

    async def _userinfo(self, access_token: str, claims: Mapping[str, Any]) -> dict[str, Any]:
        """Name and groups, where the ID token has none (OpenID Connect Core 5.3)."""
        headers = {"Authorization": f"Bearer {access_token}"}
        found = await self._ask("GET", self._endpoint("userinfo_endpoint"), headers=headers)
        if found.get("sub") != claims["sub"]:
            raise UnauthenticatedError("the provider told of another person than the one who signed in")
        return {name: value for name, value in found.items() if name not in claims}

    async def _refresh(self) -> None:
        try:
            await self._read(again=True)
        except SightlineError as error:
            log.warning("signing in: %s", error)

    async def _read(self, *, again: bool = False) -> None:
        """Read document and keys where they are missing or old, or ``again``; old ones stay if that fails."""
        async with self._reading:
            now_s = time.monotonic()
            old = now_s - self._read_s > REFRESH_S
            if self._keys is not None and (not (old or again) or now_s - self._tried_s < RETRY_S):
                return
            self._tried_s = now_s
            await self._renew()
            try:
                await self._read_anew()
                self._read_s = now_s
            except UnavailableError as error:
                if self._keys is None:
                    raise
                log.warning("signing in: %s", error)

    async def _read_anew(self) -> None:
        try:
            document = await self._ask("GET", f"{self.config.issuer.rstrip('/')}/.well-known/openid-configuration")
            if document.get("issuer") != self.config.issuer:
                raise UnavailableError(
                    f"{self.name} calls itself {document.get('issuer')!r}, not {self.config.issuer!r}; write "
                    "security.oidc.issuer as it does"
                )
            self._document = document
            found = await self._ask("GET", self._endpoint("jwks_uri"))
            # Without keys for encryption, and symmetric ones.
            keys = [key for key in found["keys"] if key.get("use", "sig") == "sig" and key.get("kty") != "oct"]
            self._keys = KeySet.import_key_set({"keys": keys})
        except (JoseError, ValueError, TypeError, KeyError) as error:
            raise UnavailableError(f"{self.name} has published no keys that can be used: {error}") from None

    async def _renew(self) -> None:
        """Read secret and authority again; the old ones stay while a file cannot be read."""
        with contextlib.suppress(ConfigError):
            self._secret, self._tls = await asyncio.to_thread(_files, self.config)

    def _endpoint(self, name: str) -> str:
        address = str(self._document.get(name, ""))
        scheme = urlsplit(address).scheme
        if scheme != "https" and scheme != urlsplit(self.config.issuer).scheme:
            raise UnavailableError(f"{self.name} has no {name} that can be used")
        return address

    async def _ask(self, method: str, address: str, **options: Any) -> dict[str, Any]:
        """JSON of a reply. Raises ``UnavailableError``, and ``UnauthenticatedError`` where a code is refused."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(method, address, ssl=self._tls, allow_redirects=False, **options) as reply,
            ):
                found = await _body(reply)
        except TimeoutError:
            raise UnavailableError(f"the sign-in provider {self.name} did not answer within {TIMEOUT_S:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise UnavailableError(
                f"the sign-in provider {self.name} cannot be reached: {type(error).__name__}"
            ) from None
        if reply.status == 400 and found.get("error") == "invalid_grant":
            raise UnauthenticatedError("the provider refuses this sign-in (invalid_grant); sign in again")
        if reply.status != 200:
            said = found.get("error", "") if isinstance(found.get("error", ""), str) else ""
            raise UnavailableError(f"the sign-in provider {self.name} answered {reply.status} {said[:80]}".rstrip())
        return found


async def _body(reply: aiohttp.ClientResponse) -> dict[str, Any]:
    data = bytearray()
    async for piece in reply.content.iter_chunked(64 * 2**10):
        data += piece
        if len(data) > MOST_BYTES:
            return {}
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _files(config: OidcConfig) -> tuple[str, ssl.SSLContext | bool]:
    """The client's secret, empty without one, and the authority of the provider, True for the system's."""
    secret = ""
    try:
        if (path := config.client_secret_file) is not None:
            secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"security.oidc.client_secret_file {path} cannot be read: {error}") from None
    if path is not None and not secret:
        raise ConfigError(f"security.oidc.client_secret_file {path} is empty")
    try:
        return secret, config.ca_file is None or ssl.create_default_context(cafile=config.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"security.oidc.ca_file {config.ca_file} cannot be used: {error}") from None


def refused(error: str) -> SightlineError:
    """What the provider says to the browser in place of a code (RFC 6749, 4.1.2.1)."""
    if error == "access_denied":
        return ForbiddenError("the sign-in was declined at the provider")
    if error in ("server_error", "temporarily_unavailable"):
        return UnavailableError("the provider cannot sign anybody in just now; try again")
    known = error.isascii() and error.replace("_", "").isalnum() and len(error) <= 40
    return UnauthenticatedError(f"the provider did not sign you in{f' ({error})' if known else ''}; sign in again")
