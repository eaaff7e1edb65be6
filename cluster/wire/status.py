"""Errors and gRPC status codes, both ways: every failed call carries one sentence a user can act on.

A status made here is marked in the trailing metadata, so that a client can tell our sentence from gRPC's own text.
"""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from cluster.errors import (
    CameraExistsError,
    CapacityError,
    ConfigError,
    ForbiddenError,
    NotFoundError,
    NotReadyError,
    SightlineError,
    SourceError,
    UnauthenticatedError,
    UnavailableError,
    UnknownCameraError,
)
from cluster.redaction import KNOWN, KnownSecrets, redact, shortened

log = logging.getLogger(__name__)

MARK = "sightline-error"
_NAMES = "x509_subject_alternative_name"
Code = grpc.StatusCode


class TakenOverError(SightlineError):
    """A newer connection of the same session replaced this one."""


_CODES: tuple[tuple[type[BaseException], grpc.StatusCode], ...] = (
    (TakenOverError, Code.ABORTED),
    (UnknownCameraError, Code.NOT_FOUND),
    (NotFoundError, Code.NOT_FOUND),
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
# The first error of each code, and of what a client cannot tell from an absent server.
_ERRORS: dict[grpc.StatusCode, type[SightlineError]] = {
    code: kind for kind, code in reversed(_CODES) if issubclass(kind, SightlineError)
}
_ERRORS |= dict.fromkeys((Code.DEADLINE_EXCEEDED, Code.ABORTED), UnavailableError)


class RefusedError(SightlineError):
    """The far server refused with ``code``; its sentence is passed on as it is."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def as_refused(error: Exception) -> Exception:
    """What was raised on purpose as if the far server had sent it: callers cannot tell by the answer who of the two
    refused. Anything else stays what it is, and is logged by whoever answers the caller."""
    code = code_of(error)
    return error if code is Code.INTERNAL else RefusedError(code, sentence_of(error))


def sentence_of(error: BaseException) -> str:
    """What a caller is told of an error. In one that was raised on purpose, secrets are hidden by their form alone: it
    may quote its caller, who would see by what is hidden that a guessed word is a camera's password."""
    meant = isinstance(error, SightlineError) or code_of(error) is not Code.INTERNAL
    return redact(shortened(str(error)), KnownSecrets() if meant else KNOWN) or type(error).__name__


def code_of(error: BaseException) -> grpc.StatusCode:
    """The status code of an error; ``INTERNAL`` for anything not raised on purpose."""
    if isinstance(error, RefusedError):
        return error.code
    return next((code for kind, code in _CODES if isinstance(error, kind)), Code.INTERNAL)


@contextlib.asynccontextmanager
async def explained(context: grpc.aio.ServicerContext, peer: str | None = None) -> AsyncIterator[None]:
    """Ends the call with code and sentence of the error that is raised inside, or where the caller's certificate is not
    for ``peer``.

    Waits as long as the client leaves earlier replies unread, or until its connection is gone: the status comes after
    them, and ``grpc.aio`` has no way to reset a stream.
    """
    try:
        try:
            if peer is not None and peer.encode() not in context.auth_context().get(_NAMES, ()):
                raise UnauthenticatedError(f"the caller's certificate is not for {peer}")
            yield
        except (grpc.aio.AbortError, grpc.aio.InternalError, NotImplementedError):
            # Ended already; the client has left; the service has no such method.
            raise
        except Exception as error:
            code = code_of(error)
            if code is Code.INTERNAL:
                log.error("call failed", exc_info=error)
            await context.abort(code, sentence_of(error), ((MARK, type(error).__name__),))
    except grpc.aio.InternalError:
        # There is nobody to tell, and nothing here that failed. Anything else would be logged.
        raise asyncio.CancelledError from None


def is_ours(error: grpc.RpcError) -> bool:
    """Whether the far server ended the call on purpose, with a sentence of its own."""
    return any(key == MARK for key, _ in error.trailing_metadata() or ())


def to_error(error: grpc.RpcError) -> SightlineError:
    """The error a caller of the far server should see; gRPC's own failures come as :class:`UnavailableError`."""
    sentence = error.details() or f"the call ended with {error.code().name}"
    if is_ours(error):
        return _ERRORS.get(error.code(), SightlineError)(sentence)
    if error.code() is Code.CANCELLED:
        # All that core says where more calls came than a server looks at.
        return UnavailableError("the other side has too many calls to look at; try again in a moment")
    if error.code() in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
        return UnavailableError(sentence)
    if error.code() is Code.RESOURCE_EXHAUSTED:
        if "larger than max" in sentence:
            sentence = f"the message is too large for the other side ({sentence}); see gateway.max_packet_bytes"
        return CapacityError(sentence)
    return SightlineError(f"{error.code().name}: {sentence}")


def as_told(error: grpc.aio.AioRpcError, what: str) -> SightlineError:
    """The far side's own sentence as it is; what gRPC says in one of ours."""
    if is_ours(error):
        return RefusedError(error.code(), error.details() or error.code().name)
    return UnavailableError(f"{what} does not answer; try again in a moment ({error.details()})")


READ_S = 30.0
"""Longest that the one message of a unary request may take, once its headers are there."""


class Explaining(grpc.aio.ServerInterceptor):
    """First of a server's interceptors: those behind it and the services raise their errors, see messages only, and may
    refuse a call before its message is read. ``peer``: what the certificate of every caller is for."""

    def __init__(self, read_s: float = READ_S, *, peer: str | None = None) -> None:
        self._read_s, self._peer = read_s, peer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        parse = handler.request_deserializer
        if parse is not None:
            parse = parsing(parse, str(handler_call_details.method))
        if not handler.request_streaming:
            return self._unary(handler, parse)
        kind = "stream_stream" if handler.response_streaming else "stream_unary"
        behavior, handler = getattr(handler, kind), handler._replace(request_deserializer=parse)
        # Reflection's yields.
        if inspect.isasyncgenfunction(behavior):
            return handler
        return handler._replace(**{kind: self._explaining(behavior)})

    def _explaining(self, behavior: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        async def serve(requests: Any, context: Any) -> Any:
            async with explained(context, self._peer):
                return await behavior(requests, context)

        return serve

    def _unary(self, handler: Any, parse: Callable[[bytes], Any]) -> grpc.RpcMethodHandler:
        """The same on the wire, but read here: of a call that takes one message gRPC would read it first."""
        streams = bool(handler.response_streaming)
        behavior = handler.unary_stream if streams else handler.unary_unary

        async def serve(_requests: Any, context: Any) -> Any:
            return await behavior(await read_one(context, self._read_s), context)

        async def follow(_requests: Any, context: Any) -> Any:
            async with explained(context, self._peer):
                async for reply in behavior(await read_one(context, self._read_s), context):
                    yield reply

        # A method may yield its replies, or write them.
        replies = follow if inspect.isasyncgenfunction(behavior) else self._explaining(serve)
        make = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
        made: grpc.RpcMethodHandler = make(replies, parse, handler.response_serializer)
        return made


def parsing(parse: Callable[[bytes], Any], method: str) -> Callable[[bytes], Any]:
    """Whoever reads the message ends the call with what it raises: ``ConfigError``."""

    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            raise ConfigError(
                f"what was sent to {method} is no message of its kind; use the protos of this version, uncompressed"
            ) from None

    return read


async def read_one(context: Any, read_s: float) -> Any:
    """The only message of a call. Raises ``TimeoutError``: it was not complete within ``read_s``; ``ConfigError``:
    there is none, or none of its kind."""
    try:
        async with asyncio.timeout(read_s):
            request = await context.read()
    except TimeoutError:
        raise TimeoutError(f"the request was not complete within {read_s:g} s") from None
    if request is grpc.aio.EOF:
        raise ConfigError("the call ended before its request")
    return request
