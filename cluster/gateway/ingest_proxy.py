"""``IngestProxy``: the gateway's end of a push, handed on to the decoder that owns the camera, whoever that is now."""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
from sightline.v1 import ingest_pb2, ingest_pb2_grpc

from cluster.errors import CapacityError, SightlineError, UnavailableError
from cluster.wire.channel import Call, CallEndedError, ChannelPool, finish, first_reply, read, write
from cluster.wire.server import Context, Replies, read_open
from cluster.wire.status import RefusedError, is_ours

Route = Callable[[str], Awaitable[str]]
"""Camera -> ``host:port`` of its decoder's own ``Ingest``; raises ``UnavailableError`` while there is none, and another
``SightlineError`` where the caller may not push for it."""
Moved = Callable[[], Awaitable[bool]]

STALL_S, MOVED_S = 30.0, 2.0
"""Longest that a decoder may acknowledge nothing, or not confirm the end; while it is silent, the controller is asked
so often whether the camera has moved: a node without power ends no connection."""
UNTOLD_BYTES, SHORT_CREDIT = 256 * 1024, 32
"""Beyond so many bytes, or with no more credit left than two of an agent's batches, a pusher is told at once."""


class IngestProxy(ingest_pb2_grpc.IngestServicer):
    """Passes messages on as the bytes they came as, and the decoder's replies, merged.

    It looks into the opening alone: the decoder checks the others, and its refusals are passed on. It keeps no packets,
    and tries nothing twice: the pusher does. Where the decoder dies or is not there yet, or the camera moves, the push
    ends with UNAVAILABLE, and the pusher goes on at the next decoder with what was not acknowledged.

    Args:
        reply_s: longest wait for the decoder's first reply.
        idle_reply_s: seconds between replies to a pusher that does not need them (:meth:`_Push._note`): a reply costs
            as much as a message of packets. What was not told yet comes again when the pusher loses its connection:
            harmless before a decoder that lives and knows the session.
    """

    def __init__(self, route: Route, channels: ChannelPool, *, reply_s: float = 5.0, idle_reply_s: float = 2.0) -> None:
        self._route = route
        self._channels = channels
        self._reply_s, self._idle_reply_s = reply_s, idle_reply_s
        self.handlers = {"Push": grpc.stream_stream_rpc_method_handler(self.Push)}

    async def Push(self, request_iterator: object, context: Context) -> None:  # noqa: ARG002
        async with Replies(context) as replies:
            opened = await read_open(context)
            who = f"the decoder of camera {opened.camera!r}"
            try:
                address = await self._route(opened.camera)

                async def moved() -> bool:
                    return await self._route(opened.camera) != address

                async with self._channels.lease(address) as channel:
                    call: Call = channel.stream_stream("/sightline.v1.Ingest/Push")()
                    try:
                        first = await first_reply(call, ingest_pb2.PushRequest(open=opened), self._reply_s)
                        if first is not grpc.aio.EOF:
                            await _Push(who, context, replies, call, first, moved).relay(self._idle_reply_s)
                            return
                    finally:
                        call.cancel()
            except TimeoutError:
                raise UnavailableError(f"{who} does not answer") from None
            except grpc.aio.AioRpcError as failure:
                raise _reason(failure, who) from None
            raise UnavailableError(f"{who} closed the stream")


class _Push:
    """One push from the decoder's ``first`` reply on."""

    def __init__(self, who: str, context: Context, replies: Replies, call: Call, first: bytes, moved: Moved) -> None:
        self._who, self._moved = who, moved
        self._context, self._replies, self._call = context, replies, call
        self._limit = self._most = self._untold = 0
        self._unanswered_s = math.inf
        self._news, self._pressing = asyncio.Event(), asyncio.Event()
        self._note(first)

    async def relay(self, idle_reply_s: float) -> None:
        await self._tell_newest()
        running = self._read(), self._tell(idle_reply_s), self._send()
        tasks = [asyncio.create_task(each) for each in running]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not tasks[0].cancelled() and self._news.is_set():
            # A pusher that goes on elsewhere must not send there once more what was taken over.
            with contextlib.suppress(CapacityError):
                await self._tell_newest()
        next(task for task in tasks if not task.cancelled()).result()

    async def _send(self) -> None:
        """Waits for the decoder's flow control, which slows the pusher down by its own connection."""
        try:
            while (message := await self._context.read()) is not grpc.aio.EOF:
                self._untold += len(message)
                self._unanswered_s = min(self._unanswered_s, time.monotonic())
                await write(self._call, message)
            await self._call.done_writing()
        except CallEndedError:
            await finish(self._call)
        await asyncio.sleep(STALL_S)
        raise UnavailableError(f"{self._who} did not confirm the end of the stream in {STALL_S:g} s")

    async def _read(self) -> None:
        while (reply := await read(self._call)) is not grpc.aio.EOF:
            self._note(reply)

    def _note(self, reply: bytes) -> None:
        """Told soon if half of the pusher's credit is used, so that it may come to wait for more, or if it holds
        ``UNTOLD_BYTES`` until then."""
        self._newest, self._unanswered_s = ingest_pb2.PushReply.FromString(reply), math.inf
        self._news.set()
        left = self._limit - self._newest.next_sequence
        if left <= max(self._most // 2, SHORT_CREDIT) or self._untold >= UNTOLD_BYTES:
            self._pressing.set()

    async def _tell(self, idle_reply_s: float) -> None:
        while True:
            try:
                async with asyncio.timeout(MOVED_S):
                    await self._news.wait()
            except TimeoutError:
                await self._check_decoder()
                continue
            await self._tell_newest()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(idle_reply_s):
                    await self._pressing.wait()

    async def _check_decoder(self) -> None:
        """Raises ``UnavailableError``: it has answered nothing of what it was sent, for too long or as the camera has
        moved."""
        silent_s = time.monotonic() - self._unanswered_s
        if silent_s >= STALL_S:
            raise UnavailableError(f"{self._who} has acknowledged nothing for {STALL_S:g} s")
        try:
            moved = silent_s >= MOVED_S and await self._moved()
        except UnavailableError:
            # Asked again soon.
            return
        if moved:
            raise UnavailableError(f"{self._who} is another one by now")

    async def _tell_newest(self) -> None:
        newest, self._untold = self._newest, 0
        self._news.clear()
        self._pressing.clear()
        # A promise once made is never taken back.
        self._limit = max(self._limit, newest.next_sequence + newest.credit)
        self._most = max(self._most, newest.credit)
        await self._replies.send(newest.SerializeToString())


def _reason(failure: grpc.aio.AioRpcError, who: str) -> SightlineError:
    """Why the connection to the decoder is over."""
    why = failure.details() or failure.code().name
    # It may not have heard of the camera yet: the controller knows it.
    if is_ours(failure) and failure.code() is not grpc.StatusCode.NOT_FOUND:
        return RefusedError(failure.code(), why)
    return UnavailableError(f"{who} is not there ({why}); try again in a moment")
