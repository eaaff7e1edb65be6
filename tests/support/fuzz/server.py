"""The process that is fuzzed and attacked: the gateway's services and HTTP, and those behind it, without Ray and
without a model.
"""

import asyncio
import json
import logging
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from cluster.alerts.clips.footage_collector import FootageCollector
from cluster.alerts.clips.footage_store import FootageStore
from cluster.alerts.grpc_service import IncidentsServicer
from cluster.alerts.incident import Erased
from cluster.alerts.service import AlertService
from cluster.codec.push import PushSource
from cluster.config import SightlineConfig, camera_settings, load_config, parse_camera
from cluster.control.cameras.managed import ManagedCamera
from cluster.decoder.footage.service import DecoderRecorder
from cluster.decoder.ingest import IngestServicer, QueueSink
from cluster.errors import NotFoundError, UnauthenticatedError, UnavailableError, UnknownCameraError
from cluster.gateway import directory
from cluster.gateway import incidents_proxy as incidents
from cluster.gateway import pictures_proxy as pictures
from cluster.gateway.guard import Guard
from cluster.gateway.http.application import make_application
from cluster.gateway.http.calls import InProcessCalls
from cluster.gateway.http.live import Live
from cluster.gateway.http.server import HttpServer
from cluster.gateway.ingest_proxy import IngestProxy
from cluster.gateway.memory_proxy import MemoryProxy
from cluster.hosts import raise_file_limit
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.kv_wire import MAX_KV_MESSAGE_BYTES
from cluster.memory.tiers.server import KVServicer
from cluster.replica import frames_service as frames
from cluster.replica import memory_service as memory
from cluster.security.audit import AuditLog
from cluster.security.roles import Principal, Role
from cluster.types import (
    AskResult,
    AskSpec,
    CameraStatus,
    DeletedMemory,
    FrameSample,
    MemoryStatus,
    Moment,
    StreamSpec,
)
from cluster.types.reports import HandOverResult, ReplicaStatus, WindowCounters
from cluster.wire import answers as results
from cluster.wire.channel import ChannelPool
from cluster.wire.server import RpcServer, push_message_bytes
from cluster.wire.tls import TlsFiles

TOKEN = "sl_fuzz"  # of a server that runs for a test on this machine
CAMERAS = ("gate", "yard", "depot")
MOST_CAMERAS = 200


class Table:
    """The cameras, with the configuration's own checks; what the controller is to a gateway."""

    def __init__(self, config: SightlineConfig) -> None:
        self._config = config
        self._cameras = {name: CameraStatus(name) for name in CAMERAS}

    async def add_camera(self, managed: ManagedCamera, force: bool = False, takeover: bool = False) -> CameraStatus:
        """See ``Directory``; the oldest of too many is forgotten."""
        del force, takeover
        entry = managed.entry
        camera_settings(self._config, entry)
        self._cameras[entry.name] = CameraStatus(entry.name, source=str(entry.source))
        if len(self._cameras) > MOST_CAMERAS:
            del self._cameras[next(camera for camera in self._cameras if camera not in CAMERAS)]
        return self._cameras[entry.name]

    async def update_camera(self, managed: ManagedCamera, takeover: bool = False) -> CameraStatus:
        """See ``Directory``."""
        await self.get_camera(managed.entry.name)
        return await self.add_camera(managed, takeover=takeover)

    async def remove_camera(self, name: str, manager: str, takeover: bool = False) -> None:
        """See ``Directory``; those that other cases need stay."""
        del manager, takeover
        await self.get_camera(name)
        if name not in CAMERAS:
            del self._cameras[name]

    async def managed_cameras(self, names: Sequence[str] = ()) -> Sequence[ManagedCamera]:
        """See ``Directory``."""
        for name in names:
            await self.get_camera(name)
        return [ManagedCamera(entry=parse_camera(name), manager="cluster") for name in names or self._cameras]

    async def list_cameras(self) -> Sequence[CameraStatus]:
        """See ``Directory``."""
        return list(self._cameras.values())

    async def get_camera(self, name: str) -> CameraStatus:
        """See ``Directory``."""
        if name not in self._cameras:
            raise UnknownCameraError(f"there is no camera {name!r}")
        return self._cameras[name]

    async def list_replicas(self) -> Sequence[ReplicaStatus]:
        """See ``Directory``."""
        return [ReplicaStatus("replica-0", held=len(self._cameras))]

    async def decoder_numbers(self) -> None:
        """See ``Directory``."""

    async def drain_replica(self, name: str, undo: bool = False) -> ReplicaStatus:
        """See ``Directory``."""
        if name != "replica-0":
            raise NotFoundError(f"there is no replica {name!r}")
        return ReplicaStatus(name, draining=not undo)


