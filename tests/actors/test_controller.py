"""The controller's own work, without Ray."""

import asyncio
import contextlib
import gc
import inspect
import json
import pickle
import sqlite3
import threading
import time
from types import SimpleNamespace

import pytest
from waiting import until_async

import actors.remote
from actors.controller import FORGET_HEARTBEATS, Controller
from cluster import metrics
from cluster.client import GatewayClient
from cluster.config import CameraEntry, camera_settings, load_config
from cluster.control.camera_record import DeletionTracker
from cluster.control.cameras.managed import ManagedCamera
from cluster.control.cameras.table import CameraStore, FileTable
from cluster.errors import ManagedElsewhereError, UnavailableError, UnknownCameraError
from cluster.types import PatchGeometry
from cluster.types.reports import CameraReport, DecoderInfo, ReplicaInfo, StreamReport
from cluster.wire.server import is_serving


@pytest.fixture(autouse=True)
def own_logging(monkeypatch) -> None:
    """A controller is a process of its own, whose logging no other test is to have."""
    monkeypatch.setattr("actors.startup.configure_logging", lambda *_, **__: None)


@pytest.fixture(autouse=True)
def counted_soon(monkeypatch) -> None:
    monkeypatch.setattr("actors.controller.COUNT_REPLICAS_S", 0.2)


async def test_a_removal_is_waited_for_as_long_as_the_controller_waits(monkeypatch) -> None:
    """With heartbeats of 5 s, too, at which the controller answers after 20 s."""
    given = {}

    class Reply:
        def remote(self, *arguments):
            return asyncio.sleep(0)

    async def await_reply(reply, *, timeout_s, who):
        given["timeout_s"] = timeout_s
        return await reply

    monkeypatch.setattr(actors.remote, "controller", lambda: SimpleNamespace(remove_camera=Reply()))
    monkeypatch.setattr(actors.remote, "await_reply", await_reply)
    await actors.remote.REMOTE_CONTROLLER.remove_camera("gate", "cluster")
    assert given["timeout_s"] > FORGET_HEARTBEATS * 5.0


async def test_a_controller_that_hangs_is_named_before_the_client_gives_up(monkeypatch) -> None:
    assert inspect.signature(GatewayClient).parameters["deadline_s"].default > actors.remote.ANSWER_S
    monkeypatch.setattr(actors.remote, "ANSWER_S", 0.05)
    hangs = SimpleNamespace(remote=lambda: asyncio.sleep(60.0))
    monkeypatch.setattr(actors.remote, "controller", lambda: SimpleNamespace(list_cameras=hangs))
    with pytest.raises(UnavailableError, match=r"the controller did not answer within 0\.05 s; see its log"):
        await actors.remote.REMOTE_CONTROLLER.list_cameras()


@pytest.mark.parametrize("turns", range(3))
async def test_a_loop_of_calls_ends_although_it_is_cancelled_as_a_reply_comes(turns) -> None:
    reply = asyncio.get_running_loop().create_future()

    async def calls() -> None:
        while True:
            await actors.remote.await_reply(reply)
            await asyncio.sleep(0.01)

    running = asyncio.create_task(calls())
    await asyncio.sleep(0.05)
    reply.set_result(None)
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=0.5)
    running.cancel()
    assert running in done


async def test_a_controller_that_has_just_restarted_says_so_in_time(tmp_path, monkeypatch) -> None:
    controller, waited = settled_controller(tmp_path), []
    controller._settled.clear()

    async def wait_for(_condition, timeout_s) -> bool:
        waited.append(timeout_s)
        return False

    monkeypatch.setattr(controller, "_wait_for", wait_for)
    with pytest.raises(UnavailableError, match="has just restarted"):
        await controller.get_camera("gate")
    assert waited[-1] < actors.remote.ANSWER_S
    await controller.stop()


async def test_agents_that_come_back_before_cameras_are_placed_do_not_wait_at_the_controller(tmp_path) -> None:
    """Of 1000 calls that are under way none is another's: behind waiting ones no decoder could join."""
    controller = settled_controller(tmp_path)
    controller._settled.clear()
    look_up = controller.where("gate")
    with pytest.raises(UnavailableError, match="has just restarted"):
        look_up.send(None)
    await controller.stop()


