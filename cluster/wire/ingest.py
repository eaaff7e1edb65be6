"""``Ingest``: pushed packets in, acknowledgements with credit out. The same servicer on gateway and decoder.

What differs is the :class:`PacketSink` behind it: ``ProxySink`` forwards to the camera's decoder, ``QueueSink`` feeds a
camera of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import grpc.aio
from sightline.v1 import ingest_pb2, ingest_pb2_grpc

from cluster.codec.source import StreamHeader
from cluster.errors import CameraExistsError, CapacityError, SightlineError
from cluster.wire.mapping import from_message, to_message
from cluster.wire.server import MAX_PACKET_BYTES
from cluster.wire.status import TakenOverError

UNTOLD_BYTES, SHORT_CREDIT = 256 * 1024, 32
"""Beyond so many bytes, or with no more credit left than two of an agent's batches, a pusher is told at once."""


class Ledger:
    """Checks every batch of one connection against order, size and credit.

    Holes are allowed, they are gaps of the camera's own transport. Going back is not, except at the connection's start,
    where a pusher that reconnected may send again what was taken already: those repeats are dropped and counted.
    """

    def __init__(self, camera: str, start: PushProgress, max_packet_bytes: int) -> None:
        self._camera = camera
        self._max_packet_bytes = max_packet_bytes
        self._expected = start.next_sequence
        self._catching_up = True
        self._received = 0
        self._limit = start.credit
        self._most = start.credit
        self._untold = 0
        self._taken = 0
        # (last sequence, packets received so far) of every batch not acknowledged; holes make the two differ.
        self._marks: deque[tuple[int, int]] = deque()
        self.repeats = 0

    def admit(self, batch: ingest_pb2.PacketBatch) -> ingest_pb2.PacketBatch | None:
        """The batch without repeats, or None when nothing is left of it. Raises ``ValueError``: a packet that is empty,
        over the size limit or out of order; ``CapacityError``: more packets than the pusher had credit for."""
        repeats = 0
        for packet in batch.packets:
            sequence, size = packet.sequence, len(packet.data)
            if not size:
                raise ValueError(f"packet {sequence} of camera {self._camera!r} is empty")
            if size > self._max_packet_bytes:
                raise ValueError(
                    f"packet {sequence} of camera {self._camera!r} has {size} bytes, more than the limit of "
                    f"{self._max_packet_bytes} (gateway.max_packet_bytes)"
                )
            if sequence >= self._expected:
                self._catching_up = False
                self._expected = sequence + 1
            elif self._catching_up:
                repeats += 1
            else:
                raise ValueError(
                    f"packet {sequence} of camera {self._camera!r} came after packet {self._expected - 1}; "
                    f"sequence numbers must grow within a session"
                )
        if repeats:
            self.repeats += repeats
            batch = ingest_pb2.PacketBatch(packets=batch.packets[repeats:])
        count = len(batch.packets)
        if not count:
            return None
        if self._received + count > self._limit:
            raise CapacityError(
                f"camera {self._camera!r} has {self._received + count - self._taken} packets in flight, more than its "
                f"credit of {self._limit - self._taken}; wait for replies before sending on"
            )
        self._received += count
        self._untold += sum(len(packet.data) for packet in batch.packets)
        self._marks.append((batch.packets[-1].sequence, self._received))
        return batch

    def grant(self, progress: PushProgress) -> None:
        """Note what the pusher is about to be told. A promise once made is never taken back: the limit only grows."""
        while self._marks and self._marks[0][0] < progress.next_sequence:
            self._taken = self._marks.popleft()[1]
        self._limit = max(self._limit, self._taken + progress.credit)
        self._most = max(self._most, progress.credit)
        self._untold = 0

    @property
    def pressing(self) -> bool:
        """Whether the pusher should be told soon what was taken over: half of its credit is used, so that it may come
        to wait for more, or it holds ``UNTOLD_BYTES`` until then."""
        return self._limit - self._received <= max(self._most // 2, SHORT_CREDIT) or self._untold >= UNTOLD_BYTES


CODECS = frozenset({"h264", "hevc", "av1", "vp9", "vp8", "mjpeg", "mpeg4"})
MAX_EXTRADATA_BYTES = 2**16
MAX_SIDE = 16384
MAX_NAME = 128
GATEWAY_IDLE_REPLY_S = 2.0
"""Seconds between a gateway's replies to a pushing agent that does not need them."""

Context: TypeAlias = grpc.aio.ServicerContext


@dataclass(frozen=True, slots=True)
class PushProgress:
    """What a pusher is told: everything below ``next_sequence`` was taken over, ``credit`` more packets may follow."""

    next_sequence: int
    credit: int
    dropped: int = 0


class PacketSink(Protocol):
    """Takes one pushing connection's packets. Called from one connection at a time, on the event loop.

    Every method may raise a :class:`SightlineError`, which ends the connection with its status code.
    """

    async def open(self, header: StreamHeader, session: str) -> PushProgress:
        """A connection begins; a session seen before goes on at ``next_sequence``."""
        ...

    async def offer(self, batch: ingest_pb2.PacketBatch) -> None:
        """Take packets in order; may wait for room, which holds the connection back. The batch is the sink's now."""
        ...

    async def progress(self) -> PushProgress:
        """Wait until there is something new to tell the pusher."""
        ...

    async def end(self) -> PushProgress:
        """The source has ended: wait until everything is taken over."""
        ...

    async def close(self) -> None:
        """The connection is gone, the session may come back."""
        ...


Sinks = Callable[[str], Awaitable[PacketSink]]
"""Camera -> its sink; raises ``UnknownCameraError``, or ``NotReadyError`` for a camera that does not push."""


@dataclass(slots=True)
class _Connection:
    session: str
    evicted: asyncio.Event = field(default_factory=asyncio.Event)
    pressing: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)


