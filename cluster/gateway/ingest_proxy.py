"""``ProxySink``: the gateway's end of a push, forwarding to the decoder that owns the camera, whoever that is now."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import NoReturn

import grpc
import grpc.aio
from sightline.v1 import ingest_pb2, ingest_pb2_grpc

from cluster import metrics
from cluster.codec.source import StreamHeader
from cluster.errors import SightlineError, UnavailableError
from cluster.wire.channel import Call, CallEndedError, ChannelPool, finish, first_reply, read, write
from cluster.wire.convert import opening_of
from cluster.wire.ingest import PushProgress
from cluster.wire.mapping import from_message
from cluster.wire.status import RefusedError, is_ours

Route = Callable[[str], Awaitable[str]]
"""Camera -> ``host:port`` of its decoder's own ``Ingest``; raises ``UnavailableError`` while there is none."""


class ProxySink:
    """Forwards batches as they came, and the decoder's replies. One per connection.

    It keeps no packets, and tries nothing twice: the pusher does. Where the decoder dies or is not there yet, or the
    camera moves, the push ends with UNAVAILABLE, and the pusher goes on at the next decoder with what was not
    acknowledged.

    Args:
        reply_s: longest wait for the decoder's first reply; ``stall_s``: for it to take a batch, or to confirm the end.
    """

    def __init__(
        self,
        camera: str,
        route: Route,
        channels: ChannelPool,
        *,
        reply_s: float = 5.0,
        stall_s: float = 30.0,
    ) -> None:
        self._camera = camera
        self._route = route
        self._channels = channels
        self._reply_s = reply_s
        self._stall_s = stall_s
        self._connection = AsyncExitStack()
        self._told = PushProgress(0, 0)
        self._untold = False
        # There is something to tell, or the decoder's replies have ended.
        self._news = asyncio.Event()

    async def open(self, header: StreamHeader, session: str) -> PushProgress:
        opening = opening_of(header, self._camera, session)
        try:
            async with asyncio.timeout(self._reply_s):
                address = await self._route(self._camera)
            channel = await self._connection.enter_async_context(self._channels.lease(address))
            self._call: Call = ingest_pb2_grpc.IngestStub(channel).Push()
            self._connection.callback(self._call.cancel)
            first = await first_reply(self._call, opening, self._reply_s)
        except grpc.aio.AioRpcError as failure:
            raise self._reason(failure) from None
        except TimeoutError:
            raise UnavailableError(f"the decoder of camera {self._camera!r} does not answer") from None
        if first is grpc.aio.EOF:
            raise UnavailableError(f"the decoder of camera {self._camera!r} closed the stream")
        self._told = from_message(PushProgress, first)
        # Apart from those who wait for news: a read that is cancelled ends the call.
        self._reading = asyncio.create_task(self._read(), name=f"proxy {self._camera}")
        self._reading.add_done_callback(self._ended)
        self._connection.callback(self._reading.cancel)
        return self._told

    async def offer(self, batch: ingest_pb2.PacketBatch) -> None:
        """Waits for the decoder's flow control, which slows the pusher down by its own connection. Raises
        ``UnavailableError``: the decoder took nothing for ``stall_s``, or is gone."""
        await self._write(ingest_pb2.PushRequest(packets=batch))
        metrics.ingest_packets.inc(len(batch.packets))
        metrics.ingest_bytes.inc(sum(len(packet.data) for packet in batch.packets))

    async def progress(self) -> PushProgress:
        await self._news.wait()
        if not self._untold:
            self._raise_reason()
        self._untold = False
        if not self._reading.done():
            self._news.clear()
        return self._told

    async def end(self) -> PushProgress:
        """Forwards the end; returns once the decoder has confirmed it."""
        await self._write(ingest_pb2.PushRequest(end=ingest_pb2.End()))
        await self._call.done_writing()
        try:
            await asyncio.wait_for(asyncio.shield(self._reading), self._stall_s)
        except TimeoutError:
            raise UnavailableError(
                f"the decoder of camera {self._camera!r} did not confirm the end of the stream in {self._stall_s:g} s"
            ) from None
        return self._told

    async def close(self) -> None:
        await self._connection.aclose()

    async def _write(self, request: ingest_pb2.PushRequest) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await write(self._call, request)
        except TimeoutError:
            raise UnavailableError(
                f"the decoder of camera {self._camera!r} has taken nothing for {self._stall_s:g} s"
            ) from None
        except CallEndedError:
            ending = asyncio.create_task(finish(self._call))
            await asyncio.wait({self._reading})
            ending.cancel()
            self._raise_reason()

    def _ended(self, reading: asyncio.Task[None]) -> None:
        if not reading.cancelled():
            # Told to whoever asks for news; nobody may.
            reading.exception()
        self._news.set()

    def _raise_reason(self) -> NoReturn:
        """Why the connection to the decoder is over."""
        self._reading.result()
        raise UnavailableError(f"the decoder of camera {self._camera!r} closed the stream")

    async def _read(self) -> None:
        try:
            while (reply := await read(self._call)) is not grpc.aio.EOF:
                self._told, self._untold = from_message(PushProgress, reply), True
                self._news.set()
        except grpc.aio.AioRpcError as failure:
            raise self._reason(failure) from None

    def _reason(self, failure: grpc.aio.AioRpcError) -> SightlineError:
        why = failure.details() or failure.code().name
        # It may not have heard of the camera yet: the controller knows it.
        if is_ours(failure) and failure.code() is not grpc.StatusCode.NOT_FOUND:
            return RefusedError(failure.code(), why)
        return UnavailableError(f"the decoder of camera {self._camera!r} is not there ({why}); try again in a moment")