class Remembering:
    """Answers any question in two words."""

    async def ask(self, ask: AskSpec) -> AsyncIterator[str | AskResult]:
        """See ``WorkerMemory``."""
        yield "Nobody "
        yield "came."
        moment = Moment(0, 8_000_000, 0.5)
        yield AskResult(ask.stream, "Nobody came.", (moment,), 0, 60_000_000, 40, 9, 2**10, 0.1, 0.2)

    async def delete_memory(self, camera: str, ago_s: float | None, *, only_here: bool = False) -> DeletedMemory:
        """See ``WorkerMemory``."""
        return DeletedMemory(len(camera), round(ago_s is None))

    async def describe(self, camera: str) -> MemoryStatus:
        """See ``WorkerMemory``."""
        return MemoryStatus(camera, 600, 4000, 0, 60_000_000, 2**26, {"recent": 2**10}, "a", "b", "c")

    async def replay_range(self, camera: str) -> memory.ReplayRange:
        """See ``WorkerMemory``."""
        return memory.ReplayRange(0, 60_000_000 + len(camera), 40.0, 8.0)

    async def pictures(self, camera: str, moments: Sequence[Moment]) -> list[bytes]:
        """See ``WorkerMemory``."""
        return [camera.encode()[:0] for _ in moments]


class Taking:
    """Takes frames of any camera, and counts something."""

    async def on_open(self, spec: StreamSpec) -> None:
        """See ``WorkerFrames``."""

    async def on_frame(self, sample: FrameSample, arrived_s: float) -> None:
        """See ``WorkerFrames``."""

    async def on_close(self, camera: str, flush: bool) -> None:
        """See ``WorkerFrames``."""

    async def on_hand_over(self, camera: str) -> HandOverResult:
        """See ``WorkerFrames``."""
        return HandOverResult(False, self.counters(camera))

    async def on_lost(self, cameras: list[str]) -> None:
        """See ``WorkerFrames``."""

    def counters(self, camera: str) -> WindowCounters:
        """See ``WorkerFrames``."""
        return WindowCounters(done=len(camera))


class Pushed:
    """One pushing camera of each known name, whose packets a thread takes."""

    def __init__(self) -> None:
        self._sinks: dict[str, QueueSink] = {}

    async def find(self, camera: str) -> QueueSink:
        """Raises ``UnknownCameraError``."""
        if camera not in CAMERAS:
            raise UnknownCameraError(f"there is no camera {camera!r}")
        if camera not in self._sinks:
            source = PushSource(max_packets=64)
            self._sinks[camera] = QueueSink(source, max_credit=32)
            threading.Thread(target=_take, args=(source,), daemon=True).start()
        return self._sinks[camera]


def _take(source: PushSource) -> None:
    while True:
        source.open()
        for _ in source.packets():
            pass


def _verify(secret: str) -> Principal:
    if secret != TOKEN:
        raise UnauthenticatedError("this token is not known here; ask for a new one")
    return Principal("fuzz", frozenset({Role.ADMIN}))


