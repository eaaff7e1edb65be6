"""The Cameras service and the CLI's client, over loopback: answers, and errors as the sentences a user sees."""

import asyncio
import threading

import grpc
import grpc.aio
import pytest
from rpc_serving import serving, serving_in_thread
from sightline.v1 import cameras_pb2, cameras_pb2_grpc

from cluster.client import GatewayClient
from cluster.config import CameraEntry
from cluster.control.cameras.managed import ManagedCamera, settings_of
from cluster.errors import (
    CameraExistsError,
    ConfigError,
    ManagedElsewhereError,
    UnavailableError,
    UnknownCameraError,
)
from cluster.gateway.directory import CamerasServicer
from cluster.types import CameraStatus, LastAnswer, Question
from cluster.wire.answers import AnswerHub, ResultsServicer
from cluster.wire.channel import open_channel


class Directory:
    """A controller's registry in a dictionary."""

    def __init__(self):
        self.cameras = {}
        self.asked = {}
        self.delay_s = 0.0

    async def add_camera(self, managed, force=False, takeover=False):
        name, source = managed.entry.name, managed.entry.source
        if name in self.cameras:
            raise CameraExistsError(f"camera {name!r} exists already; remove it first")
        self.asked[name] = managed.entry
        self.cameras[name] = CameraStatus(name, str(source), "connecting", manager=managed.manager)
        return self.cameras[name]

    async def update_camera(self, managed, takeover=False):
        name, manager = managed.entry.name, managed.manager
        before = await self.get_camera(name)
        if before.manager != manager and not takeover:
            raise ManagedElsewhereError(f"camera {name!r} belongs to {before.manager!r}")
        self.asked[name] = managed.entry
        self.cameras[name] = CameraStatus(name, str(managed.entry.source), "running", manager=manager)
        return self.cameras[name]

    async def remove_camera(self, name, manager, takeover=False):
        before = await self.get_camera(name)
        if before.manager != manager and not takeover:
            raise ManagedElsewhereError(f"camera {name!r} belongs to {before.manager!r}")
        del self.cameras[name]

    async def managed_cameras(self, names=()):
        return [
            ManagedCamera(
                entry=CameraEntry(name=name, source=self.asked[name].source), manager=self.cameras[name].manager
            )
            for name in sorted(names or self.cameras)
        ]

    async def list_cameras(self):
        await asyncio.sleep(self.delay_s)
        return list(self.cameras.values())

    async def get_camera(self, name):
        if name not in self.cameras:
            raise UnknownCameraError(f"no camera is called {name!r}")
        return self.cameras[name]


@pytest.fixture
def gateway():
    """A gateway on a loop thread: ``(address, directory, hub)``."""
    directory, hub = Directory(), AnswerHub(recent=2)
    with serving_in_thread(CamerasServicer(directory), ResultsServicer(hub)) as address:
        yield address, directory, hub


@pytest.fixture
def client(gateway):
    with GatewayClient(gateway[0], deadline_s=5.0) as client:
        yield client


def test_add_list_get_remove(gateway, client):
    _, directory, _ = gateway
    questions = [Question("person", "Is there a person?", 0.7, True)]
    added = client.camera_add("gate", "rtsp://gate/1", questions, {"sampling": {"fps": 1.0}})
    assert added == CameraStatus("gate", "rtsp://gate/1", "connecting", manager="cluster")
    asked = directory.asked["gate"]
    assert asked.source.reveal() == "rtsp://gate/1"
    assert [each.question() for each in asked.questions] == questions
    assert settings_of(asked).keys() == {"questions", "sampling"}
    assert settings_of(asked)["sampling"] == {"fps": 1.0}
    full = CameraStatus(
        "gate", state="running", manager="cluster", latency_s=1.5, last_answers=(LastAnswer("person", 0.75, True, 5),)
    )
    directory.cameras["gate"] = full
    client.camera_add("yard")
    assert client.cameras_list() == [full, CameraStatus("yard", state="connecting", manager="cluster")]
    assert client.camera_get("gate") == full
    client.camera_remove("gate")
    assert [status.name for status in client.cameras_list()] == ["yard"]


def test_update_takeover_and_export(gateway, client):
    _, directory, _ = gateway
    client.camera_add("gate", "rtsp://gate/1")
    assert client.camera_update("gate", "rtsp://gate/2", {"priority": "critical"}).source == "rtsp://gate/2"
    assert directory.asked["gate"].source.reveal() == "rtsp://gate/2"
    assert settings_of(directory.asked["gate"]) == {"priority": "critical"}
    with pytest.raises(CameraExistsError, match="belongs to 'cluster'"):
        client.camera_update("gate", manager="north")
    assert client.camera_update("gate", "rtsp://u:s3cret@h/", manager="north", takeover=True).manager == "north"
    assert client.cameras_list()[0].manager == "north"
    [written] = client.cameras_export(["gate"])
    assert (written.manager, written.entry.source.reveal()) == ("north", "rtsp://u:***@h/")
    [written] = client.cameras_export(["gate"], secrets=True)
    assert written.entry.source.reveal() == "rtsp://u:s3cret@h/"
    with pytest.raises(CameraExistsError, match="belongs to 'north'"):
        client.camera_remove("gate")
    client.camera_remove("gate", manager="north")
    assert client.cameras_export() == []


