"""Clients' own trouble, of which gRPC makes ours: bytes that are no message, and clients that leave in the middle.

The first are refused with a sentence, where gRPC itself says UNKNOWN; neither is logged as an exception of a service.
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
from cluster.rpc.status import abort


class _Malformed:
    """Stands where a request would."""


_MALFORMED = _Malformed()


class Malformed(grpc.aio.ServerInterceptor):
    """First of a server's interceptors: those behind it see messages only."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """See ``grpc.aio.ServerInterceptor``."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        method, parse = str(handler_call_details.method), handler.request_deserializer
        if handler.request_streaming:
            return _streaming(handler, _raising(parse, method))
        return _unary(handler, _marking(parse), method)


def _error(method: str) -> ConfigError:
    return ConfigError(f"what was sent to {method} is no message of its kind; use the protos of this version")


def _raising(parse: Callable[[bytes], Any], method: str) -> Callable[[bytes], Any]:
    """For a stream: the service that reads it ends the call with what it raises."""

    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            raise _error(method) from None

    return read


def _marking(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return _MALFORMED

    return read


def _unary(handler: Any, parse: Callable[[bytes], Any], method: str) -> grpc.RpcMethodHandler:
    streams = bool(handler.response_streaming)
    behavior = handler.unary_stream if streams else handler.unary_unary

    async def serve(request: Any, context: Any) -> Any:
        if request is _MALFORMED:
            await abort(context, _error(method))
        with _left():
            return await behavior(request, context)

    async def follow(request: Any, context: Any) -> Any:
        if request is _MALFORMED:
            await abort(context, _error(method))
        with _left():
            async for reply in behavior(request, context):
                yield reply

    if not streams:
        made: grpc.RpcMethodHandler = grpc.unary_unary_rpc_method_handler(serve, parse, handler.response_serializer)
        return made
    # A method may yield its replies, or write them.
    replies = follow if inspect.isasyncgenfunction(behavior) else serve
    return grpc.unary_stream_rpc_method_handler(replies, parse, handler.response_serializer)


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
