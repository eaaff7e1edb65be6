"""``Cameras``: add, remove, list and look at cameras, over whatever keeps them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, TypeVar

import grpc.aio
from sightline.v1 import cameras_pb2, cameras_pb2_grpc

from cluster.errors import ConfigError, SightlineError, UnavailableError
from cluster.rpc.convert import question_from_proto, status_to_proto
from cluster.rpc.status import abort
from cluster.security.access import current
from cluster.types import CameraStatus, Question

SERVICE = "sightline.v1.Cameras"
T = TypeVar("T")


class CameraDirectory(Protocol):
    """Who knows the cameras: the controller, seen from the gateway.

    Raises ``UnknownCameraError``, ``CameraExistsError``, ``ConfigError`` (bad settings), ``CapacityError`` (no room,
    unless ``force`` is set) or ``UnavailableError``.
    """

    async def add(
        self,
        name: str,
        source: str,
        questions: Sequence[Question],
        settings: dict[str, Any],
        force: bool = False,
    ) -> CameraStatus: ...

    async def remove(self, name: str) -> None: ...

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
        try:
            if not request.name:
                raise ConfigError("a camera needs a name")
            settings = _settings(request.settings_json)
            questions = [question_from_proto(question) for question in request.questions]
            adding = self._directory.add(request.name, request.source, questions, settings, request.force)
            return status_to_proto(await self._in_time(adding))
        except (SightlineError, ValueError) as error:
            await abort(context, error)

    async def Remove(  # noqa: N802
        self, request: cameras_pb2.RemoveCameraRequest, context: grpc.aio.ServicerContext
    ) -> cameras_pb2.RemoveCameraResponse:
        try:
            await self._in_time(self._directory.remove(request.name))
            return cameras_pb2.RemoveCameraResponse()
        except SightlineError as error:
            await abort(context, error)

    async def List(  # noqa: N802
        self, _request: cameras_pb2.ListCamerasRequest, context: grpc.aio.ServicerContext
    ) -> cameras_pb2.ListCamerasResponse:
        try:
            seen = current()
            statuses = [each for each in await self._in_time(self._directory.list()) if seen.sees(each.name)]
            return cameras_pb2.ListCamerasResponse(cameras=[status_to_proto(status) for status in statuses])
        except SightlineError as error:
            await abort(context, error)

    async def Get(  # noqa: N802
        self, request: cameras_pb2.GetCameraRequest, context: grpc.aio.ServicerContext
    ) -> cameras_pb2.CameraStatus:
        try:
            return status_to_proto(await self._in_time(self._directory.get(request.name)))
        except SightlineError as error:
            await abort(context, error)

    async def _in_time(self, call: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(call, self._deadline_s)
        except TimeoutError:
            raise UnavailableError(f"the controller did not answer within {self._deadline_s:g} s") from None


def _settings(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"the camera's settings are not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"the camera's settings must be a JSON object, not {type(settings).__name__}")
    return settings