class IngestServicer(ingest_pb2_grpc.IngestServicer):
    """Validates every message, enforces credit, one pusher per camera, and holds no packets of its own.

    Args:
        sinks: finds the camera's sink.
        max_packet_bytes: larger packets end the call.
        open_s: seconds a new connection has for its ``open``.
        reply_s: seconds a pusher may leave a reply unread before it counts as one that never reads.
        reply_interval_s: replies are merged to at most one per interval.
        idle_reply_s: and to one per so long while a pusher has credit enough (:attr:`Ledger.pressing`): a reply costs
            as much as a message of packets. What was not told yet comes again when the pusher loses its connection:
            harmless before a decoder that lives and knows the session, but 0 between gateway and decoder, since video
            that a dead decoder had sent on must not go to the next one.
    """

    def __init__(
        self,
        sinks: Sinks,
        *,
        max_packet_bytes: int = MAX_PACKET_BYTES,
        open_s: float = 10.0,
        reply_s: float = 10.0,
        reply_interval_s: float = 0.01,
        idle_reply_s: float = 0.0,
    ) -> None:
        self._sinks = sinks
        self._max_packet_bytes = max_packet_bytes
        self._open_s = open_s
        self._reply_s = reply_s
        self._reply_interval_s = reply_interval_s
        self._idle_reply_s = idle_reply_s
        self._connections: dict[str, _Connection] = {}

    @property
    def pushing(self) -> list[str]:
        """Cameras that have a pusher connected now."""
        return sorted(self._connections)

    async def Push(self, request_iterator: object, context: Context) -> None:  # noqa: ARG002
        replies = _Replies(context, self._reply_s)
        try:
            await self._serve(context, replies)
        except Exception:
            await replies.drained()
            raise

    async def _serve(self, context: Context, replies: _Replies) -> None:
        camera, session, header = await self._read_open(context)
        sink = await self._sinks(camera)
        async with self._claim(camera, session) as connection:
            try:
                start = await sink.open(header, session)
                ledger = Ledger(camera, start, self._max_packet_bytes)
                await replies.send(start, ledger)
                await self._relay(context, replies, sink, ledger, connection)
            finally:
                await sink.close()

    async def _read_open(self, context: Context) -> tuple[str, str, StreamHeader]:
        try:
            async with asyncio.timeout(self._open_s):
                first = await context.read()
        except TimeoutError:
            raise TimeoutError(f"no `open` came within {self._open_s:g} s of connecting") from None
        if first is grpc.aio.EOF or first.WhichOneof("message") != "open":
            raise ValueError("the first message of a push must be `open`")
        opened = first.open
        if not opened.camera or len(opened.camera) > MAX_NAME:
            raise ValueError(f"`open` needs the camera's name, at most {MAX_NAME} characters")
        if not opened.session or len(opened.session) > MAX_NAME:
            raise ValueError(f"`open` needs a session id, at most {MAX_NAME} characters")
        if opened.codec not in CODECS:
            raise ValueError(f"unknown codec {opened.codec!r}; there are: {', '.join(sorted(CODECS))}")
        if max(opened.width, opened.height) > MAX_SIDE:
            raise ValueError(f"a picture of {opened.width}x{opened.height} is larger than {MAX_SIDE}x{MAX_SIDE}")
        if len(opened.extradata) > MAX_EXTRADATA_BYTES:
            raise ValueError(f"extradata of {len(opened.extradata)} bytes is larger than {MAX_EXTRADATA_BYTES}")
        return opened.camera, opened.session, from_message(StreamHeader, opened)

    @asynccontextmanager
    async def _claim(self, camera: str, session: str) -> AsyncIterator[_Connection]:
        """One pusher per camera. The same session may take over: its old connection is one it gave up."""
        try:
            async with asyncio.timeout(self._open_s):
                while old := self._connections.get(camera):
                    if old.session != session:
                        raise CameraExistsError(f"another agent already pushes for camera {camera!r}")
                    old.evicted.set()
                    await old.closed.wait()
        except TimeoutError:
            raise TimeoutError(
                f"the connection that pushed for camera {camera!r} before has not ended within {self._open_s:g} s"
            ) from None
        connection = self._connections[camera] = _Connection(session)
        try:
            yield connection
        finally:
            del self._connections[camera]
            connection.closed.set()

    async def _relay(
        self, context: Context, replies: _Replies, sink: PacketSink, ledger: Ledger, connection: _Connection
    ) -> None:
        reads = asyncio.create_task(self._read(context, sink, ledger, connection))
        tells = asyncio.create_task(self._tell(replies, sink, ledger, connection))
        evicted = asyncio.create_task(connection.evicted.wait())
        tasks = {reads, tells, evicted}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if reads in done:
            await self._last_word(replies, sink, ledger)
        for task in (reads, tells):
            if task in done:
                task.result()
        if evicted in done and reads not in done:
            raise TakenOverError("a newer connection of the same session took over")
        if reads in done and reads.result():
            await replies.send(await sink.end(), ledger)

    async def _read(self, context: Context, sink: PacketSink, ledger: Ledger, connection: _Connection) -> bool:
        """Until the pusher says ``end`` (True) or just leaves (False)."""
        while (request := await context.read()) is not grpc.aio.EOF:
            kind = request.WhichOneof("message")
            if kind == "packets":
                if batch := ledger.admit(request.packets):
                    if ledger.pressing:
                        connection.pressing.set()
                    await sink.offer(batch)
            elif kind == "end":
                return True
            else:
                raise ValueError(f"after `open` a push takes `packets` and `end`, not {kind or 'an empty message'!r}")
        return False

    async def _last_word(self, replies: _Replies, sink: PacketSink, ledger: Ledger) -> None:
        """What was taken over and not told yet: a pusher that goes on elsewhere must not send it there once more."""
        if replies.under_way:
            return
        with contextlib.suppress(SightlineError, TimeoutError):
            async with asyncio.timeout(0):
                progress = await sink.progress()
            await replies.send(progress, ledger)

    async def _tell(self, replies: _Replies, sink: PacketSink, ledger: Ledger, connection: _Connection) -> None:
        while True:
            await replies.send(await sink.progress(), ledger)
            await asyncio.sleep(self._reply_interval_s)
            if self._idle_reply_s and not ledger.pressing:
                connection.pressing.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._idle_reply_s):
                        await connection.pressing.wait()