def test_members_expire_although_the_disk_takes_nothing(tmp_path) -> None:
    asyncio.run(asyncio.wait_for(_members_expire(tmp_path), 60))


def settled_controller(folder) -> Controller:
    cluster = {"state_dir": str(folder), "heartbeat_s": 0.1, "heartbeat_timeout_s": 1, "decoders": 1, "replicas": 1}
    config = load_config(None, {"cluster": cluster, "questions": [{"id": "q", "text": "Fire?"}]})
    controller = Controller(config, "run", "127.0.0.1")
    controller._settled.set()
    return controller


def settings_of(name: str):
    return camera_settings(load_config(None, {"questions": [{"id": "q", "text": "Fire?"}]}), CameraEntry(name=name))


async def _members_expire(tmp_path) -> None:
    controller = settled_controller(tmp_path)
    tried: list[object] = []

    def fail(*given: object) -> None:
        tried.append(given)
        raise sqlite3.OperationalError("disk I/O error")

    put, controller._kv.put_counted = controller._kv.put_counted, fail
    await controller.register_decoder(DecoderInfo("decoder-0", "a", "127.0.0.1:1", "", 1), [])
    assert list(controller._directory.decoders) == ["decoder-0"]
    await until_async(lambda: tried, "a heartbeat at which the disk fails")
    await until_async(lambda: not controller._directory.decoders, "its expiry")
    # What could not be written is, once the disk takes it.
    controller._kv.put_counted = put
    await until_async(lambda: controller._kept[0] == controller._directory.version, "what was counted")
    for task in controller._background:
        task.cancel()


def test_windows_answered_while_no_member_changed_are_known_to_the_next_controller(tmp_path, monkeypatch) -> None:
    """Also if the replica that counted them dies with the controller."""
    monkeypatch.setattr("actors.controller.STORE_COUNTERS_S", 0.5)
    asyncio.run(asyncio.wait_for(_counters_outlive_both(tmp_path), 60))


async def _counters_outlive_both(tmp_path) -> None:
    controller = settled_controller(tmp_path)
    await controller.register_replica(ReplicaInfo("a", "127.0.0.1:1", "", 1, PatchGeometry(14, 2, 2)), None, [])
    gate = ManagedCamera(entry=CameraEntry(name="gate", source="rtsp://10.0.0.1/stream"))
    life = (await controller.add_camera(gate, force=True)).life
    for done in range(30):
        report = StreamReport("gate", counts={"windows_done": 1000 + done}, life=life, run="run of a")
        await controller.heartbeat_replica("a", [report])
        await asyncio.sleep(0.1)
    for task in controller._background:
        task.cancel()
    after = settled_controller(tmp_path)
    after._settled.clear()
    # Of the last second, some may be missing.
    assert 1015 <= (await after.get_camera("gate")).windows_done <= 1029
    for task in after._background:
        task.cancel()


def test_a_process_that_starts_again_is_counted_once(tmp_path) -> None:
    asyncio.run(asyncio.wait_for(_restarts(tmp_path), 60))


async def _restarts(tmp_path) -> None:
    controller = settled_controller(tmp_path)
    directory = controller._directory

    def counted() -> list[float]:
        name = "sightline_process_restarts_total"
        return [metrics.REGISTRY.get_sample_value(name, {"role": role}) or 0.0 for role in ("decoder", "replica")]

    began, found = counted(), []
    # Started; started again; away for longer than a heartbeat may take, and back as the same process.
    for instance in ("a", "b", "b"):
        await controller.register_decoder(DecoderInfo("decoder-0", instance, "127.0.0.1:1", "", 1), [])
        directory.leave_decoder("decoder-0")
        info = ReplicaInfo(instance, "127.0.0.1:1", "", 1, PatchGeometry(14, 2, 2))
        directory.leave_replica(await controller.register_replica(info, None, []))
        found.append([now - before for now, before in zip(counted(), began, strict=True)])
    assert found == [[0, 0], [1, 1], [1, 1]]
    for task in controller._background:
        task.cancel()


