"""The controller's own work, without Ray."""

import asyncio
import sqlite3

import pytest
from waiting import until_async

from actors.controller import Controller
from cluster.config import CameraEntry, load_config
from cluster.control.cameras.managed import ManagedCamera
from cluster.errors import UnavailableError
from cluster.types.reports import DecoderInfo


def test_members_expire_although_the_disk_takes_nothing(tmp_path) -> None:
    asyncio.run(asyncio.wait_for(_members_expire(tmp_path), 60))


async def _members_expire(tmp_path) -> None:
    cluster = {"state_dir": str(tmp_path), "heartbeat_s": 0.1, "heartbeat_timeout_s": 1, "decoders": 1, "replicas": 1}
    controller = Controller(load_config(None, {"cluster": cluster}), "run", "127.0.0.1")
    controller._settled.set()

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
    await until_async(lambda: controller._kept == controller._directory.version, "what was counted")
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
            assert controller._deletions.pending_cameras == controller._kv.removed() == []

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
    assert controller._deletions.pending_cameras == controller._kv.removed() == ["gate"]
    for task in controller._background:
        task.cancel()
