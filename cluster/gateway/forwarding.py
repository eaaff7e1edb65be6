"""Forwards calls of the gateway's services to other processes (``Forwarding``)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from cluster.errors import UnavailableError
from cluster.security.limits import ConcurrencyLimit
from cluster.wire.channel import ChannelPool
from cluster.wire.status import is_ours, upstream_error

Code = grpc.StatusCode


async def relay(call: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Relay a stream of replies, cancelling the upstream call when this one ends."""
    try:
        async for reply in call:
            await context.write(reply)
    finally:
        call.cancel()


class Forwarding:
    """Forwards the calls of one proxy, at most ``max_calls`` at once; ``what`` names them in the error beyond that."""

    def __init__(self, channels: ChannelPool, what: str, *, max_calls: int = 256) -> None:
        self.channels = channels
        self._places = ConcurrencyLimit(max_calls, f"{what} are under way already; try again later")

    @asynccontextmanager
    async def to(
        self, who: str, route: Callable[[], Awaitable[str]], limit_s: float, *, unserved: str = ""
    ) -> AsyncIterator[grpc.aio.Channel]:
        """Lease a channel to ``who`` for a call of at most ``limit_s``; errors raised inside are attributed to ``who``.

        ``route``: returns its ``host:port``; raises ``UnavailableError`` while there is none. ``unserved``: error
        message if it does not implement the service.
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
                raise upstream_error(error, who) from None
            raise (UnavailableError(unserved) if error.code() is Code.UNIMPLEMENTED else late) from None
        except TimeoutError:
            raise late from None