def test_a_controller_that_starts_again_wants_as_many_decoders_as_before(tmp_path) -> None:
    asyncio.run(asyncio.wait_for(_wanted(tmp_path), 60))


async def _wanted(tmp_path) -> None:
    store = CameraStore(FileTable(tmp_path / "cameras.sqlite"))
    store.begin("run")
    store.put_decoders(3)
    cluster = {"state_dir": str(tmp_path), "decoders": 1, "max_decoders": 4}
    controller = Controller(load_config(None, {"cluster": cluster}), "run", "127.0.0.1")
    assert metrics.REGISTRY.get_sample_value("sightline_fleet_wanted", {"role": "decoder"}) == 3
    for task in controller._background:
        task.cancel()


def test_members_expire_although_the_disk_hangs(tmp_path) -> None:
    asyncio.run(asyncio.wait_for(_members_expire_beside(tmp_path), 60))


async def _members_expire_beside(tmp_path) -> None:
    controller = settled_controller(tmp_path)
    hangs, ends = threading.Event(), threading.Event()
    write = controller._kv._table.write

    def hang(*given: object) -> None:
        hangs.set()
        assert ends.wait(60)
        write(*given)

    controller._kv._table.write = hang
    await controller.register_decoder(DecoderInfo("decoder-0", "a", "127.0.0.1:1", "", 1), [])
    try:
        await until_async(lambda: hangs.is_set() and controller._keeping.locked(), "what was counted to be written", 20)
        await until_async(lambda: not controller._directory.decoders, "its expiry", 20)
    finally:
        ends.set()
    await until_async(lambda: controller._kept[0] == controller._directory.version, "what was counted")
    for task in controller._background:
        task.cancel()


def test_while_the_disk_takes_its_time_a_change_of_cameras_holds_nobody_up(tmp_path) -> None:
    asyncio.run(asyncio.wait_for(_changes_beside(tmp_path), 60))


async def _changes_beside(tmp_path) -> None:
    """Changes are made in the order of the calls, each once it is stored; heartbeats go on meanwhile."""
    controller = settled_controller(tmp_path)
    decoder = DecoderInfo("decoder-0", "a", "127.0.0.1:1", "", 1)
    await controller.register_decoder(decoder, [])
    await controller.register_replica(ReplicaInfo("r", "127.0.0.1:1", "", 1, PatchGeometry(14, 2, 2)), None, [])
    gate, yard, moved = (
        ManagedCamera(entry=CameraEntry(name=name, source=f"rtsp://10.0.0.{host}/stream"))
        for name, host in (("gate", 1), ("yard", 2), ("gate", 3))
    )
    await until_async(lambda: controller._kept[0] == controller._directory.version, "what was counted")
    ends, write = threading.Event(), controller._kv._table.write

    def hang(*given: object) -> None:
        assert ends.wait(30), "the event loop is held up"
        write(*given)

    controller._kv._table.write = hang
    try:
        changes = [
            asyncio.create_task(change)
            for change in (
                controller.add_camera(gate, force=True),
                controller.add_camera(yard, force=True),
                controller.update_camera(moved),
                controller.remove_camera("yard"),
            )
        ]
        for _ in range(20):
            await asyncio.sleep(0.05)
            assert await controller.heartbeat_decoder("decoder-0", "a", [], 0.0)
            assert await controller.heartbeat_replica("r", []) is not None
            assert await controller.list_cameras() == []
        assert not any(change.done() for change in changes)
    finally:
        ends.set()
    added, other, updated, _ = await asyncio.gather(*changes)
    assert [status.name for status in (added, other, updated)] == ["gate", "yard", "gate"]
    declared = await controller.managed_cameras()
    assert [each.entry.source.reveal() for each in declared] == ["rtsp://10.0.0.3/stream"]
    assert controller._kv.load() == declared
    assert [*controller._kv.removed().values()] == ["yard"]
    for task in controller._background:
        task.cancel()