class Server:
    """Both servers of it, on the running loop; ``header_s``, ``tls``: of the ports that strangers reach."""

    def __init__(self, folder: Path, header_s: float, tls: TlsFiles | None) -> None:
        self._folder, self._header_s, self._tls = folder, header_s, tls
        self._config = load_config(None, {"questions": [{"id": "fence", "text": "Is anyone climbing the fence?"}]})
        self._inner_address = ""
        self._alerts = AlertService(self._config, folder)
        store = FootageStore(folder / "clips", max_bytes=2**20, retention_s=3600.0, keep_free=0)
        self._footage = FootageCollector(
            self._config.clips,
            store,
            DecoderRecorder(_no_decoder, ChannelPool()),
            self._alerts.set_clip_state,
            known=folder / "known.json",
            run="",
            erase=_no_records,
        )
        self._arena = Arena(2**24)
        self._hub = results.AnswerHub(limit=64)
        # Servers end when nobody refers to them any more.
        self._running: list[Any] = []

    async def start(self) -> dict[str, str]:
        """Addresses: ``gateway`` and ``inner`` of gRPC, ``http``."""
        await self._alerts.start()
        inner = RpcServer(max_message_bytes=MAX_KV_MESSAGE_BYTES)
        inner.add(
            memory.MemoryServicer(Remembering()),
            frames.FramesServicer(Taking(), credit=8),
            IngestServicer(Pushed().find, max_packet_bytes=2**19),
            KVServicer(self._arena, fingerprint="fuzz"),
            IncidentsServicer(self._alerts),
            pictures.FootageServicer(self._footage, _no_incident, _no_records),
        )
        self._inner_address = f"127.0.0.1:{inner.bind('127.0.0.1', 0)}"
        await inner.start()
        guard = Guard(_verify, audit=AuditLog(self._folder / "audit.jsonl"))
        limits = self._config.gateway
        raise_file_limit(1024 + 2 * limits.max_connections)
        outer = RpcServer(
            max_message_bytes=push_message_bytes(limits.max_packet_bytes),
            guard=guard,
            tls=self._tls,
            max_connections=limits.max_connections,
        )
        self._table, channels = Table(self._config), ChannelPool()
        outer.add(
            IngestProxy(self._where, channels),
            directory.CamerasServicer(self._table),
            directory.ReplicasServicer(self._table),
            results.ResultsServicer(self._hub),
            MemoryProxy(self._where, channels),
            incidents.IncidentsProxy(self._inside, channels),
            pictures.PicturesProxy(
                self._no_decoder, self._inside, channels, tested=self._no_decoder, any_decoder=self._nobody
            ),
        )
        port = outer.bind("127.0.0.1", 0)
        await outer.start()
        live = Live(self._table, self._hub, InProcessCalls(outer.services))
        application = make_application(outer.services, live, CollectorRegistry(), guard=guard)
        http = HttpServer(application, max_connections=limits.max_connections, header_s=self._header_s, tls=self._tls)
        address = await http.start("127.0.0.1", 0)
        live.start()
        self._running = [inner, outer, http, live]
        return {"gateway": f"127.0.0.1:{port}", "inner": self._inner_address, "http": address}

    async def _inside(self) -> str:
        return self._inner_address

    async def _where(self, camera: str) -> str:
        await self._table.get_camera(camera)
        return self._inner_address

    async def _nobody(self) -> str:
        raise UnavailableError("nobody decodes here")

    async def _no_decoder(self, camera: str) -> str:
        raise UnknownCameraError(f"nobody decodes camera {camera!r} here")


async def _no_records(camera: str, before_s: float) -> Erased:
    return Erased()


async def _no_decoder(camera: str) -> str:
    raise UnknownCameraError(f"there is no camera {camera!r}")


async def _no_incident(incident: str) -> tuple[str, str]:
    raise NotFoundError(f"there is no incident {incident!r}")


async def serve(
    log: Path,
    tell: Callable[[dict[str, str]], None],
    wait: Callable[[], object],
    *,
    header_s: float = 30.0,
    tls: TlsFiles | None = None,
) -> None:
    """All of a process: ``tell`` gets the addresses, and it ends when ``wait``, on a thread, does."""
    logging.basicConfig(filename=log, level=logging.ERROR)
    asyncio.get_running_loop().set_exception_handler(_unhandled)
    with tempfile.TemporaryDirectory(prefix="sightline-fuzz-") as folder:
        server = Server(Path(folder), header_s, tls)
        tell(await server.start())
        await asyncio.to_thread(wait)


def _unhandled(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    logging.getLogger("asyncio").error("%s", context.get("message"), exc_info=context.get("exception"))


if __name__ == "__main__":
    asyncio.run(
        serve(Path(sys.argv[1]), lambda found: print(json.dumps(found), flush=True), sys.stdin.readline, header_s=5.0)
    )
