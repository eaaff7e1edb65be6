"""Cameras over HTTP: list, show, test, discover, import, add, change, remove; score history and timeline."""

import asyncio
import json
from dataclasses import astuple
from typing import Annotated, Any

from fastapi import Query
from pydantic import Field
from sightline.v1 import cameras_pb2, incidents_pb2, pictures_pb2

from cluster.alerts.grpc_service import timeline_from_proto
from cluster.alerts.timeline_store import BIN_S
from cluster.config.camera_list import parse_camera_list
from cluster.control.cameras.managed import entry_to_json, settings_of
from cluster.errors import SightlineError, UnknownCameraError
from cluster.files import jsonable
from cluster.gateway.http import forms
from cluster.gateway.http.free_questions import NDJSON, lines
from cluster.gateway.http.replies import Reply, Stream
from cluster.gateway.http.routes import Body, Flag, Gateway, Number, Routes, Text
from cluster.security.roles import HISTORY, IMPORT, current_principal
from cluster.types import CameraStatus
from cluster.types.cameras import Discovery, SourceTest
from cluster.wire.convert import status_from_proto
from cluster.wire.mapping import from_message

SERVICE = "/sightline.v1.Cameras/"
DISCOVER = "/sightline.v1.Pictures/Discover"
TEST = "/sightline.v1.Pictures/Test"
LIST_BYTES = 2 * 2**20
INCIDENTS = "/sightline.v1.Incidents/"
router = Routes()


class AskedQuestion(Body):
    """A standing yes/no question."""

    id: Text
    text: Text
    threshold: float = Field(default=0.5, gt=0, lt=1)
    explain: bool = False


class WrittenCamera(Body):
    """A camera's settings; ``settings``: keys of a ``cameras`` entry in the configuration."""

    source: Text
    questions: list[AskedQuestion] = Field(default_factory=list, max_length=64)
    settings: dict[str, Any] = Field(default_factory=dict)
    takeover: bool = Field(default=False, description="Take the camera over from another manager.")

    def request(self) -> dict[str, Any]:
        """Fields of ``AddCameraRequest`` and ``UpdateCameraRequest``."""
        return {
            "source": self.source,
            "questions": [cameras_pb2.Question(**each.model_dump()) for each in self.questions],
            "settings_json": json.dumps(self.settings),
            "takeover": self.takeover,
        }


class ChangedCamera(WrittenCamera):
    """A camera's new settings."""

    revision: Text = Field(default="", description="Revision on which they are based; 409: outdated.")

    def request(self) -> dict[str, Any]:
        return {**super().request(), "revision": self.revision}


class NewCamera(WrittenCamera):
    """A camera to add."""

    name: Text
    force: bool = Field(default=False, description="Add it even if the replicas are full.")


@router.on("GET /v1/cameras", f"{SERVICE}List", forms.Cameras)
async def list_cameras(gateway: Gateway) -> Reply:
    """The cameras that the token may see."""
    # Bypasses the protobuf message, which takes longer to build than all the rest for thousands of cameras.
    gateway.calls.check(f"{SERVICE}List", cameras_pb2.ListCamerasRequest())
    sees = current_principal().sees
    listed = [status for name, status in (await gateway.live.list()).items() if sees(name)]
    return Reply(b'{"cameras":[%s]}' % b",".join(listed))


@router.on("POST /v1/cameras", f"{SERVICE}Add", CameraStatus, errors=(409,))
async def add_camera(body: NewCamera, gateway: Gateway) -> Reply:
    """Add a camera; idempotent. 409: it exists with other settings, or belongs to another manager."""
    asked = cameras_pb2.AddCameraRequest(name=body.name, force=body.force, **body.request())
    return await _changed(gateway, "Add", asked)


class TestedSource(Body):
    """A source to test; ``name``: the camera that has it or will have it."""

    name: Text
    source: Text
    settings: dict[str, Any] = Field(default_factory=dict)


@router.on("POST /v1/cameras/test", TEST, SourceTest, errors=(409, 504))
async def test_source(body: TestedSource, gateway: Gateway) -> Reply:
    """Open a source for some seconds and report what it sends; adds nothing. Pictures are JPEG in base64."""
    settings = json.dumps(body.settings)
    asked = pictures_pb2.TestRequest(camera=body.name, source=body.source, settings_json=settings)
    return Reply(jsonable(from_message(SourceTest, await gateway.calls.unary(TEST, asked))))


class SearchedNetwork(Body):
    """An IPv4 network within ``security.discovery_networks``, and the cameras' credentials, if any."""

    network: Text
    user: str = Field(default="", max_length=256)
    password: str = Field(default="", max_length=256)


@router.on("POST /v1/cameras/discover", DISCOVER, forms.DiscoveryLine, media=NDJSON, errors=(409,))
async def discover_cameras(body: SearchedNetwork, gateway: Gateway) -> Stream:
    """Search a network for ONVIF cameras, streaming results; adds nothing. Closing the connection stops it."""
    parts = gateway.calls.stream(DISCOVER, pictures_pb2.DiscoverRequest(**body.model_dump()))
    return await lines(parts, lambda part: {"discovery": jsonable(from_message(Discovery, part))})


class CameraList(Body):
    """Cameras as CSV (columns name, source, priority, question, paused), YAML or JSON."""

    text: Text
    apply: bool = Field(default=False, description="Add the cameras; otherwise they are only checked.")
    force: bool = Field(default=False, description="Add them even if the replicas are full.")


