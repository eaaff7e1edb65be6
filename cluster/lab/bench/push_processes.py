"""Processes behind the pushed cameras of the streams and ingest benches: a gateway, a decoder with its cameras'
pipelines or one that throws packets away, a replica whose model takes no time.

``python -m cluster.lab.bench.push_processes ROLE`` prints ``{"port": n}`` once it serves, answers every line on its
standard input with what it has used so far, and ends when that is closed: it cannot outlive the bench.
"""

import argparse
import asyncio
import json
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict

from cluster.codec.push import PushSource
from cluster.decoder.decode_load import DecodeGate
from cluster.decoder.footage.camera import CameraFootage
from cluster.decoder.footage.ring import PacketRing, RingBudget
from cluster.decoder.frame_lanes import LostCamera
from cluster.decoder.frame_sender import FrameSender
from cluster.decoder.packet_sink import QueueSink
from cluster.decoder.pipeline import CameraPipeline, PipelineSettings
from cluster.errors import CapacityError
from cluster.gateway.ingest_proxy import ProxySink
from cluster.lab.bench.codec import STAGES
from cluster.lab.bench.harness import timed_calls
from cluster.lab.bench.processes import serve
from cluster.replica.frames_service import FramesServicer
from cluster.replica.worker import EngineWorker
from cluster.types import Answer, FrameSample, PatchGeometry, Question, StreamSpec
from cluster.types.reports import HandedOver, WindowCounters
from cluster.vision.pruners.replenish import Replenish
from cluster.vision.sampler import PatchSampler
from cluster.wire.channel import ChannelPool
from cluster.wire.ingest import GATEWAY_IDLE_REPLY_S, IngestServicer, PacketSink
from cluster.wire.server import RpcServer, push_message_bytes

RING_S, RING_BYTES = 60.0, 8 * 2**20
MAX_PACKET_BYTES = 4 * 2**20
CREDIT = 256
"""Packets in flight that a decoder grants."""
STRIDE_S = 4.0
QUESTION = Question("person", "Is there a person in the scene?")
INSIDE: list[tuple[str, type, str]] = [*STAGES, ("prune", Replenish, "prune"), ("cut", PatchSampler, "_unite")]


class Discard:
    """Push cameras under any name, each with a thread that takes its packets as a decoder would."""

    def __init__(self) -> None:
        self._sinks: dict[str, QueueSink] = {}
        self.packets = 0

    async def find(self, camera: str) -> PacketSink:
        if camera not in self._sinks:
            source = PushSource(max_packets=2 * CREDIT)
            self._sinks[camera] = QueueSink(source, max_credit=CREDIT)
            threading.Thread(target=self._take, args=(source,), daemon=True).start()
        return self._sinks[camera]

    def _take(self, source: PushSource) -> None:
        while True:
            source.open()
            for _ in source.packets():
                self.packets += 1


class Forward:
    """Every camera belongs to the one decoder."""

    def __init__(self, decoder: str) -> None:
        self._decoder = decoder
        self._channels = ChannelPool()

    async def find(self, camera: str) -> PacketSink:
        return ProxySink(camera, self._route, self._channels)

    async def _route(self, camera: str) -> str:  # noqa: ARG002
        return self._decoder


class Cameras:
    """Push cameras under any name, each with what a decoder process runs for one."""

    def __init__(self, replica: str, geometry: PatchGeometry) -> None:
        self._replica, self._geometry = replica, geometry
        self._sender = FrameSender(self._on_lost)
        self._rings = RingBudget(2**30)
        self._decode_gate = DecodeGate()
        self._sinks: dict[str, QueueSink] = {}
        self._pipelines: list[CameraPipeline] = []
        self.lost = 0

    async def find(self, camera: str) -> PacketSink:
        if camera not in self._sinks:
            source = PushSource()
            footage = CameraFootage(PacketRing(RING_S, RING_BYTES, self._rings))
            pipeline = CameraPipeline(
                camera,
                source,
                self._geometry,
                PipelineSettings(),
                self._send,
                None,
                footage,
                self._decode_gate,
            )
            self._sinks[camera] = QueueSink(source)
            self._sender.assign(StreamSpec(camera, (QUESTION,), stride_s=STRIDE_S), self._replica)
            self._pipelines.append(pipeline)
            pipeline.start()
        return self._sinks[camera]

    def counts(self) -> dict[str, int]:
        statuses = [pipeline.status() for pipeline in self._pipelines]
        return {
            "pictures": sum(status.stats.frames_decoded for status in statuses),
            "frames": sum(status.samples_out for status in statuses),
            "lost": self.lost + sum(status.samples_dropped + status.stats.gaps for status in statuses),
        }

    def _send(self, sample: FrameSample) -> None:
        if not self._sender.send(sample):
            raise CapacityError("the replica is slow")

    def _on_lost(self, events: list[LostCamera]) -> None:
        self.lost += len(events)


