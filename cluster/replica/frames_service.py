"""gRPC ``Frames`` servicer of a replica: receives the kept patches of many cameras, one call per decoder."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import grpc.aio
from sightline.v1 import frames_pb2, frames_pb2_grpc

from cluster.errors import CapacityError, SightlineError, UnknownCameraError
from cluster.types import FrameSample, StreamSpec
from cluster.types.reports import HandOverResult, WindowCounters
from cluster.wire.convert import frame_from_proto, spec_from_json

if TYPE_CHECKING:
    from cluster.replica.events import WorkerFrames

log = logging.getLogger(__name__)

Context: TypeAlias = grpc.aio.ServicerContext


class _Arrival(NamedTuple):
    """``opening``: number of the camera's opening that the frame followed."""

    sample: FrameSample
    arrived_s: float
    opening: int


class _Opening(NamedTuple):
    spec: StreamSpec
    term: int


class _Refusal(NamedTuple):
    kind: frames_pb2.FrameRefusal
    reason: str


class _Owner(NamedTuple):
    """Connection that last opened the camera, and the ``term`` of that opening."""

    connection: _Connection
    term: int


@dataclass(slots=True)
class _Lane:
    """One camera on one connection: a queue bounded by the credit, and the task that drains it.

    ``frames``: queued ones since the last of ``openings``: a decoder that starts a camera again has not sent more than
    its credit because earlier frames still wait.
    ``discarding``: drop frames up to a random access frame; ``rejected``: why all frames are refused until the camera
    is reopened; ``told``: the decoder has been sent that refusal.
    """

    items: asyncio.Queue[_Arrival | _Opening | frames_pb2.StreamClose | None] = field(default_factory=asyncio.Queue)
    frames: int = 0
    openings: int = 0
    discarding: bool = False
    rejected: _Refusal | None = None
    told: bool = False
    task: asyncio.Task[None] | None = None

    def reject(self, kind: frames_pb2.FrameRefusal, reason: str, *, told: bool) -> _Refusal:
        self.rejected, self.told = _Refusal(kind, reason), told
        return self.rejected


def _sentence(error: Exception) -> str:
    """Reason sent to the decoder. Unexpected errors are logged, and must not affect other cameras."""
    if isinstance(error, (SightlineError, ValueError)):
        return str(error)
    log.error("the replica failed on a camera's message", exc_info=error)
    return f"the replica failed: {error!r}"


def _taken_over(camera: str) -> str:
    return f"another decoder sends camera {camera!r} now"


class FramesServicer(frames_pb2_grpc.FramesServicer):
    """Queues at most ``credit`` frames per camera; a decoder that sends more is disconnected.

    ``gather_s``: how long an acknowledgement waits to share a message with those of other cameras, since a message of
    its own would cost as much as a frame. Refusals, and cameras that send faster than that, do not wait.
    """

    def __init__(self, handler: WorkerFrames, *, credit: int = 64, gather_s: float = 0.1) -> None:
        self._handler, self._credit, self._gather_s = handler, credit, gather_s
        self._owners: dict[str, _Owner] = {}

    def acknowledge(self, camera: str) -> None:
        """Acknowledge an answered window without waiting for the camera's next frame: if this process dies, the decoder
        counts every window not acknowledged as lost. Call on the event loop."""
        if (owner := self._owners.get(camera)) is not None:
            owner.connection.acknowledge(camera)

    async def Send(self, request_iterator: object, context: Context) -> None:  # noqa: ARG002
        connection = _Connection(self._handler, self._credit, self._owners, self._gather_s)
        try:
            # Tells the decoder that it is connected.
            await context.send_initial_metadata(())
            await connection.serve(context)
        finally:
            await connection.close()


