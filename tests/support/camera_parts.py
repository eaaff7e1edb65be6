"""One camera as a decoder process runs it, fed packet by packet, and a replica that keeps what it is told."""

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loop_thread import EventLoopThread
from sightline.v1 import ingest_pb2
from waiting import until

from cluster.codec import FileSource
from cluster.codec.supervisor import Backoff
from cluster.config import CameraEntry, SightlineConfig, camera_settings, load_config
from cluster.decoder.footage.ring import RingBudget
from cluster.decoder.frame_lanes import LostCamera
from cluster.decoder.frame_sender import FrameSender
from cluster.decoder.running_camera import RunningCamera
from cluster.replica.events import WorkerFrames
from cluster.replica.frames_service import FramesServicer
from cluster.tracing import Spans
from cluster.types import FrameSample, PatchGeometry, StreamSpec
from cluster.types.reports import WindowCounters
from cluster.wire.convert import packet_to_proto
from cluster.wire.server import RpcServer

WAIT_S = 20.0
GEOMETRY = PatchGeometry(patch=14, merge=2, temporal=2)
SETTINGS = {
    "window": {"length_s": 4, "stride_s": 2, "refresh_budget": 0.5},
    "sampling": {"anchor_interval_s": 4},
    "questions": [{"id": "person", "text": "Is there a person?"}],
    # Of what is traced at all: nothing without spans.
    "tracing": {"ratio": 1},
    "security": {"file_roots": [tempfile.gettempdir()]},
}


class Keeper:
    """A replica's end that keeps specifications and frames, and settles a window for every two frames since the camera
    was opened."""

    def __init__(self) -> None:
        self.specs: list[StreamSpec] = []
        self.frames: list[FrameSample] = []
        self.told: list[StreamSpec | FrameSample] = []
        self.closed: list[bool] = []
        self._opened = 0

    async def on_open(self, spec: StreamSpec) -> None:
        self.specs.append(spec)
        self.told.append(spec)

    async def on_frame(self, sample: FrameSample, arrived_s: float) -> None:
        self.frames.append(sample)
        self.told.append(sample)

    async def on_close(self, camera: str, flush: bool) -> None:
        self.closed.append(flush)
        self._opened = len(self.frames)

    async def on_lost(self, cameras: list[str]) -> None:
        pass

    def counters(self, camera: str) -> WindowCounters:
        done = (len(self.frames) - self._opened) // 2
        return WindowCounters(done, closed=done, end=self.frames[self._opened + 2 * done - 1].end if done else None)


class Bench:
    """A camera ``gate``, its sender and replicas, all in this process."""

    def __init__(
        self, loop: EventLoopThread, clip: Path, settings: dict[str, object], spans: Spans | None = None
    ) -> None:
        self.loop = loop
        self._lost: list[LostCamera] = []
        self._servers: list[RpcServer] = []
        self.config: SightlineConfig = load_config(None, SETTINGS)
        self.sender = loop.run(self._sender(), WAIT_S)
        entry = CameraEntry.model_validate({"name": "gate", **settings})
        self.rings = RingBudget(self.config.clips.ring_bytes)
        self.camera = RunningCamera(
            camera_settings(self.config, entry), GEOMETRY, self.sender, self.config, self.rings, spans
        )
        source = FileSource(clip)
        self._header = source.open()
        self._packets = list(source.packets())
        self._sequence = 0
        if self.camera.sink is not None:
            loop.run(self.camera.sink.open(self._header, "session"), WAIT_S)

    async def _sender(self) -> FrameSender:
        return FrameSender(self._on_lost, backoff=Backoff(first_s=0.02, longest_s=0.05))

    def _on_lost(self, events: list[LostCamera]) -> None:
        self._lost += events
        for event in events:
            self.camera.on_lost(event)

    def replica(self, handler: WorkerFrames, port: int = 0) -> str:
        """Its address."""
        return self.loop.run(self._serve(handler, port), WAIT_S)

    async def _serve(self, handler: WorkerFrames, port: int) -> str:
        server = RpcServer()
        servicer = FramesServicer(handler, credit=16)
        server.add(servicer)
        if hasattr(handler, "settled"):
            handler.settled = lambda camera: self.loop.loop.call_soon_threadsafe(servicer.acknowledge, camera)
        port = server.bind("127.0.0.1", port)
        await server.start()
        self._servers.append(server)
        return f"127.0.0.1:{port}"

    def push(self, seconds: float) -> None:
        """The next seconds of the clip, as fast as they go; over and over, the clock running on."""
        rate = 300 / 24
        for _ in range(round(seconds * rate)):
            number, lap = self._sequence % len(self._packets), self._sequence // len(self._packets)
            packet = packet_to_proto(self._packets[number])
            packet.sequence = self._sequence
            packet.pts += lap * 24_000_000
            packet.dts += lap * 24_000_000
            self._sequence += 1
            assert self.camera.sink is not None
            self.loop.run(self.camera.sink.offer(ingest_pb2.PacketBatch(packets=[packet])), WAIT_S)
            until(lambda: self.camera._source.queued < 100, "room")
        until(lambda: self.camera._source.queued == 0, "everything decoded")

    def skip(self, seconds: float) -> None:
        """The next seconds of the clip are lost on the way."""
        self._sequence += round(seconds * 300 / 24)

    def reopen(self) -> None:
        """The camera's agent connects to another decoder."""
        assert self.camera.sink is not None
        self.loop.run(self.camera.sink.open(self._header, "session"), WAIT_S)

    def end(self) -> None:
        assert self.camera.stop(WAIT_S)
        self.loop.run(self._end(), WAIT_S)

    async def _end(self) -> None:
        await self.sender.stop(0.1)
        await asyncio.gather(*(server.stop(0.0) for server in self._servers))


@contextmanager
def camera_bench(clip: Path, *, spans: Spans | None = None, **settings: object) -> Iterator[Bench]:
    with EventLoopThread() as loop:
        bench = Bench(loop, clip, settings, spans)
        try:
            yield bench
        finally:
            bench.end()
