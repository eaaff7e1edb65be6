"""The gateway's door: every call is told apart by its token, checked against the rules, rated and written down."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio

from cluster.config.security import SecurityConfig
from cluster.errors import CapacityError, ForbiddenError, SightlineError, UnauthenticatedError
from cluster.security.audit import AuditLog
from cluster.security.limits import RateLimit
from cluster.security.roles import OPEN, RULES, Principal, Role, Rule, serve_as
from cluster.security.tokens import TokenFile
from cluster.wire.status import abort

log = logging.getLogger(__name__)

Verify = Callable[[str], Principal]
Context: TypeAlias = grpc.aio.ServicerContext

REFLECTION = "/grpc.reflection."
NOBODY = "?"
"""Who called, where there is no telling."""


STRANGERS_NOTED = 60
"""Refusals of callers without a token that are written down at once; then one a second, with the number of others."""


class Guard(grpc.aio.ServerInterceptor):
    """Lets calls through that :data:`~cluster.security.roles.RULES` allow.

    Args:
        verify: secret -> principal; raises ``UnauthenticatedError``.
        rate: calls per principal.
        audit: where calls are written down; ``None``: nowhere.
    """

    def __init__(self, verify: Verify, *, rate: RateLimit | None = None, audit: AuditLog | None = None) -> None:
        self._verify = verify
        self._rate = rate
        self._audit = audit
        # The log is turned over by its size: whoever is refused for ever must not push out what others did.
        self._strangers = RateLimit(1.0, STRANGERS_NOTED)
        self._unnoted = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """See ``grpc.aio.ServerInterceptor``."""
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or method in OPEN:
            return handler
        try:
            authorization = dict(handler_call_details.invocation_metadata or ()).get("authorization")
            principal = self.admit(authorization, method)
        except SightlineError as error:
            return _refusal(error)
        if method.startswith(REFLECTION):
            return handler
        return _answering(handler, self._guarded(handler, method, principal, _rule(method)))

    def admit(self, authorization: str | bytes | None, method: str) -> Principal:
        """Who calls, if they may make this call at all and do not make too many; a refusal is written down.

        Raises:
            UnauthenticatedError: see :meth:`identify`.
            ForbiddenError: the role is missing.
            CapacityError: it calls too often.
        """
        who = NOBODY
        try:
            principal = self.identify(authorization)
            who = principal.name
            rule = _rule(method)
            principal.require(rule.role)
            if self._rate is not None:
                self._rate.acquire(who, rule.cost)
        except SightlineError as error:
            self._note(who, method, [], error)
            raise
        return principal

    def identify(self, authorization: str | bytes | None) -> Principal:
        """Whose ``Authorization`` header this is.

        Raises:
            UnauthenticatedError: there is none, or its token is unknown or expired.
        """
        text = authorization.decode("utf-8", "replace") if isinstance(authorization, bytes) else authorization or ""
        scheme, _, secret = text.partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise UnauthenticatedError("this gateway wants a token; set SIGHTLINE_TOKEN, or send it as a bearer token")
        return self._verify(secret.strip())

    def check(self, principal: Principal, method: str, cameras: list[str], text: str = "") -> None:
        """Whether ``principal`` may do this with these cameras; written down either way.

        Raises:
            ForbiddenError: it may not.
        """
        rule = _rule(method)
        try:
            principal.require(rule.role, cameras)
        except SightlineError as error:
            self._note(principal.name, method, cameras, error)
            raise
        if rule.audited:
            self._note(principal.name, method, cameras, None, text)

    def _guarded(self, handler: Any, method: str, principal: Principal, rule: Rule) -> Callable[..., Awaitable[Any]]:
        behavior = _behavior(handler)

        async def serve(request: Any, context: Context) -> Any:
            serve_as(principal)
            try:
                # A stream's requests come later, and name their camera to the servicer.
                named = getattr(request, rule.camera) if rule.camera else []
                cameras = [named] if isinstance(named, str) else list(named)
                self.check(principal, method, cameras, getattr(request, "text", "") if rule.role is Role.ASK else "")
            except SightlineError as error:
                await abort(context, error)
            return await behavior(request, context)

        return serve

    def _note(self, who: str, method: str, cameras: list[str], error: Exception | None, text: str = "") -> None:
        if who == NOBODY:
            try:
                self._strangers.acquire(NOBODY)
            except CapacityError:
                self._unnoted += 1
                return
            text = f"and {self._unnoted} calls before, of which nothing was written" if self._unnoted else ""
            self._unnoted = 0
        if error is not None:
            log.info("%s: %s refused: %s", who, method, error)
        if self._audit is not None:
            outcome = "ok" if error is None else type(error).__name__.removesuffix("Error").lower()
            self._audit.write(who, method, cameras=cameras, outcome=outcome, text=text)


def _rule(method: str) -> Rule:
    if method.startswith(REFLECTION):
        return Rule(Role.VIEW, audited=False)
    try:
        return RULES[method]
    except KeyError:
        raise ForbiddenError(f"nobody may call {method} from outside") from None


def _refusal(error: SightlineError) -> grpc.RpcMethodHandler:
    """Ends the call before anything of its request is read: of a stream gRPC reads nothing by itself."""

    async def refuse(_requests: Any, context: Context) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _behavior(handler: Any) -> Callable[..., Awaitable[Any]]:
    names = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    behavior: Callable[..., Awaitable[Any]] = next(filter(None, (getattr(handler, name) for name in names)))
    return behavior


def _answering(handler: Any, behavior: Callable[..., Awaitable[Any]]) -> grpc.RpcMethodHandler:
    """The same method with another behaviour."""
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(
        behavior, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
    )


def make_guard(security: SecurityConfig) -> Guard | None:
    """Who asks every call for its token; ``None``: nobody.

    Raises:
        ConfigError: the tokens cannot be read.
    """
    if security.tokens_file is None:
        return None
    return Guard(
        TokenFile(Path(security.tokens_file)).verify,
        rate=RateLimit(security.calls_per_s, security.calls_burst),
        audit=None
        if security.audit_log is None
        else AuditLog(Path(security.audit_log), retention_s=security.audit_retention),
    )
