"""gRPC ``Pictures``: camera pictures and incident footage, served by their owners and forwarded by the gateway."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeAlias

import grpc
import grpc.aio
from sightline.v1 import pictures_pb2 as pb
from sightline.v1 import pictures_pb2_grpc

from cluster.alerts.clips.footage_collector import FootageCollector
from cluster.alerts.clips.footage_store import KINDS, READ_BYTES, Deleted, Kind, StoredFile
from cluster.alerts.incident import Erased, unknown_incident
from cluster.config import CameraEntry, parse_camera
from cluster.control.cameras.managed import settings_of
from cluster.errors import ConfigError, NotPlacedError, NotReadyError
from cluster.gateway.forwarding import Forwarding, relay
from cluster.security.roles import current_principal, note_cameras
from cluster.wire.channel import ChannelPool
from cluster.wire.convert import settings_from_json
from cluster.wire.memory_wire import check_camera, check_seconds
from cluster.wire.status import as_refused, upstream_error

CALL_S = 10.0
TEST_S = 30.0
"""Timeout of a source test: connecting, some seconds of reading, and closing."""
DISCOVER_S = 150.0
"""Timeout of a network search, above the decoder's own limit."""
FILE_S = 300.0
_READERS = 8
MOST_WATCHING = 64
LONGEST_ID = 64
CAMERA = "sightline-camera-bin"
"""Key in the initial metadata of ``Footage``: camera of the incident, for the gateway, even if there is no file."""

Context: TypeAlias = grpc.aio.ServicerContext
AboutIncident: TypeAlias = Callable[[str], Awaitable[tuple[str, str]]]
"""Incident id -> (camera, note on missing footage); raises ``NotFoundError``."""
TestedSource: TypeAlias = Callable[[CameraEntry], Awaitable[tuple[str, CameraEntry]]]
"""Camera -> (``host:port`` of the decoder that tests its source, the camera with its secrets); raises ``ConfigError``,
``UnavailableError``."""
EraseRecords: TypeAlias = Callable[[str, float], Awaitable[Erased]]
"""(camera, age in seconds above which its records are erased; 0: all); raises ``UnavailableError``."""


class FootageServicer(pictures_pb2_grpc.PicturesServicer):
    """``Footage`` and ``Forget`` in the alerting process, which has the files. See protos/sightline/v1/pictures.proto.

    Args:
        collector: owner of the files.
        about: looks up an incident.
        erase: erases the records of a camera's incidents.
    """

    def __init__(self, collector: FootageCollector, about: AboutIncident, erase: EraseRecords) -> None:
        self._collector = collector
        self._about = about
        self._erase = erase
        # A separate pool: reads from a hung disk would block the default executor, on which sinks resolve and connect.
        self._threads = ThreadPoolExecutor(_READERS, thread_name_prefix="footage reads")

    async def Footage(self, request: pb.FootageRequest, context: Context) -> None:
        kind = _kind(request.kind)
        camera, note = await self._about(_incident(request.incident))
        await context.send_initial_metadata(((CAMERA, camera.encode()),))
        stored = self._collector.store.find(request.incident, kind)
        if stored is None:
            raise NotReadyError(_missing_reason(kind, note))
        about = pb.FootageAbout(
            camera=camera,
            media_type=stored.media_type,
            size=stored.size,
            etag=f"{stored.at_ms:x}-{stored.size:x}",
            note=note,
        )
        await context.write(pb.FootagePart(about=about))
        if not request.only_about:
            async for data in self._read(stored, request.offset, request.length):
                await context.write(pb.FootagePart(data=data))

    async def Forget(self, request: pb.ForgetFootageRequest, _context: Context) -> pb.ForgetFootageReply:
        camera, before_s = check_camera(request.camera), check_seconds(request.before_s, "before_s") or 0.0
        # Records first: erasing ends open incidents, which may start a clip of their end.
        deleted = Deleted(0, 0)
        try:
            erased = await self._erase(camera, before_s)
        finally:
            deleted = await self._collector.delete_footage(camera, before_s)
        return pb.ForgetFootageReply(
            files=deleted.files, bytes=deleted.bytes, incidents=erased.incidents, alerts=erased.alerts
        )

    async def _read(self, stored: StoredFile, offset: int, length: int) -> AsyncIterator[bytes]:
        on_thread = partial(asyncio.get_running_loop().run_in_executor, self._threads)
        file = await on_thread(self._collector.store.open, stored)
        try:
            await on_thread(file.seek, min(offset, stored.size))
            left = length or stored.size
            while left > 0 and (data := await on_thread(file.read, min(left, READ_BYTES))):
                left -= len(data)
                yield data
        finally:
            await on_thread(file.close)


