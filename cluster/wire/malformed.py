"""Requests as they are read: a deadline for each, a sentence for bytes that are no message, and clients that leave.

gRPC itself waits for ever for the rest of a unary request, before any service is asked; it says UNKNOWN of bytes that
are no message; and it logs a client that left as an exception of the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from cluster.errors import ConfigError
from cluster.wire.status import abort

READ_S = 30.0
"""Longest that the one message of a unary request may take, once its headers are there."""


class Malformed(grpc.aio.ServerInterceptor):
    """First of a server's interceptors: those behind it see messages only, and may refuse a call before its message is
    read."""

    def __init__(self, read_s: float = READ_S) -> None:
        self._read_s = read_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """See ``grpc.aio.ServerInterceptor``."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        parse = _raising(handler.request_deserializer, str(handler_call_details.method))
        if handler.request_streaming:
            return _streaming(handler, parse)
        return _unary(handler, parse, self._read_s)


def _raising(parse: Callable[[bytes], Any], method: str) -> Callable[[bytes], Any]:
    """Whoever reads the message ends the call with what it raises."""

    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            raise ConfigError(
                f"what was sent to {method} is no message of its kind; use the protos of this version, uncompressed"
            ) from None

    return read


async def read_one(context: Any, read_s: float) -> Any:
    """The only message of a call; ends the call when there is none, or none of its kind, within ``read_s``."""
    try:
        async with asyncio.timeout(read_s):
            request = await context.read()
    except TimeoutError:
        await abort(context, TimeoutError(f"the request was not complete within {read_s:g} s"))
    except ConfigError as error:
        await abort(context, error)
    if request is grpc.aio.EOF:
        await abort(context, ConfigError("the call ended before its request"))
    return request


def _unary(handler: Any, parse: Callable[[bytes], Any], read_s: float) -> grpc.RpcMethodHandler:
    """The same on the wire, but read here: of a call that takes one message gRPC would read it first."""
    streams = bool(handler.response_streaming)
    behavior = handler.unary_stream if streams else handler.unary_unary

    async def serve(_requests: Any, context: Any) -> Any:
        request = await read_one(context, read_s)
        with _left():
            return await behavior(request, context)

    async def follow(_requests: Any, context: Any) -> Any:
        request = await read_one(context, read_s)
        with _left():
            async for reply in behavior(request, context):
                yield reply

    if not streams:
        made: grpc.RpcMethodHandler = grpc.stream_unary_rpc_method_handler(serve, parse, handler.response_serializer)
        return made
    # A method may yield its replies, or write them.
    replies = follow if inspect.isasyncgenfunction(behavior) else serve
    return grpc.stream_stream_rpc_method_handler(replies, parse, handler.response_serializer)


def _streaming(handler: Any, parse: Callable[[bytes], Any]) -> grpc.RpcMethodHandler:
    behavior = handler.stream_stream if handler.response_streaming else handler.stream_unary

    async def serve(requests: Any, context: Any) -> Any:
        with _left():
            return await behavior(requests, context)

    if inspect.isasyncgenfunction(behavior):
        # Reflection's.
        return grpc.stream_stream_rpc_method_handler(behavior, parse, handler.response_serializer)
    make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    return make(serve, parse, handler.response_serializer)


@contextlib.contextmanager
def _left() -> Iterator[None]:
    """A client that left is no failure of whoever was writing to it; a cancelled call is not logged."""
    try:
        yield
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
