"""A gateway without Ray whose door is guarded."""

import contextlib
from pathlib import Path

from actors import gateway
from cluster.config import CameraEntry, load_config
from cluster.control.camera_record import Route
from cluster.control.cameras.managed import ManagedCamera
from cluster.errors import UnavailableError, UnknownCameraError
from cluster.security.roles import Role
from cluster.security.sessions import Sessions
from cluster.security.tokens import make_token, write_tokens
from cluster.types import CameraStatus
from cluster.types.reports import ReplicaStatus


class Directory:
    """What the controller says: three cameras, at one replica."""

    NAMES = ("gate", "yard", "depot")

    def __init__(self) -> None:
        self.address: str | None = None
        self.added: list[str] = []
        self.sessions = Sessions()
        self.controller = self

    async def where(self, name):
        if name not in self.NAMES:
            raise UnknownCameraError(f"there is no camera {name!r}")
        return Route(None, None, None, self.address)

    # No test asks for it.
    any_decoder = where

    async def list_cameras(self):
        return [CameraStatus(name) for name in self.NAMES]

    async def get_camera(self, name):
        await self.where(name)
        return CameraStatus(name)

    async def alerting(self):
        raise UnavailableError("not asked in this test")

    async def add_camera(self, managed, force=False, takeover=False):
        self.added.append(managed.entry.name)
        return CameraStatus(managed.entry.name)

    async def update_camera(self, managed, takeover=False):
        return CameraStatus(managed.entry.name)

    async def remove_camera(self, name, manager, takeover=False):
        self.added.remove(name)

    async def tested_source(self, entry):
        raise UnavailableError("no decoder is ready yet; try again in a moment")

    async def managed_cameras(self, names=()):
        return [ManagedCamera(entry=CameraEntry(name=name)) for name in names or self.NAMES]

    async def list_replicas(self):
        return [ReplicaStatus("replica-0", held=3)]

    async def decoder_numbers(self):
        return None

    async def drain_replica(self, name, undo):
        return ReplicaStatus(name, draining=not undo)

    async def replicas(self, known, timeout_s):
        if timeout_s:
            raise UnavailableError("not asked in this test")
        return {}

    async def metrics_addresses(self):
        return {}

    async def gateways(self, but):
        return {}


@contextlib.asynccontextmanager
async def guarded_gateway(monkeypatch, folder: Path, **security):
    """``(gateway, its addresses, directory, secrets by role)``; each secret is for cameras ``gate`` and ``y*``."""
    directory = Directory()
    monkeypatch.setattr(gateway, "ControllerDirectory", lambda: directory)
    monkeypatch.setattr("actors.startup.configure_logging", lambda *_, **__: None)
    made = {role: make_token(f"{role}-token", [role], ["gate", "y*"]) for role in Role}
    write_tokens(folder / "tokens.json", [token for _, token in made.values()])
    security = {
        "tokens_file": str(folder / "tokens.json"),
        "audit_log": str(folder / "audit.jsonl"),
        "calls_burst": 1000,
        **security,
    }
    settings = {"gateway": {"port": 0, "http_port": 0}, "alerts": {"enabled": False}, "security": security}
    running = gateway.Gateway(load_config(None, settings))
    try:
        yield running, await running.ready(), directory, {role: secret for role, (secret, _) in made.items()}
    finally:
        await running.stop()