class _Replies:
    """Writes one reply at a time; one that is not taken stays pending, as core cannot withdraw it."""

    def __init__(self, context: Context, reply_s: float) -> None:
        self._context = context
        self._reply_s = reply_s
        self._pending: asyncio.Task[None] | None = None

    async def send(self, progress: PushProgress, ledger: Ledger) -> None:
        """Tell the pusher. Raises ``CapacityError``: it has not read earlier replies for ``reply_s``."""
        ledger.grant(progress)
        await self.drained()
        reply = to_message(ingest_pb2.PushReply, progress, repeats=ledger.repeats)
        self._pending = asyncio.create_task(self._write(reply))
        await asyncio.wait({self._pending}, timeout=self._reply_s)
        if not self._pending.done():
            raise CapacityError(f"the agent has not read its replies for {self._reply_s:g} s; read them to get credit")

    @property
    def under_way(self) -> bool:
        return self._pending is not None and not self._pending.done()

    async def drained(self) -> None:
        """Wait until nothing is pending: core takes no status beside an unfinished write."""
        if self._pending is not None and self.under_way:
            await asyncio.wait({self._pending})

    async def _write(self, reply: ingest_pb2.PushReply) -> None:
        # A write that fails has lost its connection, which ends the handler from the other side.
        with contextlib.suppress(Exception):
            await self._context.write(reply)