async def test_versions_grow_although_the_clock_was_set_back(tmp_path, monkeypatch) -> None:
    """A replica refuses a decoder whose version is smaller than that of the one that sent the camera before."""
    versions = []
    for at_s in (1_800_000_000, 1_700_000_000, 1_700_000_001):
        monkeypatch.setattr(
            "actors.controller.time", SimpleNamespace(monotonic=time.monotonic, time_ns=lambda at_s=at_s: at_s * 10**9)
        )
        controller = settled_controller(tmp_path)
        versions.append(controller._directory.version)
        for task in controller._background:
            task.cancel()
        controller._kv._table._connection.close()
    assert versions == sorted(set(versions))


async def test_a_busy_replica_is_not_taken_for_a_dead_one(tmp_path, monkeypatch) -> None:
    """It is probed when another one starts, or a decoder lost its connection: its heartbeats say that it lives."""
    listener = await asyncio.start_server(lambda *_: asyncio.sleep(60), "127.0.0.1", 0)
    address = "{}:{}".format(*listener.sockets[0].getsockname())
    # The timeout that a probe has: connecting must not fail first, which would count as not serving.
    assert await is_serving(address) is None
    listener.close()
    assert await is_serving(address, timeout_s=30.0) is False
    controller = settled_controller(tmp_path)
    await controller.register_replica(ReplicaInfo("r", address, "", 1, PatchGeometry(14, 2, 2)), None, [])
    for serves, beats in ((None, True), (None, False), (False, True)):
        await controller.register_replica(ReplicaInfo("r", address, "", 1, PatchGeometry(14, 2, 2)), None, [])
        monkeypatch.setattr("actors.controller.is_serving", lambda *_, serves=serves, **__: asyncio.sleep(0, serves))
        await controller.report_broken(address)
        await asyncio.sleep(0.01)
        if beats:
            await controller.heartbeat_replica("r", [])
        await until_async(lambda: not controller._probing, "the probe")
        assert ("replica-0" in controller._directory.replicas) is (serves is None and beats)
    # One that leaves before its probe begins is nothing that fails.
    name = await controller.register_replica(ReplicaInfo("r", address, "", 1, PatchGeometry(14, 2, 2)), None, [])
    before = set(controller._background)
    await controller.report_broken(address)
    controller._directory.leave_replica(name)
    await asyncio.wait_for(asyncio.gather(*controller._background - before), 10.0)
    for task in controller._background:
        task.cancel()


async def test_a_late_replica_deletes_nothing_of_a_new_camera_of_a_removed_ones_name(tmp_path) -> None:
    """Neither does one that a restarted controller knows nothing of yet."""
    controller = settled_controller(tmp_path)
    controller._deletions = DeletionTracker(2)
    gate = ManagedCamera(entry=CameraEntry(name="gate", source="rtsp://10.0.0.1/stream"))
    await controller.register_replica(ReplicaInfo("a", "127.0.0.1:1", "", 1, PatchGeometry(14, 2, 2)), None, [])
    first = (await controller.add_camera(gate, force=True)).life
    await controller.remove_camera("gate")
    assert await controller.pending_deletions("a") == {first: "gate"}
    second = (await controller.add_camera(gate, force=True)).life
    # One has not deleted it yet: the new one is removed nowhere.
    assert await controller.heartbeat_replica("a", [StreamReport("gate", life=second)], [first]) == {}
    controller._settled.clear()
    assert await controller.pending_deletions("late") == {first: "gate"} == controller._kv.removed()
    # A decoder that has lost the controller still sends the first one somewhere.
    assert controller._deletions.confirm("late", [first], {"a", "late"}) == [first]
    reports = [StreamReport("gate", life=life) for life in (first, second)]
    assert await controller.heartbeat_replica("a", reports) == {first: "gate"}
    for task in controller._background:
        task.cancel()


