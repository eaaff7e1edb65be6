"""The objects of decoder and alerting, without Ray: an alert becomes a clip, and a removed camera takes it along."""

import asyncio
import io
import threading
import time
from types import SimpleNamespace

import av
import pytest
from waiting import until_async

import actors.alerting
import actors.decoder
import actors.remote
from actors.alerting import Alerting
from actors.decoder import Decoder
from cluster.alerts.health import CameraStates
from cluster.client import GatewayClient
from cluster.config import CameraEntry, camera_settings, load_config
from cluster.control.directory import Directory
from cluster.gateway.pictures_proxy import PicturesProxy
from cluster.types import MICROSECONDS, Answer, PatchGeometry, TokenCount
from cluster.wire.channel import ChannelPool
from cluster.wire.server import RpcServer


class Controller:
    """The controller's own state, asked as a Ray handle is."""

    def __init__(self, config) -> None:
        self.directory = Directory()
        self.directory.geometry = PatchGeometry(patch=14, merge=2, temporal=2)
        for entry in config.cameras:
            self.directory.add(camera_settings(config, entry))

    def __getattr__(self, name):
        async def call(*arguments):
            return await getattr(self, f"on_{name}")(*arguments)

        return SimpleNamespace(remote=call)

    async def on_register_decoder(self, info, running):
        self.directory.join_decoder(info, time.monotonic(), running)

    async def on_heartbeat_decoder(self, name, instance, reports, busy):
        return self.directory.heartbeat_decoder(name, instance, reports, time.monotonic(), busy)

    async def on_assignment(self, name, version, timeout_s):
        deadline = time.monotonic() + timeout_s
        while not self.directory.concerns(name, version) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return self.directory.assignment(name, version)

    async def on_where(self, name):
        return self.directory.route(name)

    async def on_replicas(self, known, timeout_s):
        await asyncio.sleep(timeout_s)
        return {}

    async def on_camera_states(self, version):
        names = self.directory.cameras
        return CameraStates(
            self.directory.version,
            self.directory.settings_since(version),
            tuple(self.directory.status(name) for name in names),
            {},
        )


@pytest.fixture
def config(clip, tmp_path):
    playing = {"loop": True, "realtime": True, "speed": 4}
    return load_config(
        None,
        {
            "cameras": [{"name": "gate", "source": str(clip), "source_options": playing}],
            "questions": [{"id": "person", "text": "?"}],
            "alerts": {"folder": str(tmp_path / "box"), "consecutive": 1},
            "clips": {"before_s": 2, "after_s": 2, "keep_free": 0},
            "cluster": {"heartbeat_s": 0.1},
        },
    )


async def test_a_hung_disk_of_clips_holds_up_no_health_check(config, tmp_path, monkeypatch) -> None:
    controller, ends = Controller(config), threading.Event()
    monkeypatch.setattr(actors.remote, "controller", lambda: controller)
    monkeypatch.setattr("actors.startup.configure_logging", lambda *_, **__: None)
    monkeypatch.setattr(actors.alerting, "POLL_S", 0.02)
    alerting = Alerting(config, "run", "127.0.0.1")
    try:
        await alerting.ready()
        await until_async(lambda: alerting._service.version >= 0, "the cameras")
        alerting._footage._disk.submit(ends.wait, 60)
        controller.directory.remove("gate")
        await until_async(lambda: alerting._service.version == controller.directory.version, "the removal")
        controller.directory.add(camera_settings(config, config.cameras[0]))
        await until_async(lambda: alerting._service.version == controller.directory.version, "the new camera", 20)
    finally:
        ends.set()
        await alerting.stop()