class Windows:
    """Frames into the engine's thread, windows counted (``FrameHandler`` and ``WorkerEvents``)."""

    def __init__(self) -> None:
        # The other roles are to start without them.
        from cluster.engine.simulated import SimulatedEngine
        from cluster.models.loading import load_shape

        engine = SimulatedEngine(load_shape("demo"))
        self.geometry = engine.geometry
        self.worker = EngineWorker(engine, self)
        self.worker.start()
        self.windows = self.lost_windows = 0

    def counts(self) -> dict[str, int]:
        return {"windows": self.windows, "lost": self.lost_windows}

    async def on_open(self, spec: StreamSpec) -> None:
        await asyncio.wrap_future(self.worker.open(spec))

    async def on_frame(self, sample: FrameSample, arrived_s: float) -> None:
        await asyncio.wrap_future(self.worker.offer(sample, arrived_s))

    async def on_close(self, camera: str, flush: bool) -> None:
        self.worker.close(camera, flush=flush)

    async def on_hand_over(self, camera: str) -> HandedOver:
        return HandedOver(False, self.counters(camera))

    async def on_lost(self, cameras: list[str]) -> None:
        """The bench ends."""

    def counters(self, camera: str) -> WindowCounters:
        return self.worker.counts(camera)

    def answered(self, answers: Sequence[Answer], *, late: bool) -> None:  # noqa: ARG002
        self.windows += 1

    def batch(self, windows: int) -> None:
        """Counted one by one."""

    def dropped(self, stream: str, reason: str, windows: int) -> None:  # noqa: ARG002
        self.lost_windows += windows

    def lost(self, stream: str, windows: int) -> None:  # noqa: ARG002
        self.lost_windows += windows


async def _serve(args: argparse.Namespace) -> None:
    server = RpcServer(max_message_bytes=push_message_bytes(MAX_PACKET_BYTES))

    def take_pushes(find: Callable[[str], Awaitable[PacketSink]], idle_reply_s: float = 0.0) -> None:
        server.add(IngestServicer(find, max_packet_bytes=MAX_PACKET_BYTES, idle_reply_s=idle_reply_s))

    match args.role:
        case "replica":
            windows = Windows()
            server.add(FramesServicer(windows))
            await serve(server, {"geometry": asdict(windows.geometry)}, windows.counts)
        case "gateway":
            take_pushes(Forward(args.next).find, GATEWAY_IDLE_REPLY_S)
            await serve(server, {})
        case "discard":
            discard = Discard()
            take_pushes(discard.find)
            await serve(server, {}, lambda: {"packets": discard.packets})
        case "decoder":
            cameras = Cameras(args.next, PatchGeometry(**json.loads(args.geometry)))
            take_pushes(cameras.find)
            with timed_calls(INSIDE) as seconds:
                await serve(server, {}, lambda: cameras.counts() | {"stages": dict(seconds)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["gateway", "decoder", "discard", "replica"])
    parser.add_argument("--next", help="gateway: address of the decoder; decoder: of the replica")
    parser.add_argument("--geometry", help="decoder: the replica's, as JSON")
    parser.add_argument("--cores", help="cores to keep to, as in 0 or 0,1")
    options = parser.parse_args()
    if options.cores:
        os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
    asyncio.run(_serve(options))
