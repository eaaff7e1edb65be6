"""``PushAgent``: the edge side of ``Ingest``. Reads a source and sends its packets, across interruptions."""

import asyncio
import contextlib
import random
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import grpc
import grpc.aio
from sightline.v1 import ingest_pb2, ingest_pb2_grpc

from cluster.codec.source import CameraState, Source, SourceStatus, StreamHeader
from cluster.codec.supervisor import Backoff, SourceSupervisor
from cluster.errors import ConfigError, SightlineError, SourceError, UnavailableError
from cluster.hosts import is_loopback
from cluster.types import EncodedPacket
from cluster.wire.channel import Call, CallEndedError, finish, first_reply, open_channel, read, split_address, write
from cluster.wire.convert import opening_of, packet_to_proto
from cluster.wire.edge_buffer import EdgeBuffer
from cluster.wire.status import is_ours, to_error
from cluster.wire.tls import ClientCredentials

Code = grpc.StatusCode

_FOR_GOOD = frozenset(
    {Code.NOT_FOUND, Code.FAILED_PRECONDITION, Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED, Code.PERMISSION_DENIED}
)
# An agent restarted after a power cut is refused until the gateway's keepalive has found its old connection dead.
_OCCUPIED_S = 45.0
_EXHAUSTED_TRIES = 3


@dataclass(frozen=True, slots=True)
class PushOptions:
    """Batches are sent when full (``batch_packets``, ``batch_bytes``) or ``flush_s`` after their first packet.

    The buffer holds unacknowledged packets: at 25 fps, 4096 of them bridge 160 s of interruption. ``give_up_s``:
    seconds without a connection after which :meth:`PushAgent.run` fails; None retries forever. ``reply_s``: timeout of
    the gateway's reply to the opening.
    """

    batch_packets: int = 16
    batch_bytes: int = 256 * 1024
    flush_s: float = 0.05
    buffer_packets: int = 4096
    buffer_bytes: int = 64 * 2**20
    backoff: Backoff = field(default_factory=lambda: Backoff(first_s=0.25, longest_s=15.0))
    give_up_s: float | None = None
    reply_s: float = 20.0
    progress_s: float = 0.2


@dataclass(frozen=True, slots=True)
class PushStatus:
    """Progress of a push. ``state`` and ``reason``: of the connection, or of the source while it is the problem.

    ``packets`` and ``bytes`` count what the cluster acknowledged, ``read`` packets read from the source, ``dropped``
    those dropped here because the buffer was full, ``cluster_dropped`` those dropped by the cluster, ``reconnects``
    broken connections.
    """

    state: CameraState = CameraState.CONNECTING
    reason: str = ""
    packets: int = 0
    bytes: int = 0
    read: int = 0
    dropped: int = 0
    cluster_dropped: int = 0
    reconnects: int = 0


