"""``Cameras``: add, remove, list and look at cameras, over whatever keeps them."""

from collections.abc import Sequence
from typing import Any, Protocol

import grpc.aio
from sightline.v1 import cameras_pb2, cameras_pb2_grpc

from cluster.control.cameras.managed import ManagedCamera, entry_to_json
from cluster.errors import ConfigError
from cluster.gateway.forwarding import in_time
from cluster.redaction import SourceAddress
from cluster.security.roles import current_principal
from cluster.types import CameraStatus, Question
from cluster.wire.convert import question_from_proto, settings_from_json, status_to_proto
from cluster.wire.status import explained

SERVICE = "sightline.v1.Cameras"


class CameraDirectory(Protocol):
    """Who knows the cameras: the controller, seen from the gateway.

    Raises ``UnknownCameraError``, ``CameraExistsError``, ``ManagedElsewhereError`` (unless ``takeover`` is set),
    ``ConfigError`` (bad settings), ``CapacityError`` (no room, unless ``force`` is set) or ``UnavailableError``.
    ``manager``: who asks; empty for ``cluster``.
    """

    async def add(
        self,
        name: str,
        source: SourceAddress,
        questions: Sequence[Question],
        settings: dict[str, Any],
        force: bool = False,
        manager: str = "",
        takeover: bool = False,
    ) -> CameraStatus: ...

    async def update(
        self,
        name: str,
        source: SourceAddress,
        questions: Sequence[Question],
        settings: dict[str, Any],
        manager: str = "",
        takeover: bool = False,
    ) -> CameraStatus: ...

    async def remove(self, name: str, manager: str = "", takeover: bool = False) -> None: ...

    async def export(self, names: Sequence[str] = ()) -> Sequence[ManagedCamera]: ...

    async def list(self) -> Sequence[CameraStatus]: ...

    async def get(self, name: str) -> CameraStatus: ...


class CamerasServicer(cameras_pb2_grpc.CamerasServicer):
    """Every call gets ``deadline_s``; a directory that does not answer in time is UNAVAILABLE."""

    def __init__(self, directory: CameraDirectory, *, deadline_s: float = 30.0) -> None:
        self._directory = directory
        self._deadline_s = deadline_s

    async def Add(  # noqa: N802
        self, request: cameras_pb2.AddCameraRequest, context: grpc.aio.ServicerContext
    ) -> cameras_pb2.CameraStatus:
        async with explained(context):
            if not request.name:
                raise ConfigError("a camera needs a name")
            settings = settings_from_json(request.settings_json)
            questions = [question_from_proto(question) for question in request.questions]
            adding = self._directory.add(
                request.name,
                SourceAddress(request.source),
                questions,
                settings,
                request.force,
                request.manager,
                request.takeover,
            )
            return status_to_proto(await in_time(adding, self._deadline_s))

    async def Update(  # noqa: N802
        self, request: cameras_pb2.UpdateCameraRequest, context: grpc.aio.ServicerContext
    ) -> cameras_pb2.CameraStatus:
        async with explained(context):
            settings = settings_from_json(request.settings_json)
            questions = [question_from_proto(question) for question in request.questions]
            updating = self._directory.update(
                request.name, SourceAddress(request.source), questions, settings, request.manager, request.takeover
            )
            return status_to_proto(await in_time(updating, self._deadline_s))

    async def Export(  # noqa: N802
        self, request: cameras_pb2.ExportCamerasRequest, context: grpc.aio.ServicerContext
    ) -> cameras_pb2.ExportCamerasResponse:
        async with explained(context):
            seen = current_principal()
            cameras = await in_time(self._directory.export(list(request.names)), self._deadline_s)
            return cameras_pb2.ExportCamerasResponse(
                cameras=[
                    cameras_pb2.WrittenCamera(
                        name=each.entry.name,
                        manager=each.manager,
                        entry_json=entry_to_json(each.entry, secrets=request.secrets),
                    )
                    for each in cameras
                    if seen.sees(each.entry.name)
                ]
            )

    async def Remove(  # noqa: N802
        self, request: cameras_pb2.RemoveCameraRequest, context: grpc.aio.ServicerContext
    ) -> cameras_pb2.RemoveCameraResponse:
        async with explained(context):
            await in_time(self._directory.remove(request.name, request.manager, request.takeover), self._deadline_s)
            return cameras_pb2.RemoveCameraResponse()

    async def List(  # noqa: N802
        self, _request: cameras_pb2.ListCamerasRequest, context: grpc.aio.ServicerContext
    ) -> cameras_pb2.ListCamerasResponse:
        async with explained(context):
            seen = current_principal()
            statuses = [
                each for each in await in_time(self._directory.list(), self._deadline_s) if seen.sees(each.name)
            ]
            return cameras_pb2.ListCamerasResponse(cameras=[status_to_proto(status) for status in statuses])

    async def Get(  # noqa: N802
        self, request: cameras_pb2.GetCameraRequest, context: grpc.aio.ServicerContext
    ) -> cameras_pb2.CameraStatus:
        async with explained(context):
            return status_to_proto(await in_time(self._directory.get(request.name), self._deadline_s))
