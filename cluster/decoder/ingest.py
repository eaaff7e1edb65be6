"""The decoder's ``Ingest`` service: receives pushed packets, replies with acknowledgements and credit."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from sightline.v1 import ingest_pb2, ingest_pb2_grpc
from sightline.v1.ingest_pb2 import PushReply

from cluster import metrics
from cluster.codec.push import PushSource
from cluster.codec.source import StreamHeader
from cluster.errors import CameraExistsError, CapacityError, NotReadyError, UnavailableError
from cluster.wire.convert import packet_from_proto, push_from_bytes
from cluster.wire.mapping import from_message
from cluster.wire.server import MAX_PACKET_BYTES, OPEN_S, REPLY_S, Context, Replies, read_open
from cluster.wire.status import TakenOverError

if TYPE_CHECKING:
    from cluster.decoder.running_camera import RunningCamera

POLL_S, RETIRED_S = 0.02, 1.0
"""Polling intervals: for new credit, and for whether the camera still runs here."""
REPLY_INTERVAL_S = 0.01
"""Shortest time between replies. Kept small: a dead decoder's unacknowledged video is pushed again to the next one."""

MAX_SEQUENCE = 2**64 - 2
"""The next sequence number, which replies carry, still fits its field."""


class BatchValidator:
    """Validates the batches of one connection: order, size and credit.

    Holes are allowed: they are gaps in the camera's own transport. Going back is not; but after a reconnect the pusher
    may repeat packets already accepted, which are dropped and counted.
    """

    def __init__(self, camera: str, start: PushReply, max_packet_bytes: int) -> None:
        self._camera = camera
        self._max_packet_bytes = max_packet_bytes
        self._begin, self._expected = start.next_sequence, 0
        self._received = 0
        self._limit = start.credit
        self._taken = 0
        # (last sequence, packets received so far) of each unacknowledged batch; holes make the two differ.
        self._marks: deque[tuple[int, int]] = deque()
        self.repeats = 0

    def admit(self, batch: ingest_pb2.PacketBatch) -> ingest_pb2.PacketBatch | None:
        """The batch without repeats, or None if nothing is left. Raises ``ValueError``: an empty batch, or a packet
        that is empty, too large or out of order; ``CapacityError``: more packets than the pusher had credit for."""
        if not batch.packets:
            raise ValueError(f"a batch of camera {self._camera!r} has no packets")
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
            if sequence > MAX_SEQUENCE:
                raise ValueError(f"packet {sequence} of camera {self._camera!r} has a number above {MAX_SEQUENCE}")
            if sequence < self._expected:
                raise ValueError(
                    f"packet {sequence} of camera {self._camera!r} came after packet {self._expected - 1}; "
                    f"sequence numbers must increase within a connection"
                )
            self._expected = sequence + 1
            repeats += sequence < self._begin
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
        self._marks.append((batch.packets[-1].sequence, self._received))
        return batch

    def grant(self, progress: PushReply) -> None:
        """Account for a reply about to be sent. Credit is never revoked: the limit only grows."""
        while self._marks and self._marks[0][0] < progress.next_sequence:
            self._taken = self._marks.popleft()[1]
        self._limit = max(self._limit, self._taken + progress.credit)


class QueueSink:
    """One push camera: converts packets and offers them to its :class:`PushSource`. Used by one connection at a time,
    on the event loop; a :class:`SightlineError` from any method ends the connection with its status code.

    Lives as long as the camera. The source keeps the session for a pusher that reconnects; packets are buffered only in
    its bounded queue. ``camera``: restarted with a new source when a session opens after the camera has ended or
    failed.
    """

    def __init__(self, source: PushSource, *, max_credit: int = 256, camera: RunningCamera | None = None) -> None:
        self.source = source
        self._camera = camera
        self._max_credit = min(max_credit, source.max_packets)
        self._codec = ""
        self._ended = ""
        self._retired = False
        self._last_reply = PushReply()
        self._taken = asyncio.Event()

    def retire(self) -> None:
        """Refuse further packets: the camera was moved or removed. Callable from any thread."""
        self._retired = True

    async def open(self, header: StreamHeader, session: str) -> PushReply:
        """Open or resume a session. A new one starts at sequence 0 and replaces the old; one that has ended may only be
        ended again. Raises ``UnavailableError``: the camera no longer runs here."""
        if session != self._ended:
            self._check_running()
            if self._camera is not None and self._camera.ended:
                self._camera.restart()
                # Another thread may have stopped the camera meanwhile.
                self._check_running()
            self.source.begin_session(header, session)
            self._codec = header.codec
            self._ended = ""
        self._last_reply = self.now()
        return self._last_reply

    async def offer(self, batch: ingest_pb2.PacketBatch) -> None:
        """Enqueue packets in order. Raises ``UnavailableError``, accepting none: the camera no longer runs here."""
        self._check_running()
        if self._ended:
            raise NotReadyError(f"session {self._ended!r} has ended; open a new one with another session id")
        # A packet that does not fit is dropped and counted by the source; the next reply tells the pusher.
        packets = [packet_from_proto(message, self._codec) for message in batch.packets]
        dropped = self.source.offer(packets)
        metrics.ingest_packets.inc(len(packets))
        metrics.ingest_bytes.inc(sum(len(packet.data) for packet in packets))
        metrics.ingest_dropped.labels("queue_full").inc(dropped)
        self._taken.set()

    async def progress(self) -> PushReply:
        """Wait until there is something to reply. Polls, as neither the consumer thread nor :meth:`retire` notifies.
        Raises ``UnavailableError``: the camera no longer runs here, and nothing is left to reply."""
        while True:
            now = self.now()
            if self._is_news(now):
                self._last_reply = now
                return now
            self._check_running()
            self._taken.clear()
            restored = now.credit >= self._max_credit
            # Not wait_for: in Python 3.11 it loses a cancellation that comes just after the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETIRED_S if restored else POLL_S):
                    await self._taken.wait()

    async def end(self) -> PushReply:
        if not self._ended:
            self._ended = self.source.session or ""
            self.source.end_session()
        return self.now()

    def _check_running(self) -> None:
        if self._retired:
            raise UnavailableError("the camera no longer runs here")

    def now(self) -> PushReply:
        source = self.source
        credit = min(source.credit(), self._max_credit)
        return PushReply(next_sequence=source.next_sequence, credit=credit, dropped=source.dropped)

    def _is_news(self, now: PushReply) -> bool:
        last = self._last_reply
        if now.next_sequence != last.next_sequence or now.dropped != last.dropped:
            return True
        # A small increase of credit is worth a message only if the pusher may be waiting for it.
        worth = 1 if last.credit == 0 else max(1, self._max_credit // 8)
        return now.credit - last.credit >= worth


Sinks = Callable[[str], Awaitable[QueueSink]]
"""Finds a camera's sink. Raises ``UnknownCameraError``, or ``NotReadyError`` if the camera is not pushed."""


@dataclass(slots=True)
class _Connection:
    session: str
    evicted: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)