class _Connection:
    """One decoder's stream."""

    def __init__(self, handler: WorkerFrames, credit: int, owners: dict[str, _Owner], gather_s: float) -> None:
        self._handler, self._credit, self._owners = handler, credit, owners
        self._lanes: dict[str, _Lane] = {}
        self._acks: dict[str, frames_pb2.FrameAck] = {}
        self._ack_ready = asyncio.Event()
        self._gather_s = gather_s
        self._urgent = asyncio.Event()

    async def serve(self, context: Context) -> None:
        acks = asyncio.create_task(self._write_acks(context))
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                self._take(message)
            await self._drain()
        finally:
            acks.cancel()
            await asyncio.wait({acks})
        if self._acks:
            await context.write(self._gathered())

    async def _drain(self) -> None:
        """Process what the decoder sent before it half-closed the call."""
        tasks = {lane.task for lane in self._lanes.values() if lane.task is not None}
        for lane in self._lanes.values():
            lane.items.put_nowait(None)
        if tasks:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Stop the lanes and report the cameras that no other connection has taken over."""
        tasks = {lane.task for lane in self._lanes.values() if lane.task is not None}
        for task in tasks:
            task.cancel()
        # Before waiting, in which this may be cancelled again; a cancelled lane opens no camera any more.
        lost = [camera for camera in self._lanes if self._owns(camera)]
        for camera in lost:
            del self._owners[camera]
        if lost:
            await self._handler.on_lost(lost)
        if tasks:
            await asyncio.wait(tasks)

    def acknowledge(self, camera: str) -> None:
        """Send the camera's counts now, without a frame."""
        if camera in self._lanes:
            self._ack(camera, 0, None, opened=True)

    def surrender(self, camera: str) -> None:
        """Refuse further frames of a camera that another connection has opened."""
        if (lane := self._lanes.get(camera)) is not None:
            lane.reject(frames_pb2.FRAME_REFUSAL_NOT_OPEN, _taken_over(camera), told=False)

    def _owns(self, camera: str) -> bool:
        owner = self._owners.get(camera)
        return owner is not None and owner.connection is self

    def _take(self, message: frames_pb2.FrameMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "open":
            self._open(message.open)
        elif kind == "frame":
            sample = frame_from_proto(message.frame)
            lane = self._lane(sample.stream)
            if lane.frames >= self._credit:
                raise CapacityError(
                    f"camera {sample.stream!r} has more than its credit of {self._credit} frames unacknowledged"
                )
            lane.frames += 1
            lane.items.put_nowait(_Arrival(sample, time.monotonic(), lane.openings))
        elif kind == "close":
            lane = self._lane(message.close.camera)
            lane.items.put_nowait(message.close)
        else:
            raise ValueError("an empty message; there are: open, frame, close")

    def _open(self, opened: frames_pb2.StreamOpen) -> None:
        spec = spec_from_json(opened.spec_json)
        if not opened.camera or spec.stream != opened.camera:
            raise ValueError(f"camera {opened.camera!r} was opened with the specification of {spec.stream!r}")
        lane = self._lanes.get(opened.camera)
        if lane is None:
            lane = self._lanes[opened.camera] = _Lane()
            lane.task = asyncio.create_task(self._work(opened.camera, lane), name=f"frames of {opened.camera}")
        lane.frames, lane.openings = 0, lane.openings + 1
        lane.items.put_nowait(_Opening(spec, opened.term))

    def _lane(self, camera: str) -> _Lane:
        lane = self._lanes.get(camera)
        if lane is None:
            raise ValueError(f"camera {camera!r} was not opened on this stream; `open` comes before its first frame")
        return lane

    async def _work(self, camera: str, lane: _Lane) -> None:
        while True:
            item = await lane.items.get()
            if item is None:
                return
            if isinstance(item, _Arrival):
                taken, refused = await self._frame(lane, item)
                lane.frames -= item.opening == lane.openings
                self._ack(camera, item.sample.index, refused, taken=taken)
            elif isinstance(item, _Opening):
                self._ack(camera, 0, await self._admit(lane, item), opened=True)
            else:
                mine = self._owns(camera)
                if mine:
                    del self._owners[camera]
                if item.hand_over:
                    # Send pending acknowledgements before the hand-over, which takes time.
                    self._urgent.set()
                    handed = await self._hand_over(camera, mine=mine)
                    before = self._acks.get(camera)
                    if before is not None and not before.opened:
                        handed.index, handed.opened = before.index, False
                        handed.refused, handed.refusal = before.refused, before.refusal
                        handed.frames_taken, handed.frames_lost = before.frames_taken, before.frames_lost
                    self._acks[camera] = handed
                    self._urgent.set()
                    self._ack_ready.set()
                elif mine and item.released:
                    await self._handler.on_lost([camera])
                elif mine:
                    await self._leave(camera, item.flush)
                if lane.items.empty():
                    del self._lanes[camera]
                    return

    async def _leave(self, camera: str, flush: bool) -> None:
        try:
            await self._handler.on_close(camera, flush)
        except Exception as error:
            _sentence(error)

    async def _hand_over(self, camera: str, *, mine: bool) -> frames_pb2.FrameAck:
        handed = HandOverResult(False, self._handler.counters(camera))
        try:
            if mine:
                handed = await self._handler.on_hand_over(camera)
        except Exception as error:
            _sentence(error)
        return self._acknowledgement(camera, handed.counters, opened=True, closed=True, saved=handed.saved)

    def _acknowledgement(self, camera: str, counters: WindowCounters, **others: Any) -> frames_pb2.FrameAck:
        return frames_pb2.FrameAck(
            camera=camera,
            credit=self._credit,
            windows_done=counters.done,
            windows_gated=counters.gated,
            windows_dropped=counters.dropped,
            windows_closed=counters.closed,
            window_end=counters.end,
            **others,
        )

    async def _admit(self, lane: _Lane, opening: _Opening) -> _Refusal | None:
        """Take ownership of the camera, in sequence with its frames."""
        spec, term = opening
        owner = self._owners.get(spec.stream)
        if owner is not None and owner.connection is not self:
            if term < owner.term:
                return lane.reject(frames_pb2.FRAME_REFUSAL_NOT_OPEN, _taken_over(spec.stream), told=True)
            owner.connection.surrender(spec.stream)
        self._owners[spec.stream] = _Owner(self, term)
        lane.rejected = None
        try:
            await self._handler.on_open(spec)
        except Exception as error:
            return lane.reject(frames_pb2.FRAME_REFUSAL_SPEC, _sentence(error), told=True)
        return None

    async def _frame(self, lane: _Lane, arrival: _Arrival) -> tuple[bool, _Refusal | None]:
        """Whether the frame was taken, and a refusal, after which frames are discarded up to a random access frame."""
        sample, arrived_s, _ = arrival
        if lane.rejected is None and (not lane.discarding or sample.random_access):
            lane.discarding = False
            try:
                await self._handler.on_frame(sample, arrived_s)
                return True, None
            except UnknownCameraError as error:
                lane.reject(frames_pb2.FRAME_REFUSAL_NOT_OPEN, str(error), told=False)
            except Exception as error:
                lane.discarding = True
                return False, _Refusal(frames_pb2.FRAME_REFUSAL_FRAME, _sentence(error))
        if lane.rejected is None or (lane.told and not sample.random_access):
            # One refusal per anchor is enough.
            return False, None
        lane.told = True
        return False, lane.rejected

    def _ack(
        self, camera: str, index: int, refused: _Refusal | None, *, opened: bool = False, taken: bool | None = None
    ) -> None:
        """Queue an acknowledgement; only a camera's newest one is sent, with refusals and frame counts of earlier ones.
        ``taken``: whether the frame was taken; ``None`` without one."""
        before = self._acks.get(camera)
        if before is not None and opened and not before.opened:
            index, opened = before.index, False
        ack = self._acknowledgement(camera, self._handler.counters(camera), index=index, opened=opened)
        ack.frames_taken, ack.frames_lost = int(taken is True), int(taken is False)
        if before is not None:
            ack.frames_taken += before.frames_taken
            ack.frames_lost += before.frames_lost
        self._acks[camera] = ack
        if refused is not None:
            ack.refusal, ack.refused = refused
        elif before is not None:
            ack.refusal, ack.refused = before.refusal, before.refused
        if opened or refused or before is not None or 2 * (self._lanes[camera].frames + 1) >= self._credit:
            self._urgent.set()
        self._ack_ready.set()

    async def _write_acks(self, context: Context) -> None:
        while True:
            while not self._acks:
                self._ack_ready.clear()
                await self._ack_ready.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._gather_s):
                    await self._urgent.wait()
            self._urgent.clear()
            await context.write(self._gathered())

    def _gathered(self) -> frames_pb2.FrameAck:
        """All queued acknowledgements, as one message."""
        first, *others = self._acks.values()
        self._acks = {}
        first.more.extend(others)
        return first
