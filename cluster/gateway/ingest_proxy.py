"""Forwards pushes to the decoder that currently owns the camera (``IngestProxy``)."""

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
"""Camera -> ``host:port`` of its decoder's ``Ingest``. Raises ``UnavailableError`` while there is none, another
``SightlineError`` if the caller may not push for it."""
Moved = Callable[[], Awaitable[bool]]

STALL_S, MOVED_S = 30.0, 2.0
"""Longest time, in seconds, without an acknowledgement from the decoder or confirmation of the end; and the interval at
which the controller is asked, during such silence, whether the camera has moved: a dead node closes no connection."""
UNACKNOWLEDGED_BYTES, SHORT_CREDIT = 256 * 1024, 32
"""Unacknowledged bytes, and remaining credit (two batches of an edge agent), at which a pusher gets a reply at once."""


class IngestProxy(ingest_pb2_grpc.IngestServicer):
    """Forwards messages as raw bytes, and the decoder's replies, coalesced.

    Only the opening message is parsed; the decoder validates the others, and its refusals are passed on. Nothing is
    buffered or retried here: if the decoder dies, is not there yet, or the camera moves, the push ends with UNAVAILABLE
    and the pusher resends what was not acknowledged to the next decoder.

    Args:
        reply_s: longest wait for the decoder's first reply.
        idle_reply_s: interval of replies to a pusher that does not need them sooner (:meth:`_Push._accept_reply`): a
            reply costs as much as a message of packets. Acknowledgements withheld when the connection breaks cause
            packets to be sent again, which a live decoder recognises by the session.
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
    """One push, from the decoder's ``first`` reply on."""

    def __init__(self, who: str, context: Context, replies: Replies, call: Call, first: bytes, moved: Moved) -> None:
        self._who, self._moved = who, moved
        self._context, self._replies, self._call = context, replies, call
        self._limit = self._most = self._unacknowledged = 0
        self._unanswered_s = math.inf
        self._has_reply, self._urgent = asyncio.Event(), asyncio.Event()
        self._accept_reply(first)

    async def relay(self, idle_reply_s: float) -> None:
        await self._send_newest()
        running = self._read(), self._reply(idle_reply_s), self._forward()
        tasks = [asyncio.create_task(each) for each in running]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not tasks[0].cancelled() and self._has_reply.is_set():
            # So that the pusher does not resend acknowledged packets to the next decoder.
            with contextlib.suppress(CapacityError):
                await self._send_newest()
        next(task for task in tasks if not task.cancelled()).result()

    async def _forward(self) -> None:
        """Forward messages; the decoder's flow control propagates to the pusher's connection."""
        try:
            while (message := await self._context.read()) is not grpc.aio.EOF:
                self._unacknowledged += len(message)
                self._unanswered_s = min(self._unanswered_s, time.monotonic())
                await write(self._call, message)
            await self._call.done_writing()
        except CallEndedError:
            await finish(self._call)
        await asyncio.sleep(STALL_S)
        raise UnavailableError(f"{self._who} did not confirm the end of the stream in {STALL_S:g} s")

    async def _read(self) -> None:
        while (reply := await read(self._call)) is not grpc.aio.EOF:
            self._accept_reply(reply)

    def _accept_reply(self, reply: bytes) -> None:
        """Keep the decoder's newest reply. It is urgent if half of the pusher's credit is used, so that it may soon run
        out, or if the pusher holds ``UNACKNOWLEDGED_BYTES``."""
        self._newest, self._unanswered_s = ingest_pb2.PushReply.FromString(reply), math.inf
        self._has_reply.set()
        left = self._limit - self._newest.next_sequence
        if left <= max(self._most // 2, SHORT_CREDIT) or self._unacknowledged >= UNACKNOWLEDGED_BYTES:
            self._urgent.set()

    async def _reply(self, idle_reply_s: float) -> None:
        while True:
            try:
                async with asyncio.timeout(MOVED_S):
                    await self._has_reply.wait()
            except TimeoutError:
                await self._check_decoder()
                continue
            await self._send_newest()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(idle_reply_s):
                    await self._urgent.wait()

    async def _check_decoder(self) -> None:
        """Raises ``UnavailableError``: the decoder has not acknowledged messages for too long, or the camera has
        moved."""
        silent_s = time.monotonic() - self._unanswered_s
        if silent_s >= STALL_S:
            raise UnavailableError(f"{self._who} has acknowledged nothing for {STALL_S:g} s")
        try:
            moved = silent_s >= MOVED_S and await self._moved()
        except UnavailableError:
            # Checked again soon.
            return
        if moved:
            raise UnavailableError(f"{self._who} has changed")

    async def _send_newest(self) -> None:
        newest, self._unacknowledged = self._newest, 0
        self._has_reply.clear()
        self._urgent.clear()
        # Credit once granted is never withdrawn.
        self._limit = max(self._limit, newest.next_sequence + newest.credit)
        self._most = max(self._most, newest.credit)
        await self._replies.send(newest.SerializeToString())


def _reason(failure: grpc.aio.AioRpcError, who: str) -> SightlineError:
    """Error for the pusher, from the failure of the decoder's call."""
    why = failure.details() or failure.code().name
    # NOT_FOUND: the decoder has not been assigned the camera yet, which the controller knows.
    if is_ours(failure) and failure.code() is not grpc.StatusCode.NOT_FOUND:
        return RefusedError(failure.code(), why)
    return UnavailableError(f"{who} is not available ({why}); try again in a moment")
