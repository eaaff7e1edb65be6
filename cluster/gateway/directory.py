"""gRPC ``Cameras`` and ``Replicas`` services over a ``Directory``, normally the controller."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Protocol, TypeAlias

import grpc.aio
from sightline.v1 import cameras_pb2 as pb
from sightline.v1 import cameras_pb2_grpc, replicas_pb2, replicas_pb2_grpc

from cluster.config import parse_camera
from cluster.control.cameras.managed import ManagedCamera, entry_to_json, manager_from_outside
from cluster.errors import ConfigError
from cluster.security.roles import current_principal
from cluster.types import CameraStatus
from cluster.types.reports import DecoderNumbers, ReplicaStatus
from cluster.wire.answers import yielding
from cluster.wire.convert import question_from_proto, settings_from_json, status_to_proto
from cluster.wire.mapping import to_message

Context: TypeAlias = grpc.aio.ServicerContext


class Directory(Protocol):
    """The gateway's view of the controller, which holds the camera table and places cameras on replicas.

    Camera methods raise ``UnknownCameraError``, ``CameraExistsError``, ``ManagedElsewhereError`` (unless ``takeover``),
    ``ConfigError`` (bad settings), ``CapacityError`` (no room, unless ``force``) or ``UnavailableError``; updates also
    ``NotReadyError`` (the settings have another ``revision`` by now). Replica methods raise ``ConfigError`` (no such
    replica), ``NotReadyError`` (no other replica can take its cameras) or ``UnavailableError``.
    """

    async def add_camera(self, managed: ManagedCamera, force: bool = False, takeover: bool = False) -> CameraStatus: ...
    async def update_camera(self, managed: ManagedCamera, takeover: bool = False) -> CameraStatus: ...
    async def remove_camera(self, name: str, manager: str, takeover: bool = False) -> None: ...
    async def managed_cameras(self, names: Sequence[str] = (), left_out: bool = False) -> Sequence[ManagedCamera]: ...
    async def list_cameras(self) -> Sequence[CameraStatus]: ...
    async def get_camera(self, name: str) -> CameraStatus: ...
    async def list_replicas(self) -> Sequence[ReplicaStatus]: ...
    async def decoder_numbers(self) -> DecoderNumbers | None: ...
    async def drain_replica(self, name: str, undo: bool = False) -> ReplicaStatus: ...


class CamerasServicer(cameras_pb2_grpc.CamerasServicer):
    """See protos/sightline/v1/cameras.proto."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    async def Add(self, request: pb.AddCameraRequest, _context: Context) -> pb.CameraStatus:
        if not request.name:
            raise ConfigError("a camera needs a name")
        added = await self._directory.add_camera(_camera(request), request.force, request.takeover)
        return status_to_proto(added)

    async def Update(self, request: pb.UpdateCameraRequest, _context: Context) -> pb.CameraStatus:
        managed = _camera(request).model_copy(update={"revision": request.revision})
        return status_to_proto(await self._directory.update_camera(managed, request.takeover))

    async def Export(self, request: pb.ExportCamerasRequest, _context: Context) -> pb.ExportCamerasResponse:
        sees = current_principal().sees
        cameras = await self._directory.managed_cameras(list(request.names))
        exported = [
            pb.WrittenCamera(
                name=each.entry.name,
                manager=each.manager,
                entry_json=entry_to_json(each.entry, secrets=request.secrets),
                revision=each.revision,
            )
            async for each in yielding(cameras)
            if sees(each.entry.name)
        ]
        return pb.ExportCamerasResponse(cameras=exported)

    async def Remove(self, request: pb.RemoveCameraRequest, _context: Context) -> pb.RemoveCameraResponse:
        manager = manager_from_outside(request.manager)
        await self._directory.remove_camera(request.name, manager, request.takeover)
        return pb.RemoveCameraResponse()

    async def List(self, _request: pb.ListCamerasRequest, _context: Context) -> pb.ListCamerasResponse:
        sees = current_principal().sees
        statuses = await self._directory.list_cameras()
        listed = [status_to_proto(each) async for each in yielding(statuses) if sees(each.name)]
        return pb.ListCamerasResponse(cameras=listed)

    async def Get(self, request: pb.GetCameraRequest, _context: Context) -> pb.CameraStatus:
        return status_to_proto(await self._directory.get_camera(request.name))


def _camera(request: pb.AddCameraRequest | pb.UpdateCameraRequest) -> ManagedCamera:
    settings = settings_from_json(request.settings_json)
    questions = [asdict(question_from_proto(question)) for question in request.questions]
    entry = parse_camera(request.name, request.source, questions, settings)
    return ManagedCamera(entry=entry, manager=manager_from_outside(request.manager))


class ReplicasServicer(replicas_pb2_grpc.ReplicasServicer):
    """See protos/sightline/v1/replicas.proto."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    async def List(
        self, _request: replicas_pb2.ListReplicasRequest, _context: Context
    ) -> replicas_pb2.ListReplicasResponse:
        found = await self._directory.list_replicas()
        decoders = await self._directory.decoder_numbers()
        return replicas_pb2.ListReplicasResponse(
            replicas=[to_message(replicas_pb2.ReplicaStatus, status) for status in found],
            decoders=None if decoders is None else to_message(replicas_pb2.DecoderNumbers, decoders),
        )

    async def Drain(self, request: replicas_pb2.DrainReplicaRequest, _context: Context) -> replicas_pb2.ReplicaStatus:
        drained = await self._directory.drain_replica(request.name, request.undo)
        return to_message(replicas_pb2.ReplicaStatus, drained)
