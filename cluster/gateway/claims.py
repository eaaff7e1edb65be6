"""OpenID Connect: maps a provider's signed claims to principals. No sockets here.

OpenID Connect Core 1.0 section 3.1.3.7 (ID tokens), RFC 7519 (JWT), RFC 7636 (PKCE).
"""

import base64
import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from joserfc import jwt
from joserfc.errors import ExpiredTokenError, InvalidClaimError, InvalidKeyIdError, JoseError, MissingClaimError
from joserfc.jwk import KeySet

from cluster.config.security import OidcConfig
from cluster.errors import ForbiddenError, UnauthenticatedError
from cluster.security.roles import PERSON, Principal

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Public-key signatures only: never ``none``, nor HMAC with a key that everybody can read."""
_MOST_NAME = 128


class UnknownKeyError(UnauthenticatedError):
    """Signed with a key that the provider has not published, or only since its keys were fetched."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A sign-in in progress, kept by its browser: state, nonce and PKCE verifier, 256 random bits each."""

    state: str
    nonce: str
    verifier: str

    @classmethod
    def begin(cls) -> Self:
        return cls(*(secrets.token_urlsafe(32) for _ in range(3)))

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Parse :attr:`text`; ``None`` if malformed."""
        parts = text.split(".")
        return cls(*parts) if len(parts) == 3 and all(parts) else None

    @property
    def text(self) -> str:
        return f"{self.state}.{self.nonce}.{self.verifier}"

    @property
    def challenge(self) -> str:
        """``S256`` of the verifier (RFC 7636, 4.2)."""
        digest = hashlib.sha256(self.verifier.encode()).digest()
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


@dataclass(frozen=True)
class Claims:
    """Verifies an issuer's tokens, and maps their claims to principals."""

    config: OidcConfig
    clock: Callable[[], float] = time.time

    def verify(self, token: str, keys: KeySet, audience: str, *, nonce: str | None = None) -> dict[str, Any]:
        """Claims of a JWT for ``audience``; ``nonce``: that of the sign-in that it must belong to. Raises
        ``UnknownKeyError``; ``UnauthenticatedError``: forged, expired, for another audience, or not a JWT."""
        try:
            claims = dict(jwt.decode(token, keys, algorithms=ALGORITHMS).claims)
        except InvalidKeyIdError:
            raise UnknownKeyError("this token is signed with a key that the sign-in provider does not have") from None
        except (JoseError, ValueError, TypeError, RecursionError):
            raise UnauthenticatedError("this is not a token that the sign-in provider has signed") from None
        now_s = self.clock()
        registry = jwt.JWTClaimsRegistry(
            now=lambda: int(now_s),
            leeway=int(self.config.clock_skew_s),
            iss={"essential": True, "value": self.config.issuer},
            aud={"essential": True, "value": audience},
            exp={"essential": True},
            sub={"essential": True},
        )
        try:
            registry.validate(claims)
        except ExpiredTokenError:
            ago_s = now_s - float(claims["exp"])
            raise UnauthenticatedError(f"this sign-in expired {ago_s:.0f} s ago; sign in again") from None
        except MissingClaimError as error:
            raise UnauthenticatedError(f"the provider's token lacks {error.claim}") from None
        except InvalidClaimError as error:
            raise UnauthenticatedError(self._wrong(error.claim, claims, audience, now_s)) from None
        audiences = claims["aud"]
        if isinstance(audiences, list) and len(audiences) > 1 and claims.get("azp", audience) != audience:
            raise UnauthenticatedError("the provider's token was made for another client (azp)")
        if nonce is not None and not secrets.compare_digest(str(claims.get("nonce", "")).encode(), nonce.encode()):
            raise UnauthenticatedError("the provider's token belongs to another sign-in (nonce); sign in again")
        return claims

    def principal(self, claims: Mapping[str, Any]) -> Principal:
        """Principal of verified claims, by the first of the configured groups that they contain. Raises
        ``ForbiddenError``: they contain none."""
        name = claims.get(self.config.name_claim)
        name = name if isinstance(name, str) and name.strip() else str(claims["sub"])
        name = PERSON + "".join(letter for letter in name if letter.isprintable())[:_MOST_NAME]
        groups = self.groups(claims)
        for each in self.config.groups:
            if each.group in groups:
                return Principal(name, frozenset(each.roles), tuple(each.cameras))
        raise ForbiddenError(
            f"{name!r} is in none of the groups that may use this cluster; its operator lists them in "
            "security.oidc.groups"
        )

    def groups(self, claims: Mapping[str, Any]) -> list[str]:
        """Groups in the claims; empty if none."""
        found: Any = claims.get(self.config.groups_claim)
        if found is None:
            found = claims
            for part in self.config.groups_claim.split("."):
                found = found.get(part) if isinstance(found, Mapping) else None
        if isinstance(found, str):
            return [found]
        return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []

    def _wrong(self, claim: str | None, claims: Mapping[str, Any], audience: str, now_s: float) -> str:
        if claim == "aud":
            return f"the provider's token is for {claims['aud']!r}, not for {audience!r}"
        if claim == "iss":
            return f"the token comes from {claims['iss']!r}, not from {self.config.issuer!r}"
        if claim in ("iat", "nbf") and isinstance(claims[claim], int | float):
            ahead_s = claims[claim] - now_s
            return (
                f"the provider's token is from {ahead_s:.0f} s in the future; set the clocks, or raise "
                "security.oidc.clock_skew_s"
            )
        return f"{claim} in the provider's token is wrong"
