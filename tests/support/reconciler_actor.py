"""The reconciler's actor without Ray, over a camera table of a test."""

from __future__ import annotations

import asyncio
import time

from camera_cluster import CameraCluster

from actors import reconciler, remote
from cluster.config import load_config

WAIT_S = 15.0


class Handle:
    """An actor handle whose methods run at once."""

    def __init__(self, cluster: CameraCluster) -> None:
        self.cluster = cluster

    def __getattr__(self, name):
        methods = {
            "managed_cameras": self.cluster.managed,
            "list_cameras": self.cluster.statuses,
            "add_camera": lambda camera, force, takeover: self.cluster.add(camera, takeover=takeover),
            "update_camera": lambda camera, takeover: self.cluster.update(camera, takeover=takeover),
            "remove_camera": lambda name, manager: self.cluster.remove(name),
        }

        class Method:
            remote = staticmethod(methods[name])

        return Method


def actor(monkeypatch, cluster, **kubernetes):
    monkeypatch.setattr(remote, "controller", lambda: Handle(cluster))
    monkeypatch.setattr(reconciler, "configure_logging", lambda *_: None)
    return reconciler.ReconcilerActor(load_config(None, {"kubernetes": {"enabled": True, **kubernetes}}), "127.0.0.1")


async def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
