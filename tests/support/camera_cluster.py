"""The controller's cameras without Ray: the table and the directory that it really has."""

import asyncio

from cluster.config import load_config
from cluster.control.cameras.managed import CLUSTER, KUBERNETES
from cluster.control.cameras.table import CameraTable
from cluster.control.directory import Directory
from cluster.errors import UnavailableError
from cluster.types import PatchGeometry
from cluster.types.reports import CameraReport, DecoderInfo, ReplicaInfo, StreamReport

QUESTION = {"id": "person", "text": "Is there a person?"}


class DeclaredCameras(CameraTable):
    """Changed as the controller does it, with nothing stored in between."""

    def add(self, managed, now_s, **given):
        return self.apply(self.check_add(managed, now_s, **given), now_s)

    def update(self, managed, now_s, **given):
        return self.apply(self.check_update(managed, **given), now_s)

    def remove(self, name, **given):
        self.check_remove(name, **given)
        super().remove(name)


class CameraCluster:
    """As :class:`cluster.gateway.directory.Directory`; ``away``: the controller does not answer."""

    def __init__(self, questions=(QUESTION,)):
        self.directory = Directory()
        self.directory.join_decoder(DecoderInfo("decoder-0", "d/0", "d:1", "", 1), 0.0)
        self.directory.join_replica(ReplicaInfo("r/0", "r:1", "", 1, PatchGeometry(14, 2, 2)), 0.0)
        self.table = DeclaredCameras(load_config(None, {"questions": list(questions)}), self.directory)
        self.away = False
        self.calls = []
        self.refuse = None

    def _call(self, *what):
        if self.away:
            raise UnavailableError("the controller restarts")
        self.calls.append(what)

    async def managed_cameras(self, names=(), left_out=False):
        if self.away:
            raise UnavailableError("the controller restarts")
        return self.table.managed(left_out=True)

    async def list_cameras(self):
        if self.away:
            raise UnavailableError("the controller restarts")
        return [self.directory.status(name) for name in self.directory.cameras]

    async def add_camera(self, camera, force=False, takeover=False):
        self._call("add", camera.entry.name)
        if self.refuse is not None:
            raise self.refuse
        self.table.add(camera, 0.0, takeover=takeover)

    async def update_camera(self, camera, takeover=False):
        self._call("update", camera.entry.name)
        self.table.update(camera, 0.0, takeover=takeover)

    async def remove_camera(self, name, manager):
        self._call("remove", name)
        await asyncio.sleep(0)
        self.table.remove(name, manager=manager)

    def running(self, name, **report):
        """A decoder reports it."""
        report = CameraReport(name, "running", life=self._life(name), **report)
        self.directory.heartbeat_decoder("decoder-0", "d/0", [report], 1.0)

    def answered(self, name, *answers, latency_s=0.0):
        """A replica reports it."""
        report = StreamReport(name, latency_s, tuple(answers), life=self._life(name))
        self.directory.heartbeat_replica("r/0", [report], 1.0)

    def _life(self, name):
        return self.directory.status(name).life

    def managers(self):
        return {camera.entry.name: camera.manager for camera in self.table.managed()}

    def priorities(self, manager=KUBERNETES):
        return {
            camera.entry.name: camera.entry.priority for camera in self.table.managed() if camera.manager == manager
        }


__all__ = ["CLUSTER", "KUBERNETES", "QUESTION", "CameraCluster"]