@pytest.mark.parametrize(
    ("ask", "error", "sentence"),
    [
        (lambda c: c.camera_get("nobody"), UnknownCameraError, "no camera is called 'nobody'"),
        (lambda c: c.camera_remove("nobody"), UnknownCameraError, "no camera is called 'nobody'"),
        (lambda c: [c.camera_add("gate"), c.camera_add("gate")], CameraExistsError, "exists already; remove it first"),
        (lambda c: c.camera_add("gate", settings={"zoom": 1}), ConfigError, "zoom: unknown key"),
        (lambda c: c.camera_add(""), ConfigError, "a camera needs a name"),
        (lambda c: c.camera_add("a", questions=[Question("q", "?", 7)]), ConfigError, "threshold of 7"),
    ],
)
def test_errors_keep_their_kind_and_sentence(client, ask, error, sentence):
    with pytest.raises(error, match=sentence):
        ask(client)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "are not JSON"),
        ("[]", "must be a JSON object, not list"),
        ('{"a":' * 50_000 + "1" + "}" * 50_000, "nested too deeply"),
    ],
    ids=["broken", "list", "deep"],
)
async def test_settings_that_are_no_object(text, sentence):
    async with serving(CamerasServicer(Directory())) as address, open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await cameras_pb2_grpc.CamerasStub(channel).Add(
                cameras_pb2.AddCameraRequest(name="gate", settings_json=text)
            )
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert sentence in failure.value.details()


def test_a_gateway_that_does_not_answer_in_time(gateway):
    gateway[1].delay_s = 5.0
    with (
        GatewayClient(gateway[0], deadline_s=0.1) as client,
        pytest.raises(
            UnavailableError, match=r"gateway at .* did not answer in time: it hangs, or the process that it called"
        ),
    ):
        client.cameras_list()


def test_no_gateway_there():
    with GatewayClient("127.0.0.1:1", deadline_s=0.5) as client:
        sentence = "no Sightline gateway answers at 127.0.0.1:1; start one with `sightline serve`"
        with pytest.raises(UnavailableError, match=sentence):
            client.cameras_list()
        with pytest.raises(UnavailableError, match=sentence):
            client.watch()


def test_no_gateway_elsewhere():
    """Nothing is to be started here."""
    message = r"answers at sightline.invalid:1; check .*firewall.*SIGHTLINE_CA"
    with (
        GatewayClient("sightline.invalid:1", deadline_s=10.0) as client,
        pytest.raises(UnavailableError, match=message),
    ):
        client.cameras_list()


async def test_another_kind_of_server():
    async with serving() as address:
        with GatewayClient(address, deadline_s=5.0) as client:
            for call in (client.cameras_list, lambda: list(client.watch())):
                with pytest.raises(UnavailableError, match="answers, but is not a Sightline gateway"):
                    await asyncio.to_thread(call)


def test_not_an_address():
    with pytest.raises(ConfigError, match="'gate' is not an address; write HOST:PORT"):
        GatewayClient("gate")


def test_watch_from_now_on(gateway, client, make):
    hub = gateway[2]
    hub.publish([make.answer(0)])
    answers = client.watch(["gate"])
    hub.publish([make.answer(1, stream="yard"), make.answer(2)])
    assert next(answers) == (make.answer(2), 0)
    threading.Timer(0.05, hub.close).start()
    assert list(answers) == []


def test_a_second_watch_continues_after_the_first(gateway, client, make):
    hub = gateway[2]
    answers = client.watch(["gate"])
    hub.publish([make.answer(0)])
    assert next(answers) == (make.answer(0), 0)
    answers.close()
    # The hub keeps two.
    hub.publish([make.answer(1), make.answer(2, stream="yard"), make.answer(3)])
    answers = client.watch(["gate"])
    assert next(answers) == (make.answer(3), 1)
    # Other cameras are another subscription.
    answers = client.watch(["yard"])
    hub.publish([make.answer(4, stream="yard")])
    assert next(answers) == (make.answer(4, stream="yard"), 0)


def test_settings_survive_the_wire(gateway, client):
    settings = {"window": {"length_s": 16, "refresh_budget": None}, "pruning": {"policy": "replenish"}}
    client.camera_add("gate", settings=settings)
    assert gateway[1].asked["gate"].model_dump(exclude_unset=True).items() >= settings.items()


async def test_a_list_may_be_larger_than_what_a_gateway_takes():
    directory = Directory()
    directory.cameras = {name: CameraStatus(name, "x" * 1024) for name in map("cam-{}".format, range(2000))}
    async with (
        serving(CamerasServicer(directory), max_message_bytes=2**20) as address,
        open_channel(address) as channel,
    ):
        listed = await cameras_pb2_grpc.CamerasStub(channel).List(cameras_pb2.ListCamerasRequest())
    assert len(listed.cameras) == 2000


@pytest.mark.parametrize(
    ("call", "request_of"), [("List", cameras_pb2.ListCamerasRequest), ("Export", cameras_pb2.ExportCamerasRequest)]
)
async def test_other_calls_are_served_while_thousands_of_cameras_are_listed(call, request_of):
    found = Directory()
    for number in range(1000):
        await found.add_camera(ManagedCamera(entry=CameraEntry(name=f"km-{number}")))
    listing = asyncio.create_task(getattr(CamerasServicer(found), call)(request_of(), None))
    turns = 0
    while not listing.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 5
    assert len(listing.result().cameras) == 1000
