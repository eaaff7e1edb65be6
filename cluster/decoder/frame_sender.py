"""gRPC ``Frames`` client of a decoder: camera threads enqueue samples without blocking; one stream per replica."""

import asyncio
import contextlib
import logging
import random
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import grpc.aio
from sightline.v1 import frames_pb2, frames_pb2_grpc

from cluster import metrics
from cluster.codec.supervisor import Backoff
from cluster.decoder.frame_lanes import HandOver, Lane, LaneStatus, LostCamera, ReplicaLink
from cluster.errors import UnavailableError
from cluster.types import FrameSample, StreamSpec
from cluster.types.reports import WindowCounters
from cluster.vision.sampler import Cut
from cluster.wire.channel import Call, CallEndedError, finish, open_channel, read, write
from cluster.wire.convert import frame_to_proto, spec_to_json
from cluster.wire.tls import PeerTls

log = logging.getLogger(__name__)

CONNECT_S = 5.0


class FrameSender:
    """Sends frames to replicas. Created on an event loop; methods up to :meth:`status` may be called from any thread.

    At most ``max_queue`` frames of a camera are queued here, besides those in flight on the replica's credit. If the
    replica is slow, the camera's whole queue is dropped and counted, and frames are refused up to the next random
    access frame, on which they depend.

    Args:
        on_lost: called on the event loop when a connection breaks, cannot be made (once per outage), or the replica
            refuses a camera; must not block.
        fresh_s: longest wait for the fresh frame of a camera being handed over, before its old replica is told to
            close it; ``hand_over_s``: longest wait for the old replica after that.
    """

    def __init__(
        self,
        on_lost: Callable[[list[LostCamera]], None],
        *,
        max_queue: int = 32,
        backoff: Backoff | None = None,
        fresh_s: float = 2.0,
        hand_over_s: float = 10.0,
        tls: PeerTls | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_lost = on_lost
        self._max_queue = max_queue
        self._tls = tls
        self._backoff = backoff or Backoff(first_s=0.1, longest_s=2.0)
        self._fresh_s, self._hand_over_s = fresh_s, hand_over_s
        self._lock = threading.Lock()
        self._lanes: dict[str, Lane] = {}
        self._links: dict[str, ReplicaLink] = {}
        self._term = 0
        self._stopped = False
        self._left = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # -- any thread -----------------------------------------------------------------------------
    def confirm(self, term: int) -> None:
        """Set the version of the controller's table that assigns all open cameras to this decoder
        (``StreamOpen.term``)."""
        with self._lock:
            self._term = term
            for lane in self._lanes.values():
                if lane.closing is None:
                    lane.term = term

    def assign(self, spec: StreamSpec, address: str, *, hand_over: bool = False) -> bool:
        """Send ``spec.stream`` to the replica at ``address`` from now on; call again to change the spec.

        A camera that moves is closed at its old replica, and its next frame must be fresh. With ``hand_over``, frames
        before that fresh one still go to the old replica; later ones are held until it has answered its queue and saved
        the camera's window for the new replica. Returns whether a hand-over was started; its failure is reported to
        ``on_lost``.
        """
        camera = spec.stream
        with self._lock:
            lane = self._lanes.get(camera)
            if lane is not None and lane.closing is None and lane.hand_over is not None:
                if address != lane.hand_over.target and not hand_over:
                    self._loop.call_soon_threadsafe(lane.hand_over.done.set)
                lane.spec, lane.hand_over.target = spec, address
                return True
            if hand_over and lane is not None and lane.closing is None and self._can_move(lane, address):
                lane.spec, lane.hand_over = spec, HandOver(address)
                move = self._hand_over(camera, lane, lane.hand_over)
                self._loop.call_soon_threadsafe(self._create_task, move, f"{camera} moves to {address}")
                return True
            # Only if known there: a replica ends the stream on a close for any other camera.
            leaves = lane is not None and lane.address != address and lane.hand_over is None and lane.at_replica
            if lane is not None and leaves and (old := self._links.get(lane.address)):
                old.closes.append(lane.closing or frames_pb2.StreamClose(camera=camera))
                self._wake(old)
            if lane is None or lane.closing is not None:
                if lane is not None:
                    lane.drop_unsent()
                self._lanes[camera] = Lane(spec, address, self._term)
            elif lane.address != address:
                lane.cut_queue()
                lane.reset()
                lane.spec, lane.address, lane.windows, lane.before = spec, address, WindowCounters(), WindowCounters()
            else:
                lane.spec = spec
            self._ready(camera, self._link(address))
            return False

    def send(self, sample: FrameSample, cut: Cut | None = None) -> bool:
        """Enqueue one frame, whose patches ``cut`` cuts if it does not have them yet. Returns False if it was dropped:
        the next one must be a random access frame."""
        with self._lock:
            lane = self._lanes.get(sample.stream)
            if lane is None or lane.closing is not None:
                return False
            if not lane.wants(sample):
                lane.dropped += 1
                return False
        # Serialised outside the lock: only the camera's own thread sends for it.
        message = frame_to_proto(sample if cut is None else replace(sample, patches=cut()))
        with self._lock:
            if self._stopped:
                lane.dropped += 1
                return False
            taken = lane.enqueue(sample, message, self._max_queue)
            if taken == "held" and lane.hand_over is not None:
                self._loop.call_soon_threadsafe(lane.hand_over.fresh.set)
            elif taken == "queued" and (link := self._links.get(lane.address)):
                self._ready(sample.stream, link)
            return taken != "dropped"

    def drop_queue(self, camera: str) -> None:
        """Drop the unsent frames of a camera whose replica is gone."""
        with self._lock:
            if (lane := self._lanes.get(camera)) is not None and lane.hand_over is None:
                lane.cut_queue()
                lane.drop(lane.queue, "no_replica")
                lane.wants_fresh = True

    def take_cut(self, camera: str) -> int | None:
        """Start of the first frame of a queue dropped since the last call, on the camera's clock: no frame from there
        on was sent. ``None`` if no queue was dropped."""
        with self._lock:
            lane = self._lanes.get(camera)
            if lane is None:
                return None
            cut, lane.cut = lane.cut, None
            return cut

    def close(self, camera: str, *, flush: bool = False) -> None:
        """Remove a camera; with ``flush``, after its queue is sent, and have its last window answered. An unreachable
        replica is not notified: it closes the camera by itself."""
        with self._lock:
            lane = self._lanes.get(camera)
            if lane is None:
                return
            link = self._links[lane.address]
            if not flush:
                lane.drop_unsent()
                if lane.hand_over is not None:
                    self._loop.call_soon_threadsafe(lane.hand_over.fresh.set)
                elif link.unreachable:
                    self._remove(camera, link)
                    return
            lane.closing = frames_pb2.StreamClose(camera=camera, flush=flush)
            self._ready(camera, link)

    def release(self, camera: str) -> None:
        """Remove a camera that another decoder sends from now on; its window stays at the replica for that."""
        with self._lock:
            lane = self._lanes.get(camera)
            if lane is not None and lane.hand_over is None:
                link = self._links[lane.address]
                if lane.at_replica:
                    link.closes.append(frames_pb2.StreamClose(camera=camera, released=True))
                self._remove(camera, link)
                return
        self.close(camera)

    def status(self, camera: str) -> LaneStatus | None:
        """Status of a camera's path; None if the camera is not assigned."""
        with self._lock:
            lane = self._lanes.get(camera)
            return None if lane is None else lane.status(unreachable=self._links[lane.address].unreachable)

    # -- the event loop -------------------------------------------------------------------------
    async def stop(self, flush_s: float = 2.0) -> None:
        """Wait up to ``flush_s`` for closing cameras, then end every stream."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(flush_s):
                while any(lane.closing is not None for lane in list(self._lanes.values())):
                    self._left.clear()
                    await self._left.wait()
                if not self._lanes and self._tasks:
                    for link in list(self._links.values()):
                        if link.unreachable and link.task is not None:
                            link.task.cancel()
                    await asyncio.wait(self._tasks)
        with self._lock:
            self._stopped = True
            for lane in self._lanes.values():
                lane.drop_unsent()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _start(self, link: ReplicaLink) -> None:
        if not self._stopped:
            link.task = self._create_task(self._run(link), f"frames to {link.address}")

    def _create_task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _hand_over(self, camera: str, lane: Lane, move: HandOver) -> None:
        """Close the camera at the old replica, wait for it, and continue at the new one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._fresh_s):
                await move.fresh.wait()
        with self._lock:
            move.leaving = True
            if link := self._links.get(lane.address):
                self._ready(camera, link)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._hand_over_s):
                await move.done.wait()
        with self._lock:
            if self._lanes.get(camera) is not lane:
                return
            old, settled = lane.address, lane.counters.settled
            frames = lane.reset()
            if link := self._links.get(old):
                if not move.closed and not link.unreachable:
                    link.closes.append(frames_pb2.StreamClose(camera=camera))
                self._wake(link)
            lane.finish_hand_over(move)
            self._ready(camera, self._link(lane.address))
        if not move.saved:
            reason = (
                "the replica could not save the window"
                if move.closed
                else "the replica did not close the camera in time"
            )
            self._on_lost([LostCamera(camera, old, frames, reason, settled=settled)])

    async def _run(self, link: ReplicaLink) -> None:
        """Connect and send; reconnect while any camera is assigned to this replica."""
        attempt = 0
        while self._in_use(link):
            reason = "the replica ended the stream"
            try:
                async with open_channel(link.address, tls=self._tls) as channel:
                    await self._exchange(link, frames_pb2_grpc.FramesStub(channel).Send())
            except grpc.aio.AioRpcError as error:
                reason = error.details() or error.code().name
            except TimeoutError:
                reason = f"no answer within {CONNECT_S:g} s"
            except UnavailableError as error:
                reason = str(error)
            except Exception as error:
                # A bug here must cost one connection, not the replica's link for good.
                log.error("sending frames to %s failed", link.address, exc_info=error)
                reason = repr(error)
            if not self._in_use(link):
                break
            self._break(link, reason)
            attempt = 0 if link.connected else attempt + 1
            link.connected = False
            await asyncio.sleep(self._backoff.delay_s(attempt, random.random()))

    def _in_use(self, link: ReplicaLink) -> bool:
        """Whether the link is still needed; removes it if not."""
        with self._lock:
            if self._links.get(link.address) is not link:
                return False
            if link.closes and link.connected:
                return True
            if any(lane.address == link.address for lane in self._lanes.values()):
                return True
            del self._links[link.address]
            return False

    def _break(self, link: ReplicaLink, reason: str) -> None:
        """Handle a broken or failed connection; reported once per outage."""
        lost: list[LostCamera] = []
        with self._lock:
            link.closes.clear()
            for camera, lane in list(self._lanes.items()):
                if lane.address != link.address:
                    continue
                if lane.hand_over is not None:
                    # End the hand-over before reconnecting: the camera will not be open on the new connection.
                    lane.hand_over.fresh.set()
                    lane.hand_over.done.set()
                    continue
                # Frames queued for a replica that was never reached can still be sent.
                frames = 0
                if link.connected:
                    lane.cut_queue()
                    frames = lane.reset()
                if not link.unreachable:
                    lost.append(LostCamera(camera, link.address, frames, reason))
                if lane.closing is not None and not lane.queue:
                    self._remove(camera, link)
                else:
                    self._ready(camera, link)
            link.unreachable = True
        if lost:
            self._on_lost(lost)

    async def _exchange(self, link: ReplicaLink, call: Call) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                await call.wait_for_connection()
            link.connected, link.unreachable = True, False
            writer = asyncio.create_task(self._write(link, call))
            reader = asyncio.create_task(self._read(link, call))
            try:
                await asyncio.wait({writer, reader}, return_when=asyncio.FIRST_COMPLETED)
                if writer.done() and not reader.done() and writer.result():
                    await call.done_writing()
                await reader
            finally:
                writer.cancel()
                reader.cancel()
                await asyncio.wait({writer, reader})
        finally:
            call.cancel()
            metrics.frames_lost.labels("unacknowledged").inc(link.in_flight)
            link.in_flight = 0

    async def _read(self, link: ReplicaLink, call: Call) -> None:
        while (ack := await read(call)) is not grpc.aio.EOF:
            for each in (ack, *ack.more):
                self._acknowledge(link, each)

    async def _write(self, link: ReplicaLink, call: Call) -> bool:
        """Send until the connection ends. Returns True if nothing is left for this replica."""
        try:
            while True:
                link.work.clear()
                link.woken = False
                while (message := self._next(link)) is not None:
                    await write(call, message)
                if not self._in_use(link):
                    return True
                await link.work.wait()
        except CallEndedError:
            await finish(call)
            return False

    def _next(self, link: ReplicaLink) -> frames_pb2.FrameMessage | None:
        """The next message, round robin over cameras."""
        with self._lock:
            if link.closes:
                return frames_pb2.FrameMessage(close=link.closes.popleft())
            while link.ready:
                camera = link.ready.popleft()
                lane = self._lanes.get(camera)
                if lane is None or lane.address != link.address:
                    continue
                if lane.must_open:
                    lane.stale = lane.in_flight[-1] if lane.in_flight else -1
                    lane.opened, lane.not_open = lane.spec, False
                    link.ready.append(camera)
                    opened = frames_pb2.StreamOpen(camera=camera, spec_json=spec_to_json(lane.spec), term=lane.term)
                    return frames_pb2.FrameMessage(open=opened)
                if lane.queue and len(lane.in_flight) < lane.credit:
                    frame = lane.queue.popleft()
                    lane.in_flight.append(frame.index)
                    lane.sent += 1
                    link.in_flight += 1
                    metrics.frames_sent.inc()
                    link.ready.append(camera)
                    return frames_pb2.FrameMessage(frame=frame)
                if lane.hand_over is not None:
                    if lane.hand_over.leaving and not lane.hand_over.close_sent and not lane.queue:
                        lane.hand_over.close_sent = True
                        return frames_pb2.FrameMessage(close=frames_pb2.StreamClose(camera=camera, hand_over=True))
                elif lane.closing is not None and not lane.queue:
                    self._remove(camera, link)
                    return frames_pb2.FrameMessage(close=lane.closing)
            return None

    def _acknowledge(self, link: ReplicaLink, ack: frames_pb2.FrameAck) -> None:
        link.in_flight -= ack.frames_taken + ack.frames_lost
        if ack.frames_lost:
            metrics.frames_lost.labels("refused").inc(ack.frames_lost)
        with self._lock:
            lane = self._lanes.get(ack.camera)
            if lane is None or lane.address != link.address:
                return
            refused = lane.acknowledge(ack)
            self._ready(ack.camera, link)
        if refused is not None:
            self._on_lost([refused])

    # -- under the lock -------------------------------------------------------------------------
    def _can_move(self, lane: Lane, address: str) -> bool:
        """Whether the camera's current replica is reachable and holds state that it can hand over."""
        link = self._links.get(lane.address)
        return lane.address != address and lane.sent > 0 and link is not None and link.connected

    def _link(self, address: str) -> ReplicaLink:
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = ReplicaLink(address)
            self._loop.call_soon_threadsafe(self._start, link)
        return link

    def _remove(self, camera: str, link: ReplicaLink) -> None:
        """Remove a camera's lane; the link ends with its last lane."""
        self._lanes.pop(camera).drop_unsent()
        self._wake(link)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._left.set)

    def _ready(self, camera: str, link: ReplicaLink) -> None:
        if camera not in link.ready:
            link.ready.append(camera)
        self._wake(link)

    def _wake(self, link: ReplicaLink) -> None:
        if not link.woken and not self._loop.is_closed():
            link.woken = True
            self._loop.call_soon_threadsafe(link.work.set)
