"""The gateway's door: every call is told apart by its token, checked against the rules, rated and written down."""

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
from cluster.gateway.oidc import OidcProvider
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
"""Fields of a method's handler, one of which has what answers it."""
REFLECTION = "/grpc.reflection."
STRANGER = Principal("?", frozenset(), ())
"""Who called, where there is no telling."""

REFUSALS_NOTED = 60
"""Refusals of one token, or of all callers without one, that are written down at once; then one a second, with the
number of others and where they came from."""
RECHECK_S = 15.0
"""Between looks whether the caller of a stream, which may have no end, may still make it; over HTTP it is
``ping_s``."""
MOST_NAMED, NAMED_AT_ONCE = 5000, 50
"""Most cameras that a call names, and how many of them cost as much as a call: each is written down."""
PEERS_NAMED = 8
"""Most addresses that such a line names."""


class Guard(grpc.aio.ServerInterceptor):
    """Lets calls through that :data:`~cluster.security.roles.RULES` allow.

    Args:
        verify: secret -> principal; raises ``UnauthenticatedError``.
        rate: calls per principal.
        audit: where calls are written down; ``None``: nowhere.
        provider: where people sign in; ``None``: nowhere.
        tokens: whether there are API tokens.
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
        # The log is turned over by its size: whoever is refused for ever must not push out what others did.
        self._refusals = RateLimit(1.0, REFUSALS_NOTED)
        self._unnoted: dict[str, Counter[str]] = {}

    def close(self) -> None:
        """Write what waits for the audit log; may block for seconds."""
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
        """Who calls from ``peer``, if they may make this call at all and do not make too many; a refusal is written
        down.

        Raises:
            UnauthenticatedError: see :meth:`identify`.
            ForbiddenError: the role is missing.
            CapacityError: it calls too often.
        """
        principal, error = self._admit(credentials, method)
        if error is not None:
            self._note(principal.name, peer, method, [], error=error)
            raise error
        return principal

    def _admit(self, credentials: Credentials, method: str) -> tuple[Principal, SightlineError | None]:
        principal = STRANGER
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
        """Ends the call before anything of its request is read: of a stream gRPC reads nothing by itself."""

        async def refuse(_requests: Any, context: Context) -> None:
            self._note(principal.name, _address(context), method, [], error=error)
            raise error

        return grpc.stream_stream_rpc_method_handler(refuse)

    def identify(self, credentials: Credentials) -> Principal:
        """Whose credentials these are. Raises ``UnauthenticatedError``: there is none, or its token is unknown or
        expired."""
        if isinstance(credentials, Principal):
            return credentials
        text = credentials.decode("utf-8", "replace") if isinstance(credentials, bytes) else credentials or ""
        scheme, _, secret = text.partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise UnauthenticatedError("this gateway wants a token; set SIGHTLINE_TOKEN, or send it as a bearer token")
        return self._verify(secret.strip())

    def note_sign_in(self, call: str, principal: Principal | None, error: Exception | None, peer: str) -> None:
        self._note((principal or STRANGER).name, peer, call, [], error=error)

    def check(self, principal: Principal, method: str, cameras: list[str], text: str = "") -> None:
        """Whether ``principal`` may do this with these cameras; written down either way. Raises ``ForbiddenError``:
        it may not; ``ConfigError``: it names too much."""
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
        """As :meth:`check`, with the cameras that a message names; returns them, and what else is written down."""
        rule = _rule(method)
        named = getattr(request, rule.camera) if rule.camera else []
        cameras = [named] if isinstance(named, str) else list(named)
        text = ", ".join(str(getattr(request, each)).strip() or "*" for each in rule.about)[:MAX_QUESTION]
        self.check(principal, method, cameras, text)
        return cameras, text

    @contextlib.contextmanager
    def serving(self, principal: Principal, method: str, request: Any) -> Iterator[None]:
        """As :meth:`check_request`; if the call fails inside, that is written down too, but of a push."""
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
            # A stream's requests come later, and name their camera to the servicer.
            with self.serving(principal, method, request):
                return await behavior(request, context)

        return serve

    def _rechecked(
        self, serve: Callable[..., Awaitable[Any]], method: str, principal: Principal, authorization: Credentials
    ) -> Callable[..., Awaitable[Any]]:
        """Ends the call once its token has ended, or is for something else."""

        async def follow(request: Any, context: Context) -> Any:
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

        return follow

    def _ended(self, principal: Principal, authorization: Credentials) -> SightlineError | None:
        """Why a call of ``principal`` must not go on."""
        try:
            if self.identify(authorization) == principal:
                return None
        except UnavailableError:
            # Nobody says so just now.
            return None
        except SightlineError as error:
            return error
        return UnavailableError(f"what {principal.name!r} may do was changed; call again")

    def _note(
        self, who: str, peer: str, method: str, cameras: list[str], text: str = "", *, error: Exception | None = None
    ) -> None:
        if error is not None:
            unnoted = self._unnoted.setdefault(who, Counter())
            try:
                self._refusals.acquire(who)
            except CapacityError:
                unnoted[peer if peer in unnoted or len(unnoted) < PEERS_NAMED else "others"] += 1
                return
            del self._unnoted[who]
            if unnoted:
                peers = ", ".join(f"{count} from {each}" for each, count in unnoted.most_common())
                text += f"{text and '; '}and {unnoted.total()} refusals before, of which nothing was written: {peers}"
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
        raise ForbiddenError(f"nobody may call {method} from outside") from None


def _address(context: Context) -> str:
    """As HTTP has it, of ``ipv4:10.0.0.7:4711`` or ``ipv6:%5B::1%5D:4711``."""
    return unquote(host_of(context.peer()).partition(":")[2]).strip("[]")


def make_guard(security: SecurityConfig, audit_suffix: str = "") -> Guard | None:
    """Who asks every call for its token; ``None``: nobody. ``audit_suffix``: of the audit log's name, where several
    gateways might write to one folder. Raises ``ConfigError``: the tokens, or files of the provider, cannot be read; an
    audit log of calls that nobody is asked a token for."""
    if not security.guarded:
        if security.audit_log is not None:
            raise ConfigError(
                "security.audit_log tells who called, and nobody is asked: set security.tokens_file or security.oidc"
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
        # API tokens have no dots, JWTs have two.
        if provider is not None and provider.config.bearer_audience is not None and secret.count(".") == 2:
            return provider.verify(secret)
        if tokens is None:
            raise UnauthenticatedError("this gateway knows no API tokens; sign in at its console")
        return tokens.verify(secret)

    return Guard(
        verify,
        rate=RateLimit(security.calls_per_s, security.calls_burst),
        audit=audit,
        provider=provider,
        tokens=tokens is not None,
    )