@router.on("POST /v1/cameras/import", IMPORT, forms.ImportedCameras, errors=(409,), body_bytes=LIST_BYTES)
async def import_cameras(body: CameraList, gateway: Gateway) -> Reply:
    """Check a list of cameras line by line, and add them with ``apply``. If any line has an error, none is added. What
    is only found when adding (settings that contradict the cluster's, a file that may not be opened, no capacity) is
    its line's error; the others are added. A camera that exists as listed is no error, so a partially added list can
    be sent again."""
    # On a thread: parsing thousands of cameras takes seconds.
    listed = await asyncio.to_thread(parse_camera_list, body.text)
    known = await gateway.live.list()
    sees = current_principal().sees
    present: dict[str, Any] = {}
    if duplicates := [each.name for each in listed if each.name in known and sees(each.name)]:
        found = await gateway.calls.unary(f"{SERVICE}Export", cameras_pb2.ExportCamerasRequest(names=duplicates))
        present = {each.name: json.loads(each.entry_json) for each in found.cameras}
    checked = []
    for each in listed:
        error = each.error
        # Passwords, hidden here, are compared when the camera is added.
        same = each.entry is not None and json.loads(entry_to_json(each.entry, secrets=False)) == present.get(each.name)
        if not error and not sees(each.name):
            error = f"this token may not access camera {each.name!r}"
        elif not error and each.name in known and not same:
            error = f"there is a camera {each.name!r} already, with other settings"
        source = "" if each.entry is None else str(each.entry.source)
        checked.append({"line": each.line, "name": each.name, "source": source, "error": error, "added": False})
    if not body.apply or any(line["error"] for line in checked):
        return Reply({"cameras": checked})
    for each, line in zip(listed, checked, strict=True):
        assert each.entry is not None
        asked = cameras_pb2.AddCameraRequest(
            name=each.name,
            source=each.entry.source.reveal(),
            settings_json=json.dumps(settings_of(each.entry)),
            force=body.force,
        )
        try:
            await gateway.calls.unary(f"{SERVICE}Add", asked)
            line["added"] = True
        except SightlineError as error:
            # Cameras added before it stay.
            line["error"] = str(error)
    gateway.live.look()
    return Reply({"cameras": checked})


@router.on("GET /v1/cameras/{name}/settings", f"{SERVICE}Export", forms.CameraSettings, errors=(404,))
async def camera_settings(name: str, gateway: Gateway) -> Reply:
    """The settings written for a camera, to be changed with PUT. Secrets in its source are replaced by ***; sending the
    masked source back keeps them."""
    found = await gateway.calls.unary(f"{SERVICE}Export", cameras_pb2.ExportCamerasRequest(names=[name]))
    if not found.cameras:
        raise UnknownCameraError(f"there is no camera {name!r}")
    [camera] = found.cameras
    written = json.loads(camera.entry_json)
    found = {"name": written.pop("name"), "source": written.pop("source", ""), "settings": written}
    return Reply({**found, "manager": camera.manager, "revision": camera.revision})


@router.on("GET /v1/cameras/{name}", f"{SERVICE}Get", CameraStatus, errors=(404,))
async def get_camera(name: str, gateway: Gateway) -> Reply:
    """One camera."""
    return Reply(status_from_proto(await gateway.calls.unary(f"{SERVICE}Get", cameras_pb2.GetCameraRequest(name=name))))


@router.on("PUT /v1/cameras/{name}", f"{SERVICE}Update", CameraStatus, errors=(404, 409))
async def update_camera(name: str, body: ChangedCamera, gateway: Gateway) -> Reply:
    """Replace all settings of a camera; its window and memory are kept as far as possible."""
    return await _changed(gateway, "Update", cameras_pb2.UpdateCameraRequest(name=name, **body.request()))


async def _changed(gateway: Gateway, method: str, asked: Any) -> Reply:
    status = status_from_proto(await gateway.calls.unary(f"{SERVICE}{method}", asked))
    gateway.live.look()
    return Reply(status)


Takeover = Annotated[Flag, Query(description="1: even if it belongs to another manager.")]


@router.on("DELETE /v1/cameras/{name}", f"{SERVICE}Remove", forms.Nothing, errors=(404, 409))
async def remove_camera(name: str, gateway: Gateway, takeover: Takeover = False) -> Reply:
    """Remove a camera."""
    await gateway.calls.unary(f"{SERVICE}Remove", cameras_pb2.RemoveCameraRequest(name=name, takeover=takeover))
    gateway.live.look()
    return Reply({})


@router.on("GET /v1/cameras/{name}/history", HISTORY, forms.CameraHistory)
async def camera_history(name: str, gateway: Gateway) -> Reply:
    """The last 120 scores of every question, and the last 120 changes of the quality rung."""
    return Reply(gateway.live.history.body(name))


FromTime = Annotated[Number, Query(description="Start, Unix time.")]
UntilTime = Annotated[Number, Query(description="End (exclusive), Unix time; default: now.")]


@router.on("GET /v1/cameras/{name}/timeline", f"{INCIDENTS}Timeline", forms.Timeline)
async def camera_timeline(name: str, gateway: Gateway, since_s: FromTime = 0.0, until_s: UntilTime = 0.0) -> Reply:
    """A camera's scores per minute and its state changes; kept for two days, if alerting is enabled."""
    asked = incidents_pb2.TimelineRequest(camera=name, since_s=since_s, until_s=until_s)
    found = timeline_from_proto(await gateway.calls.unary(f"{INCIDENTS}Timeline", asked))
    scores = {
        question: [
            [each.at_s, round(each.highest, 4), round(each.level, 4), each.windows, each.positives] for each in bins
        ]
        for question, bins in found.scores.items()
    }
    return Reply({"bin_s": BIN_S, "scores": scores, "states": [list(astuple(each)) for each in found.states]})
