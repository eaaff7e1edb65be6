"""``Recorder``: pictures and clips of the cameras that a decoder runs, and the alerting process's way to them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeAlias

import grpc
import grpc.aio
from sightline.v1 import pictures_pb2, pictures_pb2_grpc

from cluster.decoder.footage.recorder import ClipEnd, ClipPart, Order, Recorder, Snapshot
from cluster.errors import SightlineError
from cluster.wire.channel import ChannelPool
from cluster.wire.status import abort, as_told, is_ours, to_error

SERVICE = "sightline.v1.Recorder"
LONGEST_S = 3600.0

Context: TypeAlias = grpc.aio.ServicerContext


class RecorderServicer(pictures_pb2_grpc.RecorderServicer):
    """The decoder's side. See protos/sightline/v1/pictures.proto."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    async def Picture(  # noqa: N802
        self, request: pictures_pb2.PictureRequest, context: Context
    ) -> pictures_pb2.PictureReply:
        """See the proto."""
        try:
            picture = await self._recorder.picture(request.camera, kept=request.kept, width=request.width)
        except (SightlineError, ValueError) as error:
            await abort(context, error)
        return pictures_pb2.PictureReply(
            jpeg=picture.jpeg,
            etag=picture.etag,
            pts=picture.pts,
            age_s=picture.age_s,
            width=picture.width,
            height=picture.height,
        )

    async def Record(self, request: pictures_pb2.RecordRequest, context: Context) -> None:  # noqa: N802
        """See the proto."""
        order = Order(
            camera=request.camera,
            start=request.start,
            until=request.until,
            deadline_s=min(request.deadline_s, LONGEST_S),
            moment=request.moment,
            only_clip=request.only_clip,
        )
        try:
            async with contextlib.aclosing(self._recorder.record(order)) as parts:
                async for part in parts:
                    match part:
                        case Snapshot(data):
                            await context.write(pictures_pb2.RecordPart(snapshot=data))
                        case ClipPart(data):
                            # Not cut up: should this process die, what has arrived ends with a whole part.
                            await context.write(pictures_pb2.RecordPart(clip=data))
                        case ClipEnd(first, last, note):
                            end = pictures_pb2.RecordEnd(first=first, last=last, note=note)
                            await context.write(pictures_pb2.RecordPart(end=end))
        except (SightlineError, ValueError) as error:
            await abort(context, error)

    async def Forget(  # noqa: N802
        self, request: pictures_pb2.ForgetFootageRequest, context: Context
    ) -> pictures_pb2.ForgetFootageReply:
        """See the proto."""
        try:
            return pictures_pb2.ForgetFootageReply(bytes=self._recorder.forget(request.camera, request.before_s))
        except SightlineError as error:
            await abort(context, error)


class DecoderRecorder:
    """Has clips made where their cameras' packets are (:data:`cluster.alerts.clips.collector.Record`).

    Args:
        route: camera -> ``host:port`` of its decoder; raises ``UnavailableError`` while there is none.
    """

    def __init__(self, route: Callable[[str], Awaitable[str]], channels: ChannelPool) -> None:
        self._route = route
        self._channels = channels

    async def __call__(self, order: Order) -> AsyncGenerator[Snapshot | ClipPart | ClipEnd, None]:
        """See :meth:`Recorder.record`; ``UnavailableError``: the decoder is gone, what came so far is good."""
        request = pictures_pb2.RecordRequest(
            camera=order.camera,
            start=order.start,
            until=order.until,
            deadline_s=order.deadline_s,
            moment=order.moment,
            only_clip=order.only_clip,
        )
        address = await self._route(order.camera)
        try:
            async with self._channels.lease(address) as channel:
                call = pictures_pb2_grpc.RecorderStub(channel).Record(request)
                try:
                    async for part in call:
                        match part.WhichOneof("part"):
                            case "snapshot":
                                yield Snapshot(part.snapshot)
                            case "clip":
                                yield ClipPart(part.clip)
                            case "end":
                                yield ClipEnd(part.end.first, part.end.last, part.end.note)
                finally:
                    call.cancel()
        except grpc.aio.AioRpcError as error:
            raise to_error(error) if is_ours(error) else as_told(error, "the camera's decoder") from None
