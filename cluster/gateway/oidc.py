"""Client of the OpenID Connect provider: discovery, signing keys, exchange of codes for tokens (``OidcProvider``)."""

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
from cluster.gateway.claims import Attempt, Claims, UnknownKeyError
from cluster.security.limits import RateLimit
from cluster.security.roles import Principal

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

CALLBACK = "/v1/sign-in/callback"
TIMEOUT_S = 5.0
"""Timeout of one request to the provider, in seconds."""
REFRESH_S = 3600.0
"""Age, in seconds, at which the discovery document and keys are refreshed."""
RETRY_S = 10.0
"""Minimum interval of refreshes, so that tokens with made-up key ids cannot flood the provider."""
MOST_BYTES = 2**20


class OidcProvider:
    """Used on one event loop. Fetches the discovery document and keys on demand, and keeps them while the provider is
    down.

    ``rate``: limit of code redemptions per address. Raises ``ConfigError``: the client secret or CA cannot be read."""

    def __init__(self, config: OidcConfig) -> None:
        self.config = config
        self.claims = Claims(config)
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
        """Host name of the provider, to show to users."""
        return urlsplit(self.config.issuer).hostname or self.config.issuer

    def refresh(self) -> None:
        """Refresh document and keys in the background, unless a refresh is running or was just tried."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.get_running_loop().create_task(self._refresh(), name="oidc keys")

    async def stop(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait([self._refreshing])

    def verify(self, token: str) -> Principal:
        """Principal of a bearer JWT.

        Raises:
            UnauthenticatedError: it is forged, expired or for another audience.
            ForbiddenError: none of its groups has a role here.
            UnavailableError: its key is being fetched; try again.
        """
        assert self.config.bearer_audience is not None, "called only if bearer tokens are accepted"
        if time.monotonic() - self._read_s > REFRESH_S:
            self.refresh()
        if self._keys is None:
            raise UnavailableError(f"the keys of {self.name} have not been fetched yet; try again")
        try:
            return self.claims.principal(self.claims.verify(token, self._keys, self.config.bearer_audience))
        except UnknownKeyError:
            if time.monotonic() - self._tried_s < RETRY_S:
                raise
            self.refresh()
            raise UnavailableError(f"the new keys of {self.name} are being fetched; try again") from None

    async def address(self, attempt: Attempt) -> str:
        """Authorization URL to which the browser is redirected. Raises ``UnavailableError``: the provider cannot be
        reached, or its document is unusable."""
        await self._fetch_if_old()
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
        """Redeem the ``code`` that the provider gave to the browser; returns who signed in.

        Raises:
            UnauthenticatedError: the code or its ID token is refused.
            ForbiddenError: the person is in no group with a role here.
            UnavailableError: the provider cannot be reached.
        """
        await self._fetch_if_old()
        await self._reload_files()
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
        assert self._keys is not None, "fetched before"
        try:
            return self.claims.verify(token, self._keys, self.config.client_id, nonce=nonce)
        except UnknownKeyError:
            # The provider has rotated its keys.
            await self._fetch_if_old(force=True)
            return self.claims.verify(token, self._keys, self.config.client_id, nonce=nonce)

    async def _userinfo(self, access_token: str, claims: Mapping[str, Any]) -> dict[str, Any]:
        """Claims that the ID token lacks, such as groups (OpenID Connect Core 5.3)."""
        headers = {"Authorization": f"Bearer {access_token}"}
        found = await self._ask("GET", self._endpoint("userinfo_endpoint"), headers=headers)
        if found.get("sub") != claims["sub"]:
            raise UnauthenticatedError("the provider's userinfo is of another person than its ID token")
        return {name: value for name, value in found.items() if name not in claims}

    async def _refresh(self) -> None:
        try:
            await self._fetch_if_old(force=True)
        except SightlineError as error:
            log.warning("sign-in provider: %s", error)

    async def _fetch_if_old(self, *, force: bool = False) -> None:
        """Fetch document and keys if missing, expired or ``force``; a failed refresh keeps the old ones."""
        async with self._reading:
            now_s = time.monotonic()
            old = now_s - self._read_s > REFRESH_S
            if self._keys is not None and (not (old or force) or now_s - self._tried_s < RETRY_S):
                return
            self._tried_s = now_s
            await self._reload_files()
            try:
                await self._fetch()
                self._read_s = now_s
            except UnavailableError as error:
                if self._keys is None:
                    raise
                log.warning("sign-in provider: %s", error)

    async def _fetch(self) -> None:
        try:
            document = await self._ask("GET", f"{self.config.issuer.rstrip('/')}/.well-known/openid-configuration")
            if document.get("issuer") != self.config.issuer:
                raise UnavailableError(
                    f"{self.name} publishes the issuer {document.get('issuer')!r}, not {self.config.issuer!r}; correct "
                    "security.oidc.issuer"
                )
            self._document = document
            found = await self._ask("GET", self._endpoint("jwks_uri"))
            # Skips encryption keys and symmetric keys.
            keys = [key for key in found["keys"] if key.get("use", "sig") == "sig" and key.get("kty") != "oct"]
            self._keys = KeySet.import_key_set({"keys": keys})
        except (JoseError, ValueError, TypeError, KeyError) as error:
            raise UnavailableError(f"{self.name} has published no usable keys: {error}") from None

    async def _reload_files(self) -> None:
        """Read client secret and CA again, keeping the old ones while a file cannot be read."""
        with contextlib.suppress(ConfigError):
            self._secret, self._tls = await asyncio.to_thread(_files, self.config)

    def _endpoint(self, name: str) -> str:
        address = str(self._document.get(name, ""))
        scheme = urlsplit(address).scheme
        if scheme != "https" and scheme != urlsplit(self.config.issuer).scheme:
            raise UnavailableError(f"{self.name} has no usable {name}")
        return address

    async def _ask(self, method: str, address: str, **options: Any) -> dict[str, Any]:
        """Request JSON of the provider. Raises ``UnavailableError``; ``UnauthenticatedError``: the code was refused."""
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
            raise UnauthenticatedError("the provider refused this sign-in (invalid_grant); sign in again")
        if reply.status != 200:
            detail = found.get("error", "") if isinstance(found.get("error", ""), str) else ""
            raise UnavailableError(f"the sign-in provider {self.name} answered {reply.status} {detail[:80]}".rstrip())
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
    """Read the client secret (empty: none) and the TLS context of the provider's CA (True: the system's CAs)."""
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
    """Map an error that the provider returned instead of a code (RFC 6749, 4.1.2.1)."""
    if error == "access_denied":
        return ForbiddenError("the sign-in was declined at the provider")
    if error in ("server_error", "temporarily_unavailable"):
        return UnavailableError("the provider is temporarily unavailable; try again")
    known = error.isascii() and error.replace("_", "").isalnum() and len(error) <= 40
    return UnauthenticatedError(f"the provider did not sign you in{f' ({error})' if known else ''}; sign in again")
