"""``ProxySink``: the gateway's end of a push, forwarding to the decoder that owns the camera, whoever that is now."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
import grpc.aio
from sightline.v1 import ingest_pb2, ingest_pb2_grpc

from cluster import metrics
from cluster.codec.source import StreamHeader
from cluster.errors import UnavailableError
from cluster.wire.channel import Call, CallEndedError, ChannelPool, finish, first_reply, read, write
from cluster.wire.ingest import PushProgress
from cluster.wire.status import RefusedError, is_ours

Route = Callable[[str], Awaitable[str]]
"""Camera -> ``host:port`` of its decoder's own ``Ingest``; raises ``UnavailableError`` while there is none."""

# The decoder may be restarting, may not have heard of the camera yet, or may not have seen the old call end.
_TRY_AGAIN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
    }
)


@dataclass(frozen=True, slots=True)
class _Pending:
    request: ingest_pb2.PushRequest
    last: int
    count: int
    size: int


class ProxySink:
    """Forwards batches as they came and keeps each until the decoder acknowledges it, at most ``max_pending_bytes``.

    When the decoder dies the camera is routed again and what is unacknowledged is sent again; the pusher keeps its
    connection if that works within ``reconnect_s``, else it gets UNAVAILABLE with the reason. One per connection.
    """

    def __init__(
        self,
        camera: str,
        route: Route,
        channels: ChannelPool,
        *,
        max_pending_bytes: int = 16 * 2**20,
        reconnect_s: float = 15.0,
        reply_s: float = 5.0,
        stall_s: float = 30.0,
    ) -> None:
        self._camera = camera
        self._route = route
        self._channels = channels
        self._max_pending_bytes = max_pending_bytes
        self._reconnect_s = reconnect_s
        self._reply_s = reply_s
        self._stall_s = stall_s
        self._open = ingest_pb2.PushRequest()
        self._unsent: deque[_Pending] = deque()
        self._unacked: deque[_Pending] = deque()
        self._in_flight = 0
        self._pending_bytes = 0
        self._next = 0
        self._dropped_before = 0
        self._upstream = PushProgress(0, 0)
        self._changed = False
        self._connected = False
        self._ending = False
        self._work = asyncio.Event()
        self._news = asyncio.Event()
        self._drained = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def pending_bytes(self) -> int:
        """Bytes of packets held here, unacknowledged by the decoder."""
        return self._pending_bytes

    async def open(self, header: StreamHeader, session: str) -> PushProgress:
        self._open = ingest_pb2.PushRequest(
            open=ingest_pb2.Open(
                camera=self._camera,
                codec=header.codec,
                width=header.width,
                height=header.height,
                extradata=header.extradata,
                session=session,
            )
        )
        self._task = asyncio.create_task(self._run(), name=f"proxy {self._camera}")
        self._task.add_done_callback(self._wake_all)
        return await self.progress()

    async def offer(self, batch: ingest_pb2.PacketBatch) -> None:
        """Waits while ``max_pending_bytes`` are held, so that the pusher is slowed down by its own connection.
        Raises ``UnavailableError``: no room for ``stall_s``."""
        size = batch.ByteSize()
        if self._pending_bytes + size > self._max_pending_bytes and self._pending_bytes:
            await self._wait_until_drained(size)
        packets = batch.packets
        self._unsent.append(_Pending(ingest_pb2.PushRequest(packets=batch), packets[-1].sequence, len(packets), size))
        self._pending_bytes += size
        self._work.set()
        metrics.ingest_packets.inc(len(packets))
        metrics.ingest_bytes.inc(sum(len(packet.data) for packet in packets))

    async def _wait_until_drained(self, size: int) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                while self._pending_bytes + size > self._max_pending_bytes and self._pending_bytes:
                    self._raise_if_over()
                    self._drained.clear()
                    await self._drained.wait()
        except TimeoutError:
            raise UnavailableError(
                f"the decoder of camera {self._camera!r} has taken nothing for {self._stall_s:g} s"
            ) from None

    async def progress(self) -> PushProgress:
        while not self._changed:
            self._raise_if_over()
            self._news.clear()
            await self._news.wait()
        self._changed = False
        return self._now()

    async def end(self) -> PushProgress:
        """Forwards what is left and the end; returns once the decoder has confirmed it."""
        assert self._task is not None
        self._ending = True
        self._work.set()
        try:
            await asyncio.wait_for(asyncio.shield(self._task), self._stall_s)
        except TimeoutError:
            raise UnavailableError(
                f"the decoder of camera {self._camera!r} did not confirm the end of the stream in {self._stall_s:g} s"
            ) from None
        return self._now()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def _now(self) -> PushProgress:
        dropped = self._dropped_before + self._upstream.dropped
        return PushProgress(self._next, self._upstream.credit, dropped)

    def _raise_if_over(self) -> None:
        if self._task is not None and self._task.done():
            self._task.result()
            raise UnavailableError(f"the decoder of camera {self._camera!r} closed the stream")

    def _wake_all(self, _: object = None) -> None:
        for event in (self._news, self._drained, self._work):
            event.set()

    async def _run(self) -> None:
        """Connect, relay, and again after every break, until the end, a refusal, or ``reconnect_s`` without success."""
        broken_at = time.monotonic()
        wait_s = 0.05
        while True:
            self._connected = False
            try:
                async with asyncio.timeout(self._reconnect_s):
                    address = await self._route(self._camera)
                async with self._channels.lease(address) as channel:
                    await self._relay(ingest_pb2_grpc.IngestStub(channel).Push())
                return
            except grpc.aio.AioRpcError as failure:
                why = failure.details() or failure.code().name
                refused = RefusedError(failure.code(), why) if is_ours(failure) else None
                if refused and failure.code() not in _TRY_AGAIN:
                    raise refused from None
            except (UnavailableError, TimeoutError) as failure:
                why, refused = str(failure) or "no answer", None
            if self._connected:
                broken_at, wait_s = time.monotonic(), 0.05
            if time.monotonic() - broken_at > self._reconnect_s:
                raise refused or UnavailableError(
                    f"the decoder of camera {self._camera!r} did not come back within {self._reconnect_s:g} s ({why})"
                )
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 1.0)

    async def _relay(self, call: Call) -> None:
        try:
            first = await first_reply(call, self._open, self._reply_s)
            if first is grpc.aio.EOF:
                raise UnavailableError("the decoder closed the stream")
            self._greet(first)
            writer = asyncio.create_task(self._write(call))
            try:
                await self._read(call)
            finally:
                writer.cancel()
                await asyncio.wait({writer})
        finally:
            call.cancel()

    def _greet(self, first: ingest_pb2.PushReply) -> None:
        """A decoder that lost the session starts at 0 again: what was unacknowledged is sent again in any case."""
        self._connected = True
        if first.dropped < self._upstream.dropped:
            self._dropped_before += self._upstream.dropped
        self._unsent.extendleft(reversed(self._unacked))
        self._unacked.clear()
        self._in_flight = 0
        self._changed = True
        self._acknowledge(first)

    def _acknowledge(self, reply: ingest_pb2.PushReply) -> None:
        while self._unacked and self._unacked[0].last < reply.next_sequence:
            taken = self._unacked.popleft()
            self._in_flight -= taken.count
            self._pending_bytes -= taken.size
        while self._unsent and self._unsent[0].last < reply.next_sequence:
            self._pending_bytes -= self._unsent.popleft().size
        told = PushProgress(reply.next_sequence, reply.credit, reply.dropped)
        self._changed = self._changed or told != self._upstream
        self._upstream = told
        # A new decoder knows nothing of what the old one took; the pusher must not be told to go back.
        self._next = max(self._next, reply.next_sequence)
        self._news.set()
        self._drained.set()
        if self._unsent:
            self._work.set()

    async def _read(self, call: Call) -> None:
        while (reply := await read(call)) is not grpc.aio.EOF:
            self._acknowledge(reply)
        if not self._ending or self._unsent:
            raise UnavailableError("the decoder closed the stream")

    async def _write(self, call: Call) -> None:
        try:
            while True:
                while self._unsent and self._may_send(self._unsent[0]):
                    pending = self._unsent.popleft()
                    self._unacked.append(pending)
                    self._in_flight += pending.count
                    await write(call, pending.request)
                if self._ending and not self._unsent:
                    await write(call, ingest_pb2.PushRequest(end=ingest_pb2.End()))
                    await call.done_writing()
                    return
                self._work.clear()
                await self._work.wait()
        except CallEndedError:
            await finish(call)

    def _may_send(self, pending: _Pending) -> bool:
        return self._in_flight == 0 or self._in_flight + pending.count <= self._upstream.credit
