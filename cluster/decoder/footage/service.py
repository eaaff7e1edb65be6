"""Serves pictures, snapshots and clips of a decoder's cameras (``Recorder``), with its gRPC servicer and client."""

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias, TypeVar

import grpc
import grpc.aio
from sightline.v1 import pictures_pb2, pictures_pb2_grpc
from sightline.v1.pictures_pb2 import RecordEnd, RecordPart, RecordRequest

from cluster.config.alerts import ClipsConfig
from cluster.decoder.discovery import NetworkSearch
from cluster.decoder.footage.camera import CameraFootage
from cluster.decoder.footage.clip import LIVE, Remuxer, Transcoder, clip_writer
from cluster.decoder.footage.pictures import Picture, still
from cluster.decoder.footage.ring import Recording
from cluster.decoder.source_test import SourceTester
from cluster.errors import NotReadyError, SourceError, UnavailableError
from cluster.security.limits import ConcurrencyLimit
from cluster.wire.channel import ChannelPool
from cluster.wire.convert import settings_from_json
from cluster.wire.mapping import to_message
from cluster.wire.status import is_ours, to_error, upstream_error

log = logging.getLogger(__name__)
T = TypeVar("T")

POLL_S = 0.2
LIVE_POLL_S = 0.02
MOST_WATCHING = 32
SLOW_BYTES = 4_000_000
"""Bytes buffered for a live viewer, some seconds of a typical camera, beyond which it is disconnected."""
MOST_PICTURES = 64
MOST_REENCODED = 16
"""Concurrently re-encoded clips; they share one thread and slow down live cameras."""
_NICE = 10
_PACKETS = 16
"""Packets fed to a clip per turn on the shared thread."""


