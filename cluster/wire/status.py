"""Maps errors to gRPC statuses and back: every failed call carries one sentence a user can act on.

Statuses made here are marked in the trailing metadata, so that clients can tell our sentences from gRPC's own text.
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
    RateLimitError,
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
# The first error of each code; codes that a client cannot tell from an absent server become UnavailableError.
_ERRORS: dict[grpc.StatusCode, type[SightlineError]] = {
    code: kind for kind, code in reversed(_CODES) if issubclass(kind, SightlineError)
}
_ERRORS |= dict.fromkeys((Code.DEADLINE_EXCEEDED, Code.ABORTED), UnavailableError)


class RefusedError(SightlineError):
    """The upstream server refused with ``code``; its sentence is forwarded unchanged."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def as_refused(error: Exception) -> Exception:
    """Turn an error raised on purpose into one that the upstream server could have sent, so that callers cannot tell
    which of the two refused. Anything else is returned unchanged, to be logged where the call ends."""
    code = code_of(error)
    return error if code is Code.INTERNAL else RefusedError(code, sentence_of(error))


def sentence_of(error: BaseException) -> str:
    """The sentence of an error for its caller. In errors raised on purpose, secrets are redacted by form only: these
    may quote the caller, to whom redacting known secrets would confirm a guessed password."""
    meant = isinstance(error, SightlineError) or code_of(error) is not Code.INTERNAL
    return redact(shortened(str(error)), KnownSecrets() if meant else KNOWN) or type(error).__name__


def code_of(error: BaseException) -> grpc.StatusCode:
    """The status code of an error; ``INTERNAL`` for anything not raised on purpose."""
    if isinstance(error, RefusedError):
        return error.code
    return next((code for kind, code in _CODES if isinstance(error, kind)), Code.INTERNAL)


@contextlib.asynccontextmanager
async def abort_on_error(context: grpc.aio.ServicerContext, peer: str | None = None) -> AsyncIterator[None]:
    """End the call with code and sentence of an error raised inside, or if the caller's certificate is not for
    ``peer``.

    Waits until the client has read earlier replies or its connection is gone: the status is sent after them, and
    ``grpc.aio`` cannot reset a stream.
    """
    try:
        try:
            if peer is not None and peer.encode() not in context.auth_context().get(_NAMES, ()):
                raise UnauthenticatedError(f"the caller's certificate is not for {peer}")
            yield
        except (grpc.aio.AbortError, grpc.aio.InternalError, NotImplementedError):
            # Already ended; the client has left; the method is not implemented.
            raise
        except Exception as error:
            code = code_of(error)
            if code is Code.INTERNAL:
                log.error("call failed", exc_info=error)
            await context.abort(code, sentence_of(error), ((MARK, type(error).__name__),))
    except grpc.aio.InternalError:
        # The client has left, and nothing failed here; grpc.aio would log any other exception.
        raise asyncio.CancelledError from None


def is_ours(error: grpc.RpcError) -> bool:
    """Whether a Sightline server ended the call on purpose, with its own sentence."""
    return any(key == MARK for key, _ in error.trailing_metadata() or ())


def to_error(error: grpc.RpcError) -> SightlineError:
    """The error that a caller of the server should see; gRPC's own failures become :class:`UnavailableError`."""
    sentence = error.details() or f"the call ended with {error.code().name}"
    if is_ours(error):
        # It shares its code with CapacityError, but its callers may wait and try again.
        if (MARK, RateLimitError.__name__) in error.trailing_metadata():
            return RateLimitError(sentence)
        return _ERRORS.get(error.code(), SightlineError)(sentence)
    if error.code() is Code.CANCELLED:
        # All that core reports if a server has too many pending calls.
        return UnavailableError("the server has too many pending calls; try again in a moment")
    if error.code() in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
        return UnavailableError(sentence)
    if error.code() is Code.RESOURCE_EXHAUSTED:
        if "larger than max" in sentence:
            sentence = f"the message is too large for the server ({sentence}); see gateway.max_packet_bytes"
        return CapacityError(sentence)
    return SightlineError(f"{error.code().name}: {sentence}")


def upstream_error(error: grpc.aio.AioRpcError, what: str) -> SightlineError:
    """The error of a call to ``what``: a sentence of its own unchanged, gRPC's text wrapped in one of ours."""
    if is_ours(error):
        return RefusedError(error.code(), error.details() or error.code().name)
    return UnavailableError(f"{what} does not answer; try again in a moment ({error.details()})")


READ_S = 30.0
"""Timeout, in seconds, of a unary request's message once its headers have arrived."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """A server's first interceptor: later ones and the services raise plain errors, receive valid messages only, and
    can refuse a call before its message is read. ``peer``: name in the certificate of every caller."""

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
        # Reflection yields its replies.
        if inspect.isasyncgenfunction(behavior):
            return handler
        return handler._replace(**{kind: self._explaining(behavior)})

    def _explaining(self, behavior: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        async def serve(requests: Any, context: Any) -> Any:
            async with abort_on_error(context, self._peer):
                return await behavior(requests, context)

        return serve

    def _unary(self, handler: Any, parse: Callable[[bytes], Any]) -> grpc.RpcMethodHandler:
        """Serve a unary request as a stream, the same on the wire: gRPC would read its message before anything else."""
        streams = bool(handler.response_streaming)
        behavior = handler.unary_stream if streams else handler.unary_unary

        async def serve(_requests: Any, context: Any) -> Any:
            return await behavior(await read_one(context, self._read_s), context)

        async def follow(_requests: Any, context: Any) -> Any:
            async with abort_on_error(context, self._peer):
                async for reply in behavior(await read_one(context, self._read_s), context):
                    yield reply

        # A method may yield its replies, or write them.
        replies = follow if inspect.isasyncgenfunction(behavior) else self._explaining(serve)
        make = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
        made: grpc.RpcMethodHandler = make(replies, parse, handler.response_serializer)
        return made


def parsing(parse: Callable[[bytes], Any], method: str) -> Callable[[bytes], Any]:
    """Wrap ``parse`` so that invalid messages raise ``ConfigError`` in whoever reads them, which ends the call."""

    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            raise ConfigError(f"invalid message for {method}; use the protos of this version, uncompressed") from None

    return read


async def read_one(context: Any, read_s: float) -> Any:
    """Read the only message of a call. Raises ``TimeoutError``: it was not complete within ``read_s``;
    ``ConfigError``: it is missing or invalid."""
    try:
        async with asyncio.timeout(read_s):
            request = await context.read()
    except TimeoutError:
        raise TimeoutError(f"the request was not complete within {read_s:g} s") from None
    if request is grpc.aio.EOF:
        raise ConfigError("the call ended before its request")
    return request