async def test_a_change_whose_caller_goes_away_is_made_as_it_is_stored(tmp_path) -> None:
    controller = settled_controller(tmp_path)
    await controller.register_decoder(DecoderInfo("decoder-0", "a", "127.0.0.1:1", "", 1), [])
    gate, yard, moved = (
        ManagedCamera(entry=CameraEntry(name=name, source=f"rtsp://10.0.0.{host}/stream"))
        for name, host in (("gate", 1), ("yard", 2), ("yard", 3))
    )
    await controller.add_camera(gate, force=True)
    await controller.add_camera(yard, force=True)
    hangs, ends = threading.Event(), threading.Event()
    write = controller._kv._table.write

    def hang(put, delete=()) -> None:
        if any(key.startswith(("camera/", "removed/")) for key in put):
            hangs.set()
            assert ends.wait(20)
        write(put, delete)

    controller._kv._table.write = hang
    for change in (
        controller.add_camera(ManagedCamera(entry=CameraEntry(name="door", source="rtsp://10.0.0.4/stream")), True),
        controller.update_camera(moved),
        controller.remove_camera("gate"),
    ):
        hangs.clear()
        ends.clear()
        before = controller._table.managed()
        called = asyncio.create_task(change)
        await until_async(hangs.is_set, "the write to begin")
        called.cancel()
        with pytest.raises(asyncio.CancelledError):
            await called
        assert controller._table.managed() == before
        ends.set()
        await until_async(
            lambda before=before: controller._kv.load() == controller._table.managed() != before, "the change", 10
        )
    declared = await controller.managed_cameras()
    assert [each.entry.name for each in declared] == ["door", "yard"]
    assert controller._kv.load() == declared
    assert [*controller._deletions.pending.values()] == [*controller._kv.removed().values()] == ["gate"]
    for task in controller._background:
        task.cancel()


def test_cameras_are_placed_once_the_disk_takes_them(tmp_path) -> None:
    asyncio.run(asyncio.wait_for(_placed_late(tmp_path), 60))


async def _placed_late(tmp_path) -> None:
    cluster = {"state_dir": str(tmp_path), "heartbeat_s": 0.1, "heartbeat_timeout_s": 30, "decoders": 1, "replicas": 1}
    cameras = [{"name": "gate", "source": "rtsp://10.0.0.1/stream"}]
    config = load_config(None, {"cluster": cluster, "questions": [{"id": "q", "text": "Fire?"}], "cameras": cameras})
    controller = Controller(config, "run", "127.0.0.1")
    disk = controller._kv._table._connection
    disk.execute("CREATE TRIGGER full BEFORE INSERT ON kept BEGIN SELECT RAISE(ABORT, 'disk is full'); END")
    await controller.register_decoder(DecoderInfo("decoder-0", "a", "127.0.0.1:1", "", 1), [])
    await asyncio.sleep(0.5)
    assert not controller._settled.is_set()
    assert controller._kv.load() == []
    disk.execute("DROP TRIGGER full")
    assert [camera.name for camera in await controller.list_cameras()] == ["gate"]
    assert controller._kv.load() == await controller.managed_cameras()
    for task in controller._background:
        task.cancel()


def test_a_controller_starts_again_on_a_full_disk(tmp_path) -> None:
    asyncio.run(asyncio.wait_for(_starts_on_a_full_disk(tmp_path), 60))


async def _starts_on_a_full_disk(tmp_path) -> None:
    """It places the cameras that it knows, and says why none can be added."""
    cluster = {"state_dir": str(tmp_path), "heartbeat_s": 0.1, "heartbeat_timeout_s": 0.2}
    cameras = [{"name": "gate", "source": "rtsp://10.0.0.1/stream"}]
    config = load_config(None, {"cluster": cluster, "questions": [{"id": "q", "text": "Fire?"}], "cameras": cameras})
    full = "CREATE TRIGGER full BEFORE INSERT ON kept BEGIN SELECT RAISE(ABORT, 'disk is full'); END"
    yard = ManagedCamera(entry=CameraEntry(name="yard", source="rtsp://10.0.0.2/stream"))
    versions = []
    for disk in ("", full, "", "DROP TRIGGER full"):
        with contextlib.closing(sqlite3.connect(tmp_path / "cameras.sqlite")) as file:
            file.execute(disk)
        controller = Controller(config, "run", "127.0.0.1")
        versions.append(controller._directory.version)
        await until_async(controller._settled.is_set, "the cameras' place", 20)
        assert [camera.name for camera in await controller.list_cameras()] == ["gate"]
        if disk == full:
            with pytest.raises(UnavailableError, match="disk is full; free disk space there"):
                await controller.add_camera(yard, force=True)
        for task in controller._background:
            task.cancel()
        controller._kv._table._connection.close()
    assert versions == sorted(set(versions)), "members refuse a controller whose versions are older"