class Recorder:
    """Pictures, recordings and live views of a decoder's cameras. Runs on one event loop; decoding, encoding and muxing
    run on threads. ``cameras``: finds a camera's footage; raises ``UnknownCameraError``."""

    def __init__(self, settings: ClipsConfig, cameras: Callable[[str], CameraFootage]) -> None:
        self._settings = settings
        self._cameras = cameras
        self._pictures = ThreadPoolExecutor(1, "pictures")
        # A separate pool, so that snapshots do not wait for clips.
        self._stills = ThreadPoolExecutor(1, "stills", initializer=_lower_thread_priority)
        self._clips = ThreadPoolExecutor(1, "clips", initializer=_lower_thread_priority)
        self._live = ThreadPoolExecutor(1, "live")
        self._asked = ConcurrencyLimit(MOST_PICTURES, "pictures are being made already; ask again in a moment")
        self._recording = ConcurrencyLimit(settings.at_once, "clips are being recorded already (clips.at_once)")
        watching = "live views of this decoder's cameras are open already; close one"
        self._watching = ConcurrencyLimit(MOST_WATCHING, watching)
        self._reencoding = ConcurrencyLimit(MOST_REENCODED, "clips are being re-encoded already")

    def close(self) -> None:
        """Accept no more work; running work completes."""
        for pool in (self._pictures, self._stills, self._clips, self._live):
            pool.shutdown(wait=False, cancel_futures=True)

    async def picture(self, camera: str, *, kept: bool = False, width: int = 0) -> Picture:
        """The newest picture of a camera; see :meth:`LatestPicture.render`.

        Raises:
            UnknownCameraError: the camera does not run in this process.
            NotReadyError: no picture yet.
            CapacityError: too many concurrent requests.
        """
        footage = self._cameras(camera)
        with self._asked.taken():
            return await self._on(self._pictures, lambda: footage.latest.render(kept=kept, width=width))

    def delete_footage(self, camera: str, before_s: float = 0.0) -> int:
        """Delete a camera's footage older than ``before_s`` seconds; returns the bytes deleted. Raises
        ``UnknownCameraError``."""
        return self._cameras(camera).delete_before(before_s)

    async def record(self, order: RecordRequest) -> AsyncGenerator[RecordPart, None]:
        """Yield the snapshot, the clip in parts as it grows, playable after each, and its end. Close the generator to
        cancel.

        Raises:
            UnknownCameraError: the camera does not run in this process.
            NotReadyError: clips are off.
            CapacityError: too many recordings.
        """
        footage = self._cameras(order.camera)
        if footage.ring is None:
            raise NotReadyError("clips are disabled (clips.enabled)")
        recording: Recording | None = None
        with self._recording.taken():
            try:
                for _ in range(round(order.deadline_s / POLL_S)):
                    if footage.ring.arrived_s:
                        break
                    # This process or the camera has only just started.
                    await asyncio.sleep(POLL_S)
                recording = footage.ring.record(order.start, order.until, order.moment)
                if not order.only_clip:
                    snapshot = await self._snapshot(footage, order.moment)
                    if snapshot:
                        yield RecordPart(snapshot=snapshot)
                async for part in self._clip(footage, recording, order.deadline_s):
                    yield part
            finally:
                # Also if the reader leaves: stop recording.
                if recording is not None:
                    recording.end("its reader left")

    async def watch(self, camera: str) -> AsyncGenerator[bytes, None]:
        """Yield the camera's packets, unchanged, as a fragmented MP4 from the newest keyframe on; parts are whole
        boxes.

        Raises:
            UnknownCameraError: the camera does not run in this process.
            NotReadyError: the camera has privacy masks or no packet ring, or browsers do not play its codec.
            UnavailableError: the camera sends no video at the moment.
            CapacityError: too many viewers.
            SourceError: the video cannot be muxed into MP4.
        """
        footage = self._cameras(camera)
        if footage.make_painter() is not None:
            raise NotReadyError(
                "no live view: the camera has privacy masks, and its packets are not masked; its still picture is"
            )
        if footage.ring is None:
            raise NotReadyError("no packets are held, so there is no live view (clips.enabled)")
        with self._watching.taken():
            recording = footage.ring.follow(SLOW_BYTES)
            if recording.segment is None:
                raise UnavailableError("the camera sends no video at the moment")
            if recording.segment.codec not in LIVE:
                recording.end("it is not shown")
                raise NotReadyError(f"browsers do not play {recording.segment.codec}: there is no live view of it")
            writer = Remuxer(recording.segment, live=True, decoded_bytes=footage.decoded_bytes)
            try:
                while packets := recording.pop_packets() or not recording.done:
                    if packets is True:
                        await asyncio.sleep(LIVE_POLL_S)
                    elif data := await self._on(self._live, writer.feed, packets):
                        if self._cameras(camera) is not footage:
                            # The camera was restarted, as after drawing a mask: queued video may show masked areas.
                            return
                        yield data
            finally:
                recording.end("its viewer left")
                with contextlib.suppress(SourceError):
                    await self._on(self._live, writer.close)

    # -- internals ------------------------------------------------------------------------------
    async def _snapshot(self, footage: CameraFootage, moment: int) -> bytes:
        """Snapshot at ``moment``, else the newest picture; empty if there is neither."""
        assert footage.ring is not None
        packets = footage.ring.gop_packets(moment)
        try:
            return await self._on(self._stills, still, packets, moment, footage.make_painter(), footage.decoded_bytes)
        except SourceError as error:
            log.debug("no still: %s", error)
        try:
            return (await self._on(self._pictures, footage.latest.render)).jpeg
        except NotReadyError:
            return b""

    async def _clip(self, footage: CameraFootage, recording: Recording, deadline_s: float) -> AsyncIterator[RecordPart]:
        segment = recording.segment
        if segment is None:
            yield RecordPart(end=RecordEnd(note=recording.end_reason))
            return
        writer = clip_writer(
            segment,
            recording.start,
            painter=footage.make_painter(),
            height=self._settings.reencode_height,
            decoded_bytes=footage.decoded_bytes,
        )
        reencodes = isinstance(writer, Transcoder)
        if reencodes and (refusal := self._reencoding.refusal()):
            yield RecordPart(end=RecordEnd(note=refusal))
            return
        with self._reencoding.taken() if reencodes else contextlib.nullcontext():
            trouble = ""
            try:
                async for data in self._written(writer, recording, deadline_s):
                    yield RecordPart(clip=data)
            except SourceError as error:
                trouble = str(error)
            try:
                if data := await self._on(self._clips, writer.close):
                    yield RecordPart(clip=data)
            except SourceError as error:
                trouble = trouble or str(error)
            first, last = writer.span
            lost = "packets were lost on the way" if recording.losses else ""
            note = "; ".join(filter(None, (recording.missing, lost, trouble, recording.end_reason)))
            yield RecordPart(end=RecordEnd(first=first, last=last, note=note))

    async def _written(
        self, writer: Remuxer | Transcoder, recording: Recording, deadline_s: float
    ) -> AsyncIterator[bytes]:
        now = asyncio.get_running_loop().time
        deadline = now() + deadline_s
        while True:
            done = recording.done
            if packets := recording.pop_packets(_PACKETS):
                if data := await self._on(self._clips, writer.feed, packets):
                    yield data
            elif done:
                return
            elif now() >= deadline:
                recording.end("the camera did not send the rest in time")
            else:
                await asyncio.sleep(POLL_S)

    @staticmethod
    async def _on(pool: ThreadPoolExecutor, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)


