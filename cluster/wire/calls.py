"""Writing on ``grpc.aio`` calls that the server may end at any time, without losing the server's status.

``call.write`` replaces the status the server sent by INTERNAL when both meet (grpc issue 36066). A refusal in the
middle of a stream of packets meets a write nearly always, and its sentence is what the user needs.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, TypeAlias

import grpc.aio
from grpc._cython import cygrpc

Call: TypeAlias = grpc.aio.StreamStreamCall

_STATUS_S = 5.0


class CallEndedError(Exception):
    """Nothing more can be written; reading gives the call's status."""


async def write(call: Call, message: Any) -> None:
    """Send one message, waiting for flow control.

    Raises:
        CallEndedError: the call is over, or was never connected.
    """
    if call.done():
        raise CallEndedError
    await call._metadata_sent.wait()
    try:
        await call._cython_call.send_serialized_message(message.SerializeToString())
    except cygrpc.InternalError:
        raise CallEndedError from None


async def finish(call: Call) -> None:
    """After :class:`CallEndedError`: core normally delivers the status by itself; if not, cancel for the reader."""
    await asyncio.sleep(_STATUS_S)
    call.cancel()


async def first_reply(call: Call, opening: Any, timeout_s: float) -> Any:
    """Write the first message of a call and read the first reply, or ``grpc.aio.EOF``.

    Raises:
        TimeoutError: no reply in time.
        grpc.aio.AioRpcError: the server ended the call.
    """
    async with asyncio.timeout(timeout_s):
        with contextlib.suppress(CallEndedError):
            await write(call, opening)
        return await call.read()