def test_a_camera_that_an_upgrade_makes_invalid_is_not_removed(tmp_path, caplog) -> None:
    asyncio.run(asyncio.wait_for(_left_out(tmp_path, caplog), 60))


async def _left_out(tmp_path, caplog) -> None:
    cluster = {"state_dir": str(tmp_path), "heartbeat_s": 0.05, "heartbeat_timeout_s": 1, "decoders": 1, "replicas": 1}
    config = load_config(None, {"cluster": cluster, "questions": [{"id": "q", "text": "Fire?"}]})
    table = FileTable(tmp_path / "cameras.sqlite")
    source = "rtsp://ann:48151623@10.0.0.1/stream"
    # Keys that this version does not have, and a stride that the window of its configuration does not have.
    entries = {
        "gate": {"name": "gate", "source": source, "old_key": 1},
        "yard": {"name": "yard", "source": source, "window": {"stride_s": 1000}},
        "door": {"name": "door", "source": source},
        # A name that an earlier version allowed.
        "gate 2": {"name": "gate 2", "source": source},
    }
    for number, (name, entry) in enumerate(entries.items()):
        body = {"entry": entry, "manager": "cluster", "life": f"life-{number}"}
        table.write({f"camera/{name}": json.dumps(body).encode()})
    table.write({"seeded": json.dumps([json.dumps(entries["gate"]), json.dumps({"name": "gate 3"})]).encode()})
    controller = Controller(config, "run", "127.0.0.1")
    await controller.register_decoder(DecoderInfo("decoder-0", "a", "127.0.0.1:1", "", 1), [])
    states = await controller.camera_states(-1)
    assert [each.name for each in states.statuses] == ["door"]
    assert [each.name for each in states.settings] == ["door"]
    await controller.register_decoder(DecoderInfo("decoder-1", "b", "127.0.0.1:2", "", 2), [])
    assert (await controller.camera_states(states.version)).settings == (), "members changed, settings did not"
    assert states.lives == {"gate": "life-0", "yard": "life-1", "door": "life-2", "gate 2": "life-3"}
    for name in ("gate", "yard", "gate 2"):
        assert f"camera {name} is left out" in caplog.text
    assert "48151623" not in caplog.text
    await controller.remove_camera("gate 2")
    # What alerting has of them stays until they are removed, or go on as the same cameras.
    await controller.remove_camera("gate")
    with pytest.raises(ManagedElsewhereError):
        await controller.add_camera(ManagedCamera(entry=CameraEntry(name="yard"), manager="file"), force=True)
    await controller.add_camera(ManagedCamera(entry=CameraEntry(name="yard")), force=True)
    assert (await controller.camera_states(-1)).lives == {"yard": "life-1", "door": "life-2"}
    assert [each.entry.name for each in CameraStore(table).load()] == ["door", "yard"]
    assert CameraStore(table).removed() == {"life-0": "gate", "life-3": "gate 2"}
    with pytest.raises(UnknownCameraError):
        await controller.remove_camera("gate")
    for task in controller._background:
        task.cancel()


def test_what_the_disk_does_not_take_changes_no_camera(tmp_path) -> None:
    asyncio.run(asyncio.wait_for(_cameras_stay(tmp_path), 60))


