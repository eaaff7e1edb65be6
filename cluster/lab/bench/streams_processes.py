"""The processes of the streams bench: gateway, decoder with its cameras' pipelines, replica whose model takes no time.

``python -m cluster.lab.bench.streams_processes ROLE`` prints ``{"port": n}`` once it serves, answers every line on its
standard input with what it has used so far, and ends when that is closed: it cannot outlive the bench.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict

from sightline.v1 import frames_pb2_grpc, ingest_pb2_grpc

from cluster.codec.push import PushSource
from cluster.decoder.footage.camera import CameraFootage
from cluster.decoder.footage.ring import PacketRing, RingBudget
from cluster.decoder.frame_lanes import LostCamera
from cluster.decoder.frame_sender import FrameSender
from cluster.decoder.packet_sink import QueueSink
from cluster.decoder.pipeline import CameraPipeline, PipelineSettings, make_decode_gate
from cluster.errors import CapacityError
from cluster.lab.bench.codec import STAGES, instrumented
from cluster.lab.bench.ingest_processes import Forward
from cluster.lab.bench.processes import serve
from cluster.replica import frames_service as frames
from cluster.replica.frames_service import HandedOver, WindowCounters
from cluster.replica.worker import EngineWorker
from cluster.types import Answer, FrameSample, PatchGeometry, Question, StreamSpec
from cluster.vision.pruners.replenish import Replenish
from cluster.vision.sampler import PatchSampler
from cluster.wire import ingest
from cluster.wire.ingest import PacketSink
from cluster.wire.server import RpcServer

RING_S, RING_BYTES = 60.0, 8 * 2**20
QUESTION = Question("person", "Is there a person in the scene?")
INSIDE: list[tuple[str, type, str]] = [*STAGES, ("prune", Replenish, "prune"), ("cut", PatchSampler, "_unite")]


class Cameras:
    """Push cameras under any name, each with what a decoder process runs for one."""

    def __init__(self, replica: str, geometry: PatchGeometry, stride_s: float) -> None:
        self._replica, self._geometry, self._stride_s = replica, geometry, stride_s
        self._sender = FrameSender(self._on_lost)
        self._rings = RingBudget(2**30)
        self._turns = make_decode_gate()
        self._sinks: dict[str, QueueSink] = {}
        self._pipelines: list[CameraPipeline] = []
        self.lost = 0

    async def find(self, camera: str) -> PacketSink:
        if camera not in self._sinks:
            source = PushSource()
            footage = CameraFootage(PacketRing(RING_S, RING_BYTES, self._rings))
            pipeline = CameraPipeline(
                camera,
                footage.tap(source),
                self._geometry,
                PipelineSettings(),
                self._send,
                None,
                footage.latest.show,
                self._turns,
            )
            self._sinks[camera] = QueueSink(source)
            self._sender.assign(StreamSpec(camera, (QUESTION,), stride_s=self._stride_s), self._replica)
            self._pipelines.append(pipeline)
            pipeline.start()
        return self._sinks[camera]

    def counts(self) -> dict[str, int]:
        statuses = [pipeline.status() for pipeline in self._pipelines]
        return {
            "pictures": sum(status.frames_decoded for status in statuses),
            "frames": sum(status.samples_out for status in statuses),
            "lost": self.lost + sum(status.samples_dropped + status.gaps for status in statuses),
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
        from cluster.engine.simulated import SimulatedEngine, ZeroStepCosts
        from cluster.models.loading import load_shape

        engine = SimulatedEngine(load_shape("demo"), ZeroStepCosts())
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
        counts = self.worker.counts(camera)
        return WindowCounters(counts.done, counts.gated, counts.dropped)

    def answered(self, answers: Sequence[Answer], *, late: bool) -> None:  # noqa: ARG002
        self.windows += 1

    def batch(self, windows: int) -> None:
        """Counted one by one."""

    def dropped(self, stream: str, reason: str, windows: int) -> None:  # noqa: ARG002
        self.lost_windows += windows

    def lost(self, stream: str, windows: int) -> None:  # noqa: ARG002
        self.lost_windows += windows


def main() -> None:
    """One role until standard input is closed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["gateway", "decoder", "replica"])
    parser.add_argument("--next", help="gateway: address of the decoder; decoder: of the replica")
    parser.add_argument("--geometry", help="decoder: the replica's, as JSON")
    parser.add_argument("--stride", type=float, default=4.0, help="decoder: seconds between two windows")
    args = parser.parse_args()

    async def run() -> None:
        server = RpcServer()
        if args.role == "replica":
            windows = Windows()
            server.add(frames.SERVICE, frames_pb2_grpc.add_FramesServicer_to_server, frames.FramesServicer(windows))
            await serve(server, {"geometry": asdict(windows.geometry)}, windows.counts)
        elif args.role == "gateway":
            forward = Forward(args.next)
            server.add(
                ingest.SERVICE,
                ingest_pb2_grpc.add_IngestServicer_to_server,
                ingest.IngestServicer(forward.find, idle_reply_s=2.0),
            )
            await serve(server, {})
        else:
            cameras = Cameras(args.next, PatchGeometry(**json.loads(args.geometry)), args.stride)
            servicer = ingest.IngestServicer(cameras.find)
            server.add(ingest.SERVICE, ingest_pb2_grpc.add_IngestServicer_to_server, servicer)
            with instrumented(INSIDE) as seconds:
                await serve(server, {}, lambda: cameras.counts() | {"stages": dict(seconds)})

    asyncio.run(run())


if __name__ == "__main__":
    main()
