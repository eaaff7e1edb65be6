"""A gateway with nothing behind it, which answers a window for every stride of packets: real sockets, no Ray."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field

import rpc_serving
from sightline.v1.ingest_pb2 import PushReply

from cluster.config import load_config
from cluster.decoder.ingest import IngestServicer
from cluster.errors import UnknownCameraError
from cluster.gateway import directory
from cluster.types import Answer, CameraStatus, EncodedPacket, Timing, TokenCount
from cluster.types.reports import ReplicaStatus
from cluster.wire import answers as results
from loadtest.footage import Footage, Gop, StreamHeader
from loadtest.profile import Profile
from loadtest.target import Target

STRIDE_S = 0.25
TOKENS = TokenCount(full=100, kept=40, reused=20, refreshed=5, new=15, query=10, encoded=15)


def profile(**changes) -> Profile:
    quick = {"streams": 4, "fps": 20, "ramp_s": 0.0, "warmup_s": 0.3, "measure_s": 0.75, "mix": {"busy": 1.0}}
    return Profile(**quick | changes)


def footage(fps: float = 20.0, name: str = "busy", gop: int = 10) -> Footage:
    """Two GOPs of packets that nobody decodes."""
    step = round(1e6 / fps)
    gops = tuple(
        Gop(
            tuple(
                EncodedPacket("h264", bytes([number, index]) * 20, index * step, index * step, index == 0, index)
                for index in range(gop)
            ),
            gop * step,
        )
        for number in range(2)
    )
    return Footage(name, StreamHeader("h264", 64, 64, b""), gops)


def config(stride_s=STRIDE_S, **cluster):
    return load_config(
        None,
        {
            "window": {"length_s": 1.0, "stride_s": stride_s},
            "sampling": {"anchor_interval_s": 0.5},
            "questions": [{"id": "person", "text": "Is there a person?"}],
            "cluster": {"heartbeat_s": 0.35, **cluster},
        },
    )


@dataclass
class ToyCamera:
    """``packets``: sequence numbers as they came; ``pts`` of the newest."""

    name: str
    cluster: ToyCluster
    packets: list[int] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)
    next: int = 0
    end: int | None = None
    window: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    # -- as a QueueSink
    def now(self):
        return PushReply(next_sequence=self.next, credit=64)

    async def open(self, header, session):
        if session not in self.sessions:
            self.next = 0
        self.sessions.append(session)
        return self.now()

    async def offer(self, batch):
        stride = round(self.cluster.stride_s * 1e6)
        for packet in batch.packets:
            if packet.sequence < self.next:
                continue
            self.next = packet.sequence + 1
            self.packets.append(packet.sequence)
            if self.end is None:
                self.end = packet.pts + stride
            while packet.pts >= self.end:
                self.cluster.close(self, self.end)
                self.end += stride
                self.window += 1
        self.news.set()

    async def progress(self):
        await self.news.wait()
        self.news.clear()
        return self.now()

    async def end_(self):
        return self.now()


class ToyCluster:
    """``fate(camera, window)``: answer it (a delay in seconds), ``"drop"`` and count it, or ``"lose"`` it silently."""

    def __init__(self, fate=lambda camera, window: 0.0, *, stride_s=STRIDE_S):
        self.fate, self.stride_s = fate, stride_s
        self.cameras: dict[str, ToyCamera] = {}
        self.added: list[str] = []
        self.entries = {}
        self.hub = results.AnswerHub(limit=1000)
        self.gated = False
        self._tasks = set()

    def close(self, camera: ToyCamera, end: int) -> None:
        fate = self.fate(camera.name, camera.window)
        if fate == "drop":
            camera.counts["windows_dropped"] += 1
        elif fate != "lose":
            task = asyncio.ensure_future(self._answer(camera, camera.window, end, fate))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, camera, window, end, delay_s):
        await asyncio.sleep(delay_s)
        camera.counts["windows_gated" if self.gated else "windows_done"] += 1
        start = max(0, end - 1_000_000)
        answer = Answer(
            camera.name, window, start, end, "person", 0.7, True, "toy", self.gated, TOKENS, Timing(latency_s=0.01)
        )
        self.hub.publish([answer])

    # -- a Directory: cameras
    async def add_camera(self, managed, force=False, takeover=False):
        name = managed.entry.name
        self.cameras[name] = ToyCamera(name, self)
        self.added.append(name)
        self.entries[name] = managed.entry
        return await self.get_camera(name)

    async def remove_camera(self, name, manager, takeover=False):
        self._known(name)
        del self.cameras[name]

    async def list_cameras(self):
        return [await self.get_camera(name) for name in sorted(self.cameras)]

    async def get_camera(self, name):
        return CameraStatus(name, decoder="decoder-0", replica="replica-0", **self._known(name).counts)

    async def sink(self, name):
        return _Sink(self._known(name))

    def _known(self, name):
        if name not in self.cameras:
            raise UnknownCameraError(f"no camera is called {name!r}")
        return self.cameras[name]

    # -- a Directory: replicas
    async def list_replicas(self):
        return [ReplicaStatus(f"replica-{number}") for number in range(3)]

    async def decoder_numbers(self):
        return None

    @contextlib.asynccontextmanager
    async def serving(self, port=0):
        """Yields the gateway's address."""
        servicers = [IngestServicer(self.sink), results.ResultsServicer(self.hub)]
        servicers += [directory.CamerasServicer(self), directory.ReplicasServicer(self)]
        async with rpc_serving.serving(*servicers, port=port) as address:
            try:
                yield address
            finally:
                self.hub.close()
        await rpc_serving.collect_servers()

    @contextlib.asynccontextmanager
    async def target(self, *, own=True, processes=dict, **cluster):
        async with self.serving() as address:
            yield Target(
                gateway=address, metrics=None, config=config(self.stride_s, **cluster), processes=processes, own=own
            )


class _Sink:
    """A camera's sink; the camera outlives its connections."""

    def __init__(self, camera):
        self._camera = camera

    def __getattr__(self, name):
        return getattr(self._camera, {"end": "end_"}.get(name, name))