def _lower_thread_priority() -> None:
    """Run this thread at low priority, if the system supports it: live cameras come first."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


LONGEST_S = 3600.0

Context: TypeAlias = grpc.aio.ServicerContext


class RecorderServicer(pictures_pb2_grpc.RecorderServicer):
    """gRPC servicer of a decoder's recorder. See protos/sightline/v1/pictures.proto."""

    def __init__(self, recorder: Recorder, tester: SourceTester, search: NetworkSearch) -> None:
        self._recorder, self._tester, self._search = recorder, tester, search

    async def Test(self, request: pictures_pb2.TestRequest, _context: Context) -> pictures_pb2.TestReply:
        settings = settings_from_json(request.settings_json)
        found = await self._tester.test(request.camera, request.source, settings)
        return to_message(pictures_pb2.TestReply, found)

    async def Discover(self, request: pictures_pb2.DiscoverRequest, context: Context) -> None:
        found = self._search.search(request.network, request.user, request.password)
        async with contextlib.aclosing(found) as parts:
            async for each in parts:
                await context.write(to_message(pictures_pb2.DiscoverReply, each))

    async def Picture(self, request: pictures_pb2.PictureRequest, _context: Context) -> pictures_pb2.PictureReply:
        picture = await self._recorder.picture(request.camera, kept=request.kept, width=request.width)
        return to_message(pictures_pb2.PictureReply, picture)

    async def Live(self, request: pictures_pb2.LiveRequest, context: Context) -> None:
        async with contextlib.aclosing(self._recorder.watch(request.camera)) as parts:
            async for data in parts:
                await context.write(pictures_pb2.LivePart(data=data))

    async def Record(self, request: pictures_pb2.RecordRequest, context: Context) -> None:
        request.deadline_s = min(request.deadline_s, LONGEST_S)
        async with contextlib.aclosing(self._recorder.record(request)) as parts:
            async for part in parts:
                # Parts are complete: if this process dies, what has arrived is playable.
                await context.write(part)

    async def Forget(
        self, request: pictures_pb2.ForgetFootageRequest, _context: Context
    ) -> pictures_pb2.ForgetFootageReply:
        deleted = self._recorder.delete_footage(request.camera, request.before_s)
        return pictures_pb2.ForgetFootageReply(bytes=deleted)


class DecoderRecorder:
    """Client that records at the camera's decoder (:data:`cluster.alerts.clips.footage_collector.Record`). ``route``:
    returns ``host:port`` of a camera's decoder; raises ``UnavailableError`` while there is none."""

    def __init__(self, route: Callable[[str], Awaitable[str]], channels: ChannelPool) -> None:
        self._route = route
        self._channels = channels

    async def __call__(self, order: RecordRequest) -> AsyncGenerator[RecordPart, None]:
        """See :meth:`Recorder.record`. Raises ``UnavailableError``: decoder lost; parts received so far are valid."""
        address = await self._route(order.camera)
        try:
            async with self._channels.lease(address) as channel:
                call = pictures_pb2_grpc.RecorderStub(channel).Record(order)
                try:
                    async for part in call:
                        yield part
                finally:
                    call.cancel()
        except grpc.aio.AioRpcError as error:
            raise to_error(error) if is_ours(error) else upstream_error(error, "the camera's decoder") from None