class IngestServicer(ingest_pb2_grpc.IngestServicer):
    """Validates every message; enforces credit and one pusher per camera; buffers no packets.

    Args:
        sinks: finds the camera's sink.
        max_packet_bytes: larger packets end the call.
        open_s: deadline for the ``open`` of a new connection, in seconds.
        reply_s: seconds a reply may remain unread before the pusher counts as not reading.
    """

    def __init__(
        self,
        sinks: Sinks,
        *,
        max_packet_bytes: int = MAX_PACKET_BYTES,
        open_s: float = OPEN_S,
        reply_s: float = REPLY_S,
    ) -> None:
        self._sinks = sinks
        self._max_packet_bytes = max_packet_bytes
        self._open_s = open_s
        self._reply_s = reply_s
        self._connections: dict[str, _Connection] = {}
        reply = PushReply.SerializeToString
        self.handlers = {"Push": grpc.stream_stream_rpc_method_handler(self.Push, push_from_bytes, reply)}

    async def Push(self, request_iterator: object, context: Context) -> None:  # noqa: ARG002
        async with Replies(context, self._reply_s) as replies:
            opened = await read_open(context, self._open_s)
            sink = await self._sinks(opened.camera)
            async with self._claim(opened.camera, opened.session) as connection:
                start = await sink.open(from_message(StreamHeader, opened), opened.session)
                validator = BatchValidator(opened.camera, start, self._max_packet_bytes)
                await _reply(replies, start, validator)
                await self._relay(context, replies, sink, validator, connection)

    @asynccontextmanager
    async def _claim(self, camera: str, session: str) -> AsyncIterator[_Connection]:
        """Enforce one pusher per camera. The same session may take over: it has abandoned its old connection."""
        try:
            async with asyncio.timeout(self._open_s):
                while old := self._connections.get(camera):
                    if old.session != session:
                        raise CameraExistsError(f"another agent already pushes for camera {camera!r}")
                    old.evicted.set()
                    await old.closed.wait()
        except TimeoutError:
            raise TimeoutError(
                f"the previous connection for camera {camera!r} has not ended within {self._open_s:g} s"
            ) from None
        connection = self._connections[camera] = _Connection(session)
        try:
            yield connection
        finally:
            del self._connections[camera]
            connection.closed.set()

    async def _relay(
        self, context: Context, replies: Replies, sink: QueueSink, validator: BatchValidator, connection: _Connection
    ) -> None:
        reading = asyncio.create_task(self._read(context, sink, validator))
        replying = asyncio.create_task(self._send_progress(replies, sink, validator))
        evicted = asyncio.create_task(connection.evicted.wait())
        tasks = {reading, replying, evicted}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if reading in done and not replies.under_way:
            # Acknowledge what was accepted, so that the pusher does not repeat it to another decoder.
            with contextlib.suppress(CapacityError):
                await _reply(replies, sink.now(), validator)
        for task in (reading, replying):
            if task in done:
                task.result()
        if reading not in done:
            raise TakenOverError("a newer connection of the same session took over")
        if reading.result():
            await _reply(replies, await sink.end(), validator)

    async def _read(self, context: Context, sink: QueueSink, validator: BatchValidator) -> bool:
        """Read until the pusher sends ``end`` (returns True) or disconnects (False)."""
        while (request := await context.read()) is not grpc.aio.EOF:
            kind = request.WhichOneof("message")
            if kind == "packets":
                if batch := validator.admit(request.packets):
                    await sink.offer(batch)
            elif kind == "end":
                return True
            else:
                raise ValueError(f"after `open` a push accepts `packets` and `end`, not {kind or 'an empty message'!r}")
        return False

    async def _send_progress(self, replies: Replies, sink: QueueSink, validator: BatchValidator) -> None:
        while True:
            await _reply(replies, await sink.progress(), validator)
            await asyncio.sleep(REPLY_INTERVAL_S)


async def _reply(replies: Replies, progress: PushReply, validator: BatchValidator) -> None:
    validator.grant(progress)
    progress.repeats = validator.repeats
    await replies.send(progress)