class PushAgent:
    """Sends one source to one camera of a gateway; :meth:`run` once, cancel it to stop.

    Args:
        on_progress: called on the event loop at every change of state and every ``progress_s`` while packets move.
        credentials: reads token and TLS files for every connection, since an agent outlives them; none by default.
    """

    def __init__(
        self,
        source: Source,
        address: str,
        camera: str,
        *,
        options: PushOptions | None = None,
        on_progress: Callable[[PushStatus], None] = lambda _: None,
        credentials: Callable[[], ClientCredentials] = ClientCredentials,
    ) -> None:
        self._credentials = credentials
        self._address = address
        self._read_credentials()
        self._source = source
        self._camera = camera
        self._options = options or PushOptions()
        self._session = uuid.uuid4().hex
        self._on_progress = on_progress
        self._told_at = 0.0
        self.status = PushStatus()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._supervisor = SourceSupervisor(source)
        self._buffer = EdgeBuffer(
            self._options.buffer_packets, self._options.buffer_bytes, lossless=not source.live, wake=self._wake
        )
        self._numbered = 0
        self._offset: int | None = 0
        self._source_error: SourceError | None = None
        self._connected = self._was_connected = False
        self._credit = 0
        self._acknowledged = 0

    async def run(self) -> PushStatus:
        """Push until the source has ended and the cluster has acknowledged everything. Raises ``SourceError``: the
        source cannot be read; ``SightlineError``: the gateway refuses permanently (unknown camera, bad packets, another
        agent pushes), or was unreachable for ``give_up_s``."""
        self._loop = asyncio.get_running_loop()
        reader = threading.Thread(target=self._read, name=f"push {self._camera}", daemon=True)
        reader.start()
        try:
            await self._send()
        finally:
            self._buffer.close()
            self._supervisor.stop()
            await asyncio.to_thread(reader.join, 5.0)
        if self._source_error is not None:
            self._tell(state=CameraState.ERROR, reason=str(self._source_error))
            raise self._source_error
        self._tell(state=CameraState.ENDED, reason="")
        return self.status

    # -- the source's thread --------------------------------------------------------------------
    def _read(self) -> None:
        try:
            last = self._supervisor.run(self._on_header, self._on_packet, self._on_source)
            if last.state is CameraState.ERROR:
                self._source_error = SourceError(last.reason, retryable=False)
        except Exception as error:
            self._source_error = SourceError(f"reading failed: {error}", retryable=False)
        finally:
            self._buffer.finish()

    def _on_header(self, header: StreamHeader) -> None:
        # Video sent while the source was disconnected is missing, which a gap in the sequence numbers reports.
        self._offset = None if self._numbered else 0
        self._buffer.begin(header)

    def _on_packet(self, packet: EncodedPacket) -> None:
        if self._offset is None:
            self._offset = self._numbered + 1 - packet.sequence
        numbered = replace(packet, sequence=packet.sequence + self._offset) if self._offset else packet
        self._numbered = numbered.sequence + 1
        self._buffer.put(numbered)

    def _on_source(self, status: SourceStatus) -> None:
        if self._loop is None or self._loop.is_closed():
            return
        if status.state is CameraState.BACKOFF or (status.state is CameraState.RUNNING and self._connected):
            self._loop.call_soon_threadsafe(lambda: self._tell(state=status.state, reason=status.reason))

    def _wake(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._changed.set)

    # -- the event loop -------------------------------------------------------------------------
    async def _send(self) -> None:
        """Open one connection after another until the end is confirmed."""
        down_since = time.monotonic()
        attempt = exhausted = 0
        while True:
            before = self._acknowledged
            try:
                if await self._connection():
                    return
                self._buffer.rewind()
                attempt = exhausted = 0
                down_since = time.monotonic()
                continue
            except grpc.aio.AioRpcError as failure:
                error: SightlineError = to_error(failure)
                if failure.code() is Code.UNIMPLEMENTED and not is_ours(failure):
                    error = UnavailableError(f"{self._address} answers, but it is no Sightline gateway")
                # Refused before it was connected, the agent has merely come when too many others did.
                refused = failure.code() is Code.RESOURCE_EXHAUSTED and self._was_connected
                exhausted = exhausted + 1 if refused else 0
                occupied = failure.code() is Code.ALREADY_EXISTS and time.monotonic() - down_since > _OCCUPIED_S
                # If the gateway was reached before, a reply that is not its own comes from a proxy in front of it.
                for_good = failure.code() in _FOR_GOOD and (is_ours(failure) or not self.status.packets)
                if for_good or exhausted >= _EXHAUSTED_TRIES or occupied:
                    raise error from None
            except (UnavailableError, TimeoutError) as failure:
                error = UnavailableError(str(failure) or f"the gateway at {self._address} does not answer")
            self._buffer.rewind()
            if self._acknowledged > before:
                attempt = exhausted = 0
            if self._was_connected:
                down_since = time.monotonic()
            give_up_s = self._options.give_up_s
            if give_up_s is not None and time.monotonic() - down_since > give_up_s:
                raise UnavailableError(f"no connection to {self._address} for {give_up_s:g} s: {error}")
            self._tell(
                state=CameraState.BACKOFF, reason=str(error), reconnects=self.status.reconnects + self._was_connected
            )
            await asyncio.sleep(self._options.backoff.delay_s(attempt, random.random()))
            attempt += 1

    def _read_credentials(self) -> None:
        credentials, (host, _) = self._credentials(), split_address(self._address)
        self._metadata = credentials.metadata(loopback=is_loopback(host))
        self._tls = credentials.channel_credentials()

    async def _connection(self) -> bool:
        """Send one epoch over one connection; True once the source's end is confirmed."""
        self._was_connected = False
        # During a renewal a file may be missing: try those read before.
        with contextlib.suppress(ConfigError):
            self._read_credentials()
        epoch = await self._begun()
        if epoch is None:
            return True
        header = self._buffer.header(epoch)
        assert header is not None
        opening = opening_of(header, self._camera, self._session)
        async with open_channel(self._address, internal=False, tls=self._tls) as channel:
            call = ingest_pb2_grpc.IngestStub(channel).Push(metadata=self._metadata)
            try:
                first = await first_reply(call, opening, self._options.reply_s)
                if first is grpc.aio.EOF:
                    raise UnavailableError("the gateway closed the stream")
                self._acknowledge(first)
                self._connected = self._was_connected = True
                self._tell(state=CameraState.RUNNING, reason="")
                return await self._exchange(call, epoch)
            finally:
                self._connected = False
                call.cancel()

    async def _begun(self) -> int | None:
        """The epoch to send next; None if the source ended before its first header."""
        while True:
            self._changed.clear()
            epoch = self._buffer.epoch
            if self._buffer.header(epoch) is not None:
                return epoch
            if self._buffer.finished:
                return None
            await self._changed.wait()

    async def _exchange(self, call: Call, epoch: int) -> bool:
        writer = asyncio.create_task(self._write(call, epoch))
        try:
            while (reply := await read(call)) is not grpc.aio.EOF:
                self._acknowledge(reply)
            if not writer.done():
                raise UnavailableError("the gateway closed the stream")
            return writer.result()
        finally:
            writer.cancel()
            await asyncio.wait({writer})

    async def _write(self, call: Call, epoch: int) -> bool:
        options = self._options
        try:
            while True:
                self._changed.clear()
                credit = self._credit - self._buffer.in_flight
                wanted = min(options.batch_packets, self._buffer.waiting)
                # Full batches only, since sending as credit trickles in is wasteful; an idle connection sends any.
                if 0 < wanted <= credit or (self._buffer.in_flight == 0 and credit > 0 and wanted):
                    if wanted < options.batch_packets and not self._buffer.finished:
                        await asyncio.sleep(options.flush_s)
                    batch = self._buffer.take(epoch, min(credit, options.batch_packets), options.batch_bytes)
                    if batch:
                        packets = ingest_pb2.PacketBatch(packets=[packet_to_proto(packet) for packet in batch])
                        await write(call, ingest_pb2.PushRequest(packets=packets))
                        continue
                last = self._buffer.finished and not self._buffer.waiting
                if last:
                    await write(call, ingest_pb2.PushRequest(end=ingest_pb2.End()))
                if last or (self._buffer.is_over(epoch) and self._buffer.in_flight == 0):
                    await call.done_writing()
                    return last
                await self._changed.wait()
        except CallEndedError:
            await finish(call)
            return False

    def _acknowledge(self, reply: ingest_pb2.PushReply) -> None:
        packets, size = self._buffer.acknowledge(reply.next_sequence)
        self._acknowledged = max(self._acknowledged, reply.next_sequence)
        self._credit = reply.credit
        self._changed.set()
        self._tell(
            packets=self.status.packets + packets,
            bytes=self.status.bytes + size,
            cluster_dropped=reply.dropped,
        )

    def _tell(self, **changes: object) -> None:
        before = self.status
        self.status = replace(before, read=self._numbered, dropped=self._buffer.dropped, **changes)  # type: ignore[arg-type]
        moved = before.state is not self.status.state or before.reason != self.status.reason
        now = time.monotonic()
        if moved or now - self._told_at >= self._options.progress_s:
            self._told_at = now
            self._on_progress(self.status)
