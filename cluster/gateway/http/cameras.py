"""Cameras over HTTP: list, look at, add, remove; the scores and rungs of late."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web
from pydantic import Field
from sightline.v1 import cameras_pb2

from cluster.errors import ConfigError
from cluster.gateway.http.body import Body, flag, read
from cluster.gateway.http.calls import Calls
from cluster.gateway.http.forms import CameraHistory, Cameras, Nothing, Query, Route
from cluster.gateway.http.live import Live
from cluster.gateway.http.replies import plain, reply
from cluster.security.roles import HISTORY, current
from cluster.types import CameraStatus
from cluster.wire.convert import status_from_proto


class AskedQuestion(Body):
    """A standing yes/no question."""

    id: str
    text: str
    threshold: float = Field(default=0.5, ge=0, le=1)
    explain: bool = False


class ChangedCamera(Body):
    """A camera's new settings; ``settings``: keys of a camera's section of the configuration."""

    source: str
    questions: list[AskedQuestion] = Field(default_factory=list, max_length=64)
    settings: dict[str, Any] = Field(default_factory=dict)
    takeover: bool = Field(default=False, description="Also when it belongs to another manager.")


class NewCamera(ChangedCamera):
    """A camera to add."""

    name: str
    force: bool = Field(default=False, description="Add it although the replicas are full.")


class CameraRoutes:
    """See :meth:`routes`."""

    def __init__(self, calls: Calls, live: Live) -> None:
        self._calls = calls
        self._live = live

    def routes(self) -> list[Route]:
        service = "/sightline.v1.Cameras/"
        takeover = (Query("takeover", "1: also when it belongs to another manager.", "integer"),)
        return [
            Route("GET", "/v1/cameras", f"{service}List", self.list, "Cameras that the token may see.", Cameras),
            Route(
                "POST",
                "/v1/cameras",
                f"{service}Add",
                self.add,
                "Add a camera.",
                CameraStatus,
                body=NewCamera,
                errors=(409,),
            ),
            Route("GET", "/v1/cameras/{name}", f"{service}Get", self.get, "One camera.", CameraStatus, errors=(404,)),
            Route(
                "PUT",
                "/v1/cameras/{name}",
                f"{service}Update",
                self.update,
                "New settings for a camera, as a whole; what can be kept of its window and memory is kept.",
                CameraStatus,
                body=ChangedCamera,
                errors=(404, 409),
            ),
            Route(
                "DELETE",
                "/v1/cameras/{name}",
                f"{service}Remove",
                self.remove,
                "Remove a camera.",
                Nothing,
                query=takeover,
                errors=(404, 409),
            ),
            Route(
                "GET",
                "/v1/cameras/{name}/history",
                HISTORY,
                self.history,
                "The last 120 scores of every question, and changes of the quality rung.",
                CameraHistory,
            ),
        ]

    async def list(self, _request: web.Request) -> web.Response:
        # Without the message in between: it takes longer to make than all the rest, and a wall has thousands.
        self._calls.check("/sightline.v1.Cameras/List", cameras_pb2.ListCamerasRequest())
        sees = current().sees
        return reply({"cameras": [plain(each) for each in await self._live.list() if sees(each.name)]})

    async def get(self, request: web.Request) -> web.Response:
        asked = cameras_pb2.GetCameraRequest(name=name_of(request))
        return reply(plain(status_from_proto(await self._calls.unary("/sightline.v1.Cameras/Get", asked))))

    async def add(self, request: web.Request) -> web.Response:
        body = await read(request, NewCamera)
        asked = cameras_pb2.AddCameraRequest(
            name=text(body.name, "name"),
            source=text(body.source, "source"),
            questions=_questions(body),
            settings_json=_settings(body),
            force=body.force,
            takeover=body.takeover,
        )
        added = await self._calls.unary("/sightline.v1.Cameras/Add", asked)
        self._live.look()
        return reply(plain(status_from_proto(added)))

    async def update(self, request: web.Request) -> web.Response:
        body = await read(request, ChangedCamera)
        asked = cameras_pb2.UpdateCameraRequest(
            name=name_of(request),
            source=text(body.source, "source"),
            questions=_questions(body),
            settings_json=_settings(body),
            takeover=body.takeover,
        )
        updated = await self._calls.unary("/sightline.v1.Cameras/Update", asked)
        self._live.look()
        return reply(plain(status_from_proto(updated)))

    async def remove(self, request: web.Request) -> web.Response:
        asked = cameras_pb2.RemoveCameraRequest(name=name_of(request), takeover=flag(request, "takeover"))
        await self._calls.unary("/sightline.v1.Cameras/Remove", asked)
        self._live.look()
        return reply({})

    async def history(self, request: web.Request) -> web.Response:
        return reply(self._live.history.body(name_of(request)))


def _questions(body: ChangedCamera) -> list[cameras_pb2.Question]:
    return [
        cameras_pb2.Question(
            id=text(each.id, "id"), text=text(each.text, "text"), threshold=each.threshold, explain=each.explain
        )
        for each in body.questions
    ]


def _settings(body: ChangedCamera) -> str:
    return json.dumps(body.settings) if body.settings else ""


def name_of(request: web.Request) -> str:
    """The ``{name}`` of the path."""
    return text(request.match_info["name"], "the camera's name")


def text(value: str, what: str) -> str:
    """Raises ``ConfigError`` for what no message can hold: halves of characters."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{what} is not text; send UTF-8") from None
    return value