class PicturesProxy(pictures_pb2_grpc.PicturesServicer):
    """Gateway side: pictures from the camera's decoder, files from alerting, for callers who may see them.

    Args:
        decoder: camera -> ``host:port`` of its decoder.
        alerting: ``host:port`` of the alerting process; both raise ``UnavailableError`` while there is none. None:
            alerting is disabled.
        tested: selects the decoder for a source test.
        any_decoder: ``host:port`` of a decoder for network searches.
    """

    def __init__(
        self,
        decoder: Callable[[str], Awaitable[str]],
        alerting: Callable[[], Awaitable[str]] | None,
        channels: ChannelPool,
        *,
        tested: TestedSource,
        any_decoder: Callable[[], Awaitable[str]],
    ) -> None:
        self._tested, self._any_decoder = tested, any_decoder
        self._decoder = decoder
        self._alerting = alerting
        self._forwarding = Forwarding(channels, "calls about pictures and clips")
        self._live = Forwarding(channels, "live views", max_calls=MOST_WATCHING)

    async def Picture(self, request: pb.PictureRequest, _context: Context) -> pb.PictureReply:
        who = f"the decoder of camera {request.camera!r}"
        async with self._forwarding.to(who, lambda: self._find(request.camera), CALL_S) as channel:
            return await pictures_pb2_grpc.RecorderStub(channel).Picture(request, timeout=CALL_S)

    async def Test(self, request: pb.TestRequest, _context: Context) -> pb.TestReply:
        address, entry = await self._tested(tested_entry(request))
        asked = pb.TestRequest(
            camera=entry.name, source=entry.source.reveal(), settings_json=json.dumps(settings_of(entry))
        )

        async def route() -> str:
            return address

        async with self._forwarding.to("the testing decoder", route, TEST_S) as channel:
            return await pictures_pb2_grpc.RecorderStub(channel).Test(asked, timeout=TEST_S)

    async def Discover(self, request: pb.DiscoverRequest, context: Context) -> None:
        async with self._forwarding.to("the searching decoder", self._any_decoder, DISCOVER_S) as channel:
            await relay(pictures_pb2_grpc.RecorderStub(channel).Discover(request, timeout=DISCOVER_S), context)

    async def Live(self, request: pb.LiveRequest, context: Context) -> None:
        who = f"the decoder of camera {request.camera!r}"
        async with self._live.to(who, lambda: self._find(request.camera), CALL_S) as channel:
            await relay(pictures_pb2_grpc.RecorderStub(channel).Live(request), context)

    async def Footage(self, request: pb.FootageRequest, context: Context) -> None:
        async with self._forwarding.to("alerting", self._alerting_address, FILE_S) as channel:
            call = pictures_pb2_grpc.PicturesStub(channel).Footage(request, timeout=FILE_S)
            hidden = True
            try:
                # The camera follows from the incident, not from the request. If alerting does not name it, only callers
                # who may see every camera get the footage.
                camera = dict(await call.initial_metadata() or ()).get(CAMERA, b"")
                hidden = not current_principal().sees(camera.decode())
                if not hidden:
                    note_cameras(camera.decode())
                async for part in call:
                    if hidden:
                        raise as_refused(unknown_incident(request.incident))
                    await context.write(part)
            except grpc.aio.AioRpcError as error:
                if hidden and error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    # A missing-file error would reveal that the incident exists.
                    raise as_refused(unknown_incident(request.incident)) from None
                raise
            finally:
                call.cancel()

    async def Forget(self, request: pb.ForgetFootageRequest, _context: Context) -> pb.ForgetFootageReply:
        return await self.forget(request.camera, request.before_s)

    async def forget(self, camera: str, before_s: float = 0.0) -> pb.ForgetFootageReply:
        """Delete a camera's footage older than ``before_s`` seconds, also in its decoder's buffers; 0: all of it.
        Raises ``UnavailableError``: a process does not answer, so footage may remain."""
        request = pb.ForgetFootageRequest(camera=check_camera(camera), before_s=before_s)
        buffered, stored = pb.ForgetFootageReply(), pb.ForgetFootageReply()
        try:
            # Decoder first, so that clips in progress get no more packets. Without a decoder there are no buffers.
            with contextlib.suppress(NotPlacedError):
                decoder = await self._decoder(camera)
                async with self._forwarding.channels.lease(decoder) as channel:
                    buffered = await pictures_pb2_grpc.RecorderStub(channel).Forget(request, timeout=CALL_S)
            if self._alerting is not None:
                async with self._forwarding.channels.lease(await self._alerting()) as channel:
                    stored = await pictures_pb2_grpc.PicturesStub(channel).Forget(request, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            raise upstream_error(error, f"a process with footage of camera {camera!r}") from None
        stored.bytes += buffered.bytes
        return stored

    async def _find(self, camera: str) -> str:
        return await self._decoder(check_camera(camera))

    async def _alerting_address(self) -> str:
        if self._alerting is None:
            raise NotReadyError("this cluster makes no incidents; alerts.enabled is off")
        return await self._alerting()


def tested_entry(request: pb.TestRequest) -> CameraEntry:
    """Parse the camera of a source test, which needs no question. Raises ``ConfigError``: no name, or a wrong key or
    value."""
    settings = {"questions": [{"id": "test", "text": "Is anyone there?"}], **settings_from_json(request.settings_json)}
    return parse_camera(check_camera(request.camera), request.source, settings=settings)


def _kind(text: str) -> Kind:
    for kind in KINDS:
        if kind == text:
            return kind
    raise ConfigError(f"kind must be one of {', '.join(KINDS)}, not {text[:LONGEST_ID]!r}")


def _incident(text: str) -> str:
    if not text or len(text) > LONGEST_ID or not text.isprintable():
        raise ConfigError(f"incident must be an id of at most {LONGEST_ID} characters")
    return text


def _missing_reason(kind: Kind, note: str) -> str:
    if note.startswith("no "):
        return note
    what = {"snapshot": "the snapshot", "clip": "the clip", "end": "the end clip"}[kind]
    return f"{what} of this incident does not exist: not recorded yet, or deleted by age, for space, or with its camera"