async def _cameras_stay(tmp_path) -> None:
    cluster = {"state_dir": str(tmp_path), "heartbeat_s": 0.1, "heartbeat_timeout_s": 30, "decoders": 1, "replicas": 1}
    config = load_config(None, {"cluster": cluster, "questions": [{"id": "q", "text": "Fire?"}]})
    controller = Controller(config, "run", "127.0.0.1")
    await controller.register_decoder(DecoderInfo("decoder-0", "a", "127.0.0.1:1", "", 1), [])
    gate, yard, moved = (
        ManagedCamera(entry=CameraEntry(name=name, source=f"rtsp://10.0.0.{host}/stream"))
        for name, host in (("gate", 1), ("yard", 2), ("gate", 3))
    )
    kept = [await controller.add_camera(gate, force=True)]
    declared = await controller.managed_cameras()
    disk = controller._kv._table._connection

    async def refused(*changes) -> None:
        for change in changes:
            with pytest.raises(UnavailableError, match=r"cameras cannot be written to .*cameras\.sqlite"):
                await change
            assert await controller.managed_cameras() == declared
            assert await controller.list_cameras() == kept
            assert controller._kv.load() == declared
            assert not controller._deletions.pending | controller._kv.removed()

    disk.execute("PRAGMA query_only = ON")
    await refused(
        controller.add_camera(yard, force=True), controller.update_camera(moved), controller.remove_camera("gate")
    )
    disk.execute("PRAGMA query_only = OFF")
    # It fills up between the two writes of a removal.
    disk.execute("CREATE TRIGGER full BEFORE DELETE ON kept BEGIN SELECT RAISE(ABORT, 'disk is full'); END")
    await refused(controller.remove_camera("gate"))
    disk.execute("DROP TRIGGER full")

    await controller.update_camera(moved)
    await controller.add_camera(yard, force=True)
    assert [camera.entry.source.reveal()[-8:] for camera in controller._kv.load()] == ["3/stream", "2/stream"]
    await controller.remove_camera("gate")
    assert [camera.entry.name for camera in controller._kv.load()] == ["yard"]
    assert [*controller._deletions.pending.values()] == [*controller._kv.removed().values()] == ["gate"]
    for task in controller._background:
        task.cancel()


async def test_heartbeats_have_their_turn_while_the_status_of_thousands_is_gathered(tmp_path) -> None:
    """And a camera that is removed meanwhile is neither an error nor are others missing."""
    controller = settled_controller(tmp_path)
    for number in range(1000):
        controller._directory.add(settings_of(f"cam-{number:03d}"), life=f"life-{number}")
    looking, turns = asyncio.create_task(controller.camera_states(-1)), 0
    while not looking.done():
        await asyncio.sleep(0)
        turns += 1
        if turns == 3:
            controller._directory.remove("cam-999")
            controller._directory.add(settings_of("late"))
    states = await looking
    assert turns >= 1000 / 200
    assert states.lives == {f"cam-{number:03d}": f"life-{number}" for number in range(999)}
    following = await controller.camera_states(states.version)
    assert [each.name for each in following.settings] == ["late"]
    assert len(following.statuses) == 1000


async def test_heartbeats_of_many_cameras_are_not_interrupted_by_the_collector(tmp_path) -> None:
    """A full collection goes through all cameras' objects: a third of a second of 10,000."""
    before, found = gc.get_threshold(), []
    controller = settled_controller(tmp_path)
    names = [f"cam-{number}" for number in range(400)]
    for name in names:
        controller._directory.add(settings_of(name), life=name)
    await controller.register_decoder(DecoderInfo("decoder-0", "a", "127.0.0.1:1", "", 1), [])
    gc.callbacks.append(look := lambda phase, info: phase == "stop" and found.append(info["generation"]))
    try:
        for count in range(20):
            reports = [CameraReport(name, "running", counts={"gaps": count}, life=name) for name in names]
            sent = pickle.loads(pickle.dumps(reports))
            assert await controller.heartbeat_decoder("decoder-0", "a", sent, 0.5)
    finally:
        gc.callbacks.remove(look)
        gc.set_threshold(*before)
    assert len(found) <= 1
    await controller.stop()
