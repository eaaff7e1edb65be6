"""Calls of the gateway's services that are handed on to other processes (``Forwarding``)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from cluster.errors import UnavailableError
from cluster.security.limits import SharedPlaces
from cluster.wire.channel import ChannelPool
from cluster.wire.status import as_told, is_ours

Code = grpc.StatusCode


async def relay(call: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Pass a stream of replies on; the call behind it ends with this one."""
    try:
        async for reply in call:
            await context.write(reply)
    finally:
        call.cancel()


class Forwarding:
    """Hands the calls of one proxy on, ``max_calls`` at once; ``what`` they are, for the refusal of one more."""

    def __init__(self, channels: ChannelPool, what: str, *, max_calls: int = 256) -> None:
        self.channels = channels
        self._places = SharedPlaces(max_calls, f"{what} are under way already; try again later")

    @asynccontextmanager
    async def to(
        self, who: str, route: Callable[[], Awaitable[str]], limit_s: float, *, unserved: str = ""
    ) -> AsyncIterator[grpc.aio.Channel]:
        """Channel to ``who``, for a call of at most ``limit_s``; what fails inside is told of ``who``.

        ``route``: its ``host:port``; raises ``UnavailableError`` while there is none. ``unserved``: why it may not have
        the service.
        """
        late = TimeoutError(f"{who} did not answer within {limit_s:.3g} s")
        try:
            with self._places.taken():
                async with asyncio.timeout(limit_s):
                    address = await route()
                async with self.channels.lease(address) as channel:
                    yield channel
        except grpc.aio.AioRpcError as error:
            if is_ours(error) or error.code() not in (Code.DEADLINE_EXCEEDED, Code.UNIMPLEMENTED):
                raise as_told(error, who) from None
            raise (UnavailableError(unserved) if error.code() is Code.UNIMPLEMENTED else late) from None
        except TimeoutError:
            raise late from None
