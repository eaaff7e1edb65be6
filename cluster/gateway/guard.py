"""Authenticates, authorises, rate-limits and audits every gateway call (``Guard``)."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc
import grpc.aio

from cluster import metrics
from cluster.config.security import SecurityConfig
from cluster.errors import (
    CapacityError,
    ConfigError,
    ForbiddenError,
    SightlineError,
    UnauthenticatedError,
    UnavailableError,
)
from cluster.gateway.oidc import CALLBACK, OidcProvider
from cluster.security.audit import AuditLog, QueuedAuditLog
from cluster.security.limits import RateLimit
from cluster.security.roles import NOTE_LATE, OPEN, PUSH, RULES, Principal, Role, Rule, current_peer, serve_as
from cluster.security.tokens import TokenFile
from cluster.wire.memory_wire import MAX_NAME, MAX_QUESTION
from cluster.wire.server import host_of
from cluster.wire.status import RefusedError

log = logging.getLogger(__name__)

Verify = Callable[[str], Principal]
Context: TypeAlias = grpc.aio.ServicerContext

Credentials: TypeAlias = str | bytes | Principal | None
"""An ``Authorization`` header, or the principal of a session."""

_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
"""Fields of a gRPC method handler, one of which holds its behaviour."""
REFLECTION = "/grpc.reflection."
UNKNOWN_CALLER = Principal("?", frozenset(), ())
"""Principal of unauthenticated calls."""

REFUSALS_NOTED = 60
"""Burst of refusals audited per token, and for all callers without one; after it one a second, which counts the others
and their addresses."""
RECHECK_S = 15.0
"""Interval, in seconds, at which the permissions of a streaming call are rechecked; over HTTP it is ``ping_s``."""
MOST_NAMED, NAMED_AT_ONCE = 5000, 50
"""Limit of cameras named by a call, and how many cost as much as one call, since each is audited."""
PEERS_NAMED = 8
"""Limit of addresses in one audit line about suppressed refusals."""


class Guard(grpc.aio.ServerInterceptor):
    """Admits the calls that :data:`~cluster.security.roles.RULES` allow.

    Args:
        verify: secret -> principal; raises ``UnauthenticatedError``.
        rate: limit of calls per principal.
        audit: audit log; ``None``: no auditing.
        provider: sign-in provider, if any.
        tokens: whether API tokens are accepted.
    """

    def __init__(
        self,
        verify: Verify,
        *,
        rate: RateLimit | None = None,
        audit: AuditLog | None = None,
        provider: OidcProvider | None = None,
        tokens: bool = True,
    ) -> None:
        self.provider, self.tokens = provider, tokens
        self._verify = verify
        self._rate = rate
        self._audit = audit
        # The log rotates by size: one caller's endless refusals must not push out the records of others.
        self._refusals = RateLimit(1.0, REFUSALS_NOTED)
        self._suppressed: dict[str, Counter[str]] = {}

    def close(self) -> None:
        """Flush the audit log; may block for seconds."""
        if self._audit is not None:
            self._audit.close()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler: Any = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or method in OPEN:
            return handler
        authorization = dict(handler_call_details.invocation_metadata or ()).get("authorization")
        principal, error = self._admit(authorization, method)
        if error is not None:
            return self._refusal(principal, method, error)
        if method.startswith(REFLECTION):
            return handler
        kind = next(each for each in _KINDS if getattr(handler, each))
        serve = self._guarded(getattr(handler, kind), method, principal)
        if handler.request_streaming or handler.response_streaming:
            serve = self._rechecked(serve, method, principal, authorization)
        return handler._replace(**{kind: serve})

    def admit(self, credentials: Credentials, method: str, peer: str) -> Principal:
        """Identify the caller, and check role and rate limit of a call from ``peer``; refusals are audited.

        Raises:
            UnauthenticatedError: see :meth:`identify`.
            ForbiddenError: the role is missing.
            RateLimitError: the rate limit is exceeded.
        """
        principal, error = self._admit(credentials, method)
        if error is not None:
            self._note(principal.name, peer, method, [], error=error)
            raise error
        return principal

    def _admit(self, credentials: Credentials, method: str) -> tuple[Principal, SightlineError | None]:
        principal = UNKNOWN_CALLER
        try:
            principal = self.identify(credentials)
            rule = _rule(method)
            principal.require(rule.role)
            if self._rate is not None:
                self._rate.acquire(principal.name, rule.cost)
        except SightlineError as error:
            return principal, error
        return principal, None

    def _refusal(self, principal: Principal, method: str, error: SightlineError) -> grpc.RpcMethodHandler:
        """Handler that refuses the call before its request is read: gRPC reads nothing ahead of a stream handler."""

        async def refuse(_requests: Any, context: Context) -> None:
            self._note(principal.name, _address(context), method, [], error=error)
            raise error

        return grpc.stream_stream_rpc_method_handler(refuse)

    def identify(self, credentials: Credentials) -> Principal:
        """Principal of the credentials. Raises ``UnauthenticatedError``: there are none, or the token is unknown or
        expired."""
        if isinstance(credentials, Principal):
            return credentials
        text = credentials.decode("utf-8", "replace") if isinstance(credentials, bytes) else credentials or ""
        scheme, _, secret = text.partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise UnauthenticatedError("this gateway requires a token; set SIGHTLINE_TOKEN or send a bearer token")
        return self._verify(secret.strip())

    def note_sign_in(self, principal: Principal | None, error: Exception | None, peer: str) -> None:
        self._note((principal or UNKNOWN_CALLER).name, peer, CALLBACK, [], error=error)

    def check(self, principal: Principal, method: str, cameras: list[str], text: str = "") -> None:
        """Check that ``principal`` may do this with these cameras, and audit the outcome. Raises ``ForbiddenError``;
        ``ConfigError``: too many or too long names."""
        rule = _rule(method)
        try:
            if len(cameras) > MOST_NAMED or any(len(each) > MAX_NAME for each in cameras):
                cameras = []
                raise ConfigError(f"a call names at most {MOST_NAMED} cameras, of {MAX_NAME} characters each")
            if self._rate is not None:
                self._rate.charge(principal.name, len(cameras) // NAMED_AT_ONCE)
            principal.require(rule.role, cameras, everybody=rule.everybody)
        except SightlineError as error:
            self._note(principal.name, current_peer(), method, cameras, text, error=error)
            raise
        note = partial(self._note, principal.name, current_peer(), method, error=None, text=text)
        if rule.audited and rule.late and not cameras:
            NOTE_LATE.set([note])
        elif rule.audited:
            note(cameras)

    def check_request(self, principal: Principal, method: str, request: Any) -> tuple[list[str], str]:
        """As :meth:`check`, for the cameras that a message names; returns them and the text for the audit log."""
        rule = _rule(method)
        named = getattr(request, rule.camera) if rule.camera else []
        cameras = [named] if isinstance(named, str) else list(named)
        text = ", ".join(str(getattr(request, each)).strip() or "*" for each in rule.about)[:MAX_QUESTION]
        self.check(principal, method, cameras, text)
        return cameras, text

    @contextlib.contextmanager
    def serving(self, principal: Principal, method: str, request: Any) -> Iterator[None]:
        """As :meth:`check_request`; a failure inside the context is audited too, except for pushes."""
        cameras, text = self.check_request(principal, method, request)
        try:
            yield
        except SightlineError as error:
            if _rule(method).audited and method != PUSH:
                self._note(principal.name, current_peer(), method, cameras, text, error=error)
            raise

    def _guarded(
        self, behavior: Callable[..., Awaitable[Any]], method: str, principal: Principal
    ) -> Callable[..., Awaitable[Any]]:
        async def serve(request: Any, context: Context) -> Any:
            serve_as(principal, _address(context))
            # A request stream is checked by the servicer, which reads the message that names its camera.
            with self.serving(principal, method, request):
                return await behavior(request, context)

        return serve

    def _rechecked(
        self, serve: Callable[..., Awaitable[Any]], method: str, principal: Principal, authorization: Credentials
    ) -> Callable[..., Awaitable[Any]]:
        """End the call once its token expires, is revoked, or has other permissions."""

        async def recheck(request: Any, context: Context) -> Any:
            serving = asyncio.ensure_future(serve(request, context))
            try:
                while not (await asyncio.wait({serving}, timeout=RECHECK_S))[0]:
                    error = self._ended(principal, authorization)
                    if error is not None:
                        self._note(principal.name, _address(context), method, [], error=error)
                        raise error
                return await serving
            finally:
                serving.cancel()
                await asyncio.wait({serving})

        return recheck

    def _ended(self, principal: Principal, authorization: Credentials) -> SightlineError | None:
        """Reason to end a running call of ``principal``; None: it may continue."""
        try:
            if self.identify(authorization) == principal:
                return None
        except UnavailableError:
            # Cannot be decided now.
            return None
        except SightlineError as error:
            return error
        return UnavailableError(f"the permissions of {principal.name!r} have changed; call again")

    def _note(
        self, who: str, peer: str, method: str, cameras: list[str], text: str = "", *, error: Exception | None = None
    ) -> None:
        if error is not None:
            suppressed = self._suppressed.setdefault(who, Counter())
            try:
                self._refusals.acquire(who)
            except CapacityError:
                suppressed[peer if peer in suppressed or len(suppressed) < PEERS_NAMED else "others"] += 1
                return
            del self._suppressed[who]
            if suppressed:
                peers = ", ".join(f"{count} from {each}" for each, count in suppressed.most_common())
                text += f"{text and '; '}and {suppressed.total()} earlier refusals not logged: {peers}"
            log.info("%s at %s: %s refused: %s", who, peer, method, error)
        if self._audit is not None:
            outcome = "ok" if error is None else type(error).__name__.removesuffix("Error").lower()
            outcome = error.code.name.lower() if isinstance(error, RefusedError) else outcome
            self._audit.write(who, method, cameras=cameras, outcome=outcome, peer=peer, text=text)


def _rule(method: str) -> Rule:
    if method.startswith(REFLECTION):
        return Rule(Role.VIEW, audited=False)
    try:
        return RULES[method]
    except KeyError:
        raise ForbiddenError(f"{method} may not be called from outside the cluster") from None


def _address(context: Context) -> str:
    """Peer address as in HTTP, without port: of ``ipv4:10.0.0.7:4711`` or ``ipv6:%5B::1%5D:4711``."""
    return unquote(host_of(context.peer()).partition(":")[2]).strip("[]")


def make_guard(security: SecurityConfig, audit_suffix: str = "") -> Guard | None:
    """Guard of a gateway; ``None``: calls need no token. ``audit_suffix``: added to the audit log's file name, since
    several gateways may share its folder. Raises ``ConfigError``: the tokens or the provider's files cannot be read, or
    an audit log is configured without authentication."""
    if not security.guarded:
        if security.audit_log is not None:
            raise ConfigError(
                "security.audit_log needs authenticated callers: set security.tokens_file or security.oidc"
            )
        return None
    tokens = None
    if security.tokens_file is not None:
        tokens = TokenFile(Path(security.tokens_file), on_stale=metrics.tokens_stale.set)
    provider = None if security.oidc is None else OidcProvider(security.oidc)
    audit = None
    if security.audit_log is not None:
        path = Path(security.audit_log)
        audit = QueuedAuditLog(
            path.with_stem(path.stem + audit_suffix),
            retention_s=security.audit_retention,
            on_lost=metrics.audit_lines_lost.inc,
        )

    def verify(secret: str) -> Principal:
        # JWTs contain two dots, API tokens none.
        if provider is not None and provider.config.bearer_audience is not None and secret.count(".") == 2:
            return provider.verify(secret)
        if tokens is None:
            raise UnauthenticatedError("this gateway accepts no API tokens; sign in at its console")
        return tokens.verify(secret)

    return Guard(
        verify,
        rate=RateLimit(security.calls_per_s, security.calls_burst),
        audit=audit,
        provider=provider,
        tokens=tokens is not None,
    )