@pytest.mark.parametrize(("took_s", "pause_s"), [(0.01, 1.0), (2.0, 8.0), (7.5, 10.0)])
async def test_a_controller_that_answers_late_keeps_no_camera_from_alerting_for_long(monkeypatch, took_s, pause_s):
    """After a restart it takes up to 7 s: for half a minute no alert came of a camera that was added, and none of one
    that was offline. A look takes a fifth of the time, but none is later than 10 s after the one before."""
    now_s, pauses = [100.0], []

    async def camera_states(_version):
        now_s[0] += took_s
        return CameraStates(1, (), (), {})

    async def update_cameras(_watched):
        pass

    async def sleep(seconds):
        pauses.append(seconds)
        raise asyncio.CancelledError

    monkeypatch.setattr(actors.alerting, "REMOTE_CONTROLLER", SimpleNamespace(camera_states=camera_states))
    monkeypatch.setattr(actors.alerting, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(actors.alerting, "asyncio", SimpleNamespace(sleep=sleep))
    alerting = object.__new__(Alerting)
    alerting._service = SimpleNamespace(version=0, update_cameras=update_cameras)
    alerting._extend_lookback = lambda _: None
    alerting._cameras_known = alerting._lives_changed = asyncio.Event()
    with pytest.raises(asyncio.CancelledError):
        await alerting._watch_cameras()
    assert pauses == [pytest.approx(pause_s)]


async def test_what_a_late_clip_shows_is_deleted_by_its_age(config, monkeypatch) -> None:
    window = config.window.model_copy(update={"length_s": 100.0, "stride_s": 50.0})
    controller = Controller(config.model_copy(update={"window": window}))
    monkeypatch.setattr(actors.remote, "controller", lambda: controller)
    monkeypatch.setattr("actors.startup.configure_logging", lambda *_, **__: None)
    alerting = Alerting(config, "run", "127.0.0.1")
    try:
        await alerting.ready()
        await until_async(lambda: alerting._service.version >= 0, "the cameras")
        # Of a window of 100 s that was answered three strides after it had ended.
        for incident, age_s in ("0" * 16, 200.0), ("1" * 16, 1.0):
            draft = alerting._footage.store.begin("gate", incident, "clip", time.time() - age_s)
            draft.write(b"clip")
            draft.commit()
        assert (await alerting._footage.delete_footage("gate", 440.0)).files == 1
        assert alerting._footage.store.find("1" * 16, "clip")
    finally:
        await alerting.stop()


@pytest.mark.parametrize("loop", ["cameras", "rules", "writing"])
async def test_alerting_does_not_live_on_without_a_loop(config, monkeypatch, loop) -> None:
    controller, exits = Controller(config), []
    monkeypatch.setattr(actors.remote, "controller", lambda: controller)
    monkeypatch.setattr("actors.startup.configure_logging", lambda *_, **__: None)
    monkeypatch.setattr("actors.startup.os._exit", exits.append)
    alerting = Alerting(config, "run", "127.0.0.1")
    await alerting.ready()
    await until_async(lambda: alerting._service.version >= 0, "the cameras")

    def fail(*_):
        raise KeyError("gate")

    broken = {"cameras": (alerting._service, "update_cameras"), "rules": (alerting._service._health, "update")}
    monkeypatch.setattr(*broken.get(loop, (alerting._service._open_incidents, "pop_changes")), fail)
    await until_async(lambda: exits == [1], "the end of the process")
    monkeypatch.undo()
    await alerting.stop()


@pytest.mark.parametrize("loop", ["_apply", "_apply_decode_pressure"])
async def test_a_decoder_does_not_live_on_without_a_loop(config, monkeypatch, loop) -> None:
    controller, exits = Controller(config), []
    monkeypatch.setattr(actors.remote, "controller", lambda: controller)
    monkeypatch.setattr("actors.startup.configure_logging", lambda *_, **__: None)
    monkeypatch.setattr("actors.startup.os._exit", exits.append)
    monkeypatch.setattr(actors.decoder, "POLL_S", 0.1)
    decoder = Decoder(config, "decoder-0", "127.0.0.1")
    await until_async(lambda: "gate" in decoder._cameras, "the camera")

    def fail(*_):
        raise KeyError("gate")

    monkeypatch.setattr(decoder, loop, fail)
    await until_async(lambda: exits == [1], "the end of the process")
    await decoder.stop()


async def test_a_decoder_that_starts_many_cameras_does_its_other_work_meanwhile(config, monkeypatch) -> None:
    cameras = [CameraEntry(name=f"cam-{number}") for number in range(20)]
    controller, sizes = Controller(config.model_copy(update={"cameras": cameras})), set()
    monkeypatch.setattr(actors.remote, "controller", lambda: controller)
    monkeypatch.setattr("actors.startup.configure_logging", lambda *_, **__: None)
    decoder = Decoder(config, "decoder-0", "127.0.0.1")

    async def other_work() -> None:
        while len(decoder._cameras) < len(cameras):
            sizes.add(len(decoder._cameras))
            await asyncio.sleep(0)

    await asyncio.wait_for(other_work(), 20)
    assert sizes == set(range(len(cameras)))
    await decoder.stop()


async def test_a_camera_without_room_for_its_thread_costs_the_decoder_no_other(config, monkeypatch) -> None:
    controller, exits, start = Controller(config), [], threading.Thread.start
    monkeypatch.setattr(actors.remote, "controller", lambda: controller)
    monkeypatch.setattr("actors.startup.configure_logging", lambda *_, **__: None)
    monkeypatch.setattr("actors.startup.os._exit", exits.append)
    monkeypatch.setattr("actors.startup.EXIT_S", 0.0)
    monkeypatch.setattr(actors.decoder, "POLL_S", 0.1)

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "camera-gate":
            raise RuntimeError("can't start new thread")
        start(thread)

    def state() -> tuple[str, str]:
        found = controller.directory.status("gate")
        return found.state, found.reason

    with monkeypatch.context() as limit:
        limit.setattr(threading.Thread, "start", refuse)
        decoder = Decoder(config, "decoder-0", "127.0.0.1")
        await until_async(lambda: exits or state() == ("error", "can't start new thread"), "the error")
        await asyncio.sleep(0.5)
    await until_async(lambda: exits or state()[0] == "running", "the camera")
    assert not exits
    # The attempts before have left no packet ring: one ring has the whole budget.
    assert decoder._rings.held
    decoder._rings.limit = decoder._rings.held - 1
    assert not decoder._rings.is_exceeded(decoder._rings.limit)
    await decoder.stop()


def test_an_alert_becomes_a_clip_and_a_removed_camera_takes_it_along(config, tmp_path, monkeypatch) -> None:
    asyncio.run(asyncio.wait_for(_story(config, tmp_path, monkeypatch), 60))


async def _story(config, tmp_path, monkeypatch) -> None:
    controller = Controller(config)
    monkeypatch.setattr(actors.remote, "controller", lambda: controller)
    monkeypatch.setattr("actors.startup.configure_logging", lambda *_, **__: None)
    decoder = Decoder(config, "decoder-0", "127.0.0.1")
    alerting = Alerting(config, "run", "127.0.0.1")
    gateway = RpcServer()
    try:
        address = await alerting.ready()

        async def decoder_of(camera):
            return controller.directory.route(camera).decoder_address

        async def alerting_at():
            return address

        proxy = PicturesProxy(decoder_of, alerting_at, ChannelPool(), tested=decoder_of, any_decoder=alerting_at)
        gateway.add(proxy)
        client = GatewayClient(f"127.0.0.1:{gateway.bind('127.0.0.1', 0)}")
        await gateway.start()
        await until_async(lambda: "gate" in decoder._cameras, "the camera")
        ring = decoder._cameras["gate"].footage.ring
        await until_async(lambda: ring.seconds > 6, "six seconds of it")
        end = ring.gop_packets(1 << 62)[-1].time - MICROSECONDS
        tokens = TokenCount(full=1, kept=1, reused=0, refreshed=0, new=1, query=1, encoded=1)
        answer = Answer("gate", 0, end - 2 * MICROSECONDS, end, "person", 0.9, True, "", False, tokens)
        await until_async(lambda: alerting._service.version >= 0, "cannot read the cameras' status")
        alerting._hub.publish([answer])
        await until_async(alerting._service.open_incidents, "the incident")
        [incident] = alerting._service.open_incidents()
        await until_async(lambda: alerting._service.open_incidents()[0].clip != "waiting", "its clip")
        [incident] = alerting._service.open_incidents()
        assert (incident.clip, incident.footage_note) == ("whole", "")

        def fetch():
            about, data = client.footage(incident.id)
            return about, b"".join(data), client.picture("gate", kept=True)

        about, data, picture = await asyncio.to_thread(fetch)
        with av.open(io.BytesIO(data)) as container:
            shown = sum(1 for _ in container.decode(video=0))
        assert about.camera == "gate"
        # Six seconds of 12.5 pictures, and up to a group of pictures more.
        assert 74 <= shown <= 150
        assert picture.jpeg[:2] == b"\xff\xd8"
        folder = tmp_path / "box" / "clips"
        assert len(list(folder.iterdir())) == 2
        controller.directory.remove("gate")
        await until_async(lambda: not list(folder.iterdir()), "the end of its files")
        await until_async(lambda: not decoder._cameras, "the end of the camera")
        assert decoder._rings.held == 0
        await asyncio.to_thread(client.close)
    finally:
        await gateway.stop(0.0)
        await alerting.stop()
        await decoder.stop()
