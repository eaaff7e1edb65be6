"""Errors and gRPC status codes, both ways: every failed call carries one sentence a user can act on.

A status made here is marked in the trailing metadata, so that a client can tell our sentence from gRPC's own text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import NoReturn, Protocol

import grpc
import grpc.aio

from cluster.errors import (
    CameraExistsError,
    CapacityError,
    ConfigError,
    ForbiddenError,
    NotReadyError,
    SightlineError,
    SourceError,
    UnauthenticatedError,
    UnavailableError,
    UnknownCameraError,
    UnknownIncidentError,
)
from cluster.redaction import redact

log = logging.getLogger(__name__)

MARK = "sightline-error"
Code = grpc.StatusCode

_CODES: tuple[tuple[type[BaseException], grpc.StatusCode], ...] = (
    (UnknownCameraError, Code.NOT_FOUND),
    (UnknownIncidentError, Code.NOT_FOUND),
    (CameraExistsError, Code.ALREADY_EXISTS),
    (NotReadyError, Code.FAILED_PRECONDITION),
    (ConfigError, Code.INVALID_ARGUMENT),
    (CapacityError, Code.RESOURCE_EXHAUSTED),
    (UnavailableError, Code.UNAVAILABLE),
    (UnauthenticatedError, Code.UNAUTHENTICATED),
    (ForbiddenError, Code.PERMISSION_DENIED),
    (SourceError, Code.UNAVAILABLE),
    (ValueError, Code.INVALID_ARGUMENT),
    (TimeoutError, Code.DEADLINE_EXCEEDED),
)
_ERRORS: dict[grpc.StatusCode, type[SightlineError]] = {
    Code.NOT_FOUND: UnknownCameraError,
    Code.ALREADY_EXISTS: CameraExistsError,
    Code.FAILED_PRECONDITION: NotReadyError,
    Code.INVALID_ARGUMENT: ConfigError,
    Code.RESOURCE_EXHAUSTED: CapacityError,
    Code.UNAUTHENTICATED: UnauthenticatedError,
    Code.PERMISSION_DENIED: ForbiddenError,
    Code.UNAVAILABLE: UnavailableError,
    Code.DEADLINE_EXCEEDED: UnavailableError,
    Code.ABORTED: UnavailableError,
}


class TakenOverError(SightlineError):
    """A newer connection of the same session replaced this one."""


class RefusedError(SightlineError):
    """The far server refused with ``code``; its sentence is passed on as it is."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class CallStatus(Protocol):
    """What ``grpc.RpcError`` of the sync API and ``grpc.aio.AioRpcError`` have in common."""

    def code(self) -> grpc.StatusCode: ...

    def details(self) -> str | None: ...

    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


def as_refused(error: SightlineError) -> RefusedError:
    """An error of ours as if the far server had sent it: callers cannot tell by the answer who of the two refused."""
    return RefusedError(code_of(error), str(error))


def code_of(error: BaseException) -> grpc.StatusCode:
    """The status code of an error; ``INTERNAL`` for anything not raised on purpose."""
    if isinstance(error, RefusedError):
        return error.code
    if isinstance(error, TakenOverError):
        return Code.ABORTED
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return Code.INTERNAL


async def abort(context: grpc.aio.ServicerContext, error: BaseException) -> NoReturn:
    """End the call with the error's code and sentence.

    Waits as long as the client leaves earlier replies unread, or until its connection is gone: the status comes after
    them, and ``grpc.aio`` has no way to reset a stream.
    """
    code = code_of(error)
    if code is Code.INTERNAL:
        log.error("call failed", exc_info=error)
    try:
        await context.abort(code, redact(str(error)) or type(error).__name__, ((MARK, type(error).__name__),))
    except grpc.aio.InternalError:
        # The client has left: there is nobody to tell, and nothing here that failed. Anything else would be logged.
        raise asyncio.CancelledError from None
    raise AssertionError("abort returned")


def is_ours(error: CallStatus) -> bool:
    """Whether the far server ended the call on purpose, with a sentence of its own."""
    return any(key == MARK for key, _ in error.trailing_metadata() or ())


def to_error(error: CallStatus) -> SightlineError:
    """The error a caller of the far server should see; gRPC's own failures come as :class:`UnavailableError`."""
    sentence = error.details() or f"the call ended with {error.code().name}"
    if is_ours(error):
        return _ERRORS.get(error.code(), SightlineError)(sentence)
    if error.code() in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.CANCELLED):
        return UnavailableError(sentence)
    if error.code() is Code.RESOURCE_EXHAUSTED:
        return CapacityError(f"the message is too large for the other side ({sentence}); see gateway.max_packet_bytes")
    return SightlineError(f"{error.code().name}: {sentence}")


def as_told(error: grpc.aio.AioRpcError, what: str) -> SightlineError:
    """The far side's own sentence as it is; what gRPC says in one of ours."""
    if is_ours(error):
        return RefusedError(error.code(), error.details() or error.code().name)
    return UnavailableError(f"{what} does not answer; try again in a moment ({error.details()})")
