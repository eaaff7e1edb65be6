"""The controller's own work, without Ray."""

import asyncio
import sqlite3

from waiting import until_async

from actors.controller import Controller
from cluster.config import load_config
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
