"""Server processes of the streams and ingest benches: a gateway, a decoder (with camera pipelines, or discarding
packets), and a replica whose model takes no time.

``python -m cluster.lab.bench.push_processes ROLE`` prints ``{"port": n}`` when ready, answers every line on stdin with
its resource usage, and exits when stdin closes, so that it cannot outlive the bench.
"""

import argparse
import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from cluster.codec.push import PushSource
from cluster.config import load_config
from cluster.config.camera import CameraEntry
from cluster.config.root import camera_settings
from cluster.decoder.decode_load import DecodeGate
from cluster.decoder.footage.ring import RingBudget
from cluster.decoder.frame_lanes import LostCamera
from cluster.decoder.frame_sender import FrameSender
from cluster.decoder.ingest import IngestServicer, QueueSink
from cluster.decoder.running_camera import RunningCamera
from cluster.gateway.ingest_proxy import IngestProxy
from cluster.lab.bench.codec import STAGES
from cluster.lab.bench.harness import timed_calls
from cluster.lab.bench.processes import serve
from cluster.metrics import AnsweredCameras
from cluster.types import PatchGeometry
from cluster.vision.pruners.replenish import Replenish
from cluster.vision.sampler import PatchSampler
from cluster.wire.answers import AnswerHub
from cluster.wire.channel import ChannelPool
from cluster.wire.server import RpcServer, push_message_bytes

MAX_PACKET_BYTES = 4 * 2**20
CREDIT = 256
"""Credit that a decoder grants: packets in flight."""
CONFIG: dict[str, Any] = {
    "questions": [{"id": "person", "text": "Is there a person in the scene?"}],
    "window": {"stride_s": 4.0},
    "memory": {"enabled": False},
}
INSIDE: list[tuple[str, type, str]] = [*STAGES, ("prune", Replenish, "prune"), ("cut", PatchSampler, "_unite")]


class Discard:
    """Accepts pushed cameras of any name, each with a thread that reads and discards packets like a decoder."""

    def __init__(self) -> None:
        self._sinks: dict[str, QueueSink] = {}
        self.packets = 0

    async def find(self, camera: str) -> QueueSink:
        if camera not in self._sinks:
            source = PushSource(max_packets=2 * CREDIT)
            self._sinks[camera] = QueueSink(source, max_credit=CREDIT)
            threading.Thread(target=self._discard_packets, args=(source,), daemon=True).start()
        return self._sinks[camera]

    def _discard_packets(self, source: PushSource) -> None:
        while True:
            source.open()
            for _ in source.packets():
                self.packets += 1


class Cameras:
    """Accepts pushed cameras of any name and runs each like a decoder process."""

    def __init__(self, replica: str, geometry: PatchGeometry) -> None:
        self._replica, self._geometry = replica, geometry
        self._config = load_config(None, CONFIG)
        self._sender = FrameSender(self._on_lost)
        self._rings = RingBudget(self._config.clips.ring_bytes)
        self._decode_gate = DecodeGate()
        self._cameras: dict[str, RunningCamera] = {}
        self._lost = 0

    async def find(self, camera: str) -> QueueSink:
        if camera not in self._cameras:
            settings = camera_settings(self._config, CameraEntry(name=camera))
            self._cameras[camera] = RunningCamera(
                settings, self._geometry, self._sender, self._config, self._rings, gate=self._decode_gate
            )
            self._cameras[camera].route(self._replica)
        sink = self._cameras[camera].sink
        assert sink is not None
        return sink

    def counts(self) -> dict[str, int]:
        statuses = [camera.pipeline_status for camera in self._cameras.values()]
        return {
            "pictures": sum(status.stats.frames_decoded for status in statuses),
            "lost": self._lost + sum(status.samples_dropped + status.stats.gaps for status in statuses),
        }

    def _on_lost(self, events: list[LostCamera]) -> None:
        self._lost += len(events)


async def _serve(args: argparse.Namespace) -> None:
    server = RpcServer(max_message_bytes=push_message_bytes(MAX_PACKET_BYTES))

    def serve_ingest(find: Callable[[str], Awaitable[QueueSink]]) -> None:
        server.add(IngestServicer(find, max_packet_bytes=MAX_PACKET_BYTES))

    async def find_decoder(_camera: str) -> str:
        return str(args.next)

    match args.role:
        case "replica":
            # Imported here so that the other roles run and are measured without torch.
            from cluster.engine.simulated import SimulatedEngine
            from cluster.models.loading import load_shape
            from cluster.replica.events import ReplicaEvents, WorkerFrames
            from cluster.replica.frames_service import FramesServicer
            from cluster.replica.memory import WorkerMemory
            from cluster.replica.thumbnails import ThumbnailStore
            from cluster.replica.worker import EngineWorker

            engine, seen = SimulatedEngine(load_shape("demo")), AnsweredCameras()
            worker = EngineWorker(engine, ReplicaEvents(AnswerHub(), seen))
            worker.start()
            server.add(
                FramesServicer(WorkerFrames(worker, WorkerMemory(worker, ThumbnailStore(), timeout_s=1.0), seen))
            )

            def windows() -> dict[str, int]:
                found = [worker.counts(camera) for camera in worker.open_streams()]
                return {"windows": sum(n.done + n.gated for n in found), "lost": sum(n.dropped for n in found)}

            await serve(server, {"geometry": asdict(engine.geometry)}, windows)
        case "gateway":
            server.add(IngestProxy(find_decoder, ChannelPool()))
            await serve(server, {})
        case "discard":
            discard = Discard()
            serve_ingest(discard.find)
            await serve(server, {}, lambda: {"packets": discard.packets})
        case "decoder":
            cameras = Cameras(args.next, PatchGeometry(**json.loads(args.geometry)))
            serve_ingest(cameras.find)
            with timed_calls(INSIDE) as seconds:
                await serve(server, {}, lambda: cameras.counts() | {"stages": dict(seconds)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["gateway", "decoder", "discard", "replica"])
    parser.add_argument("--next", help="gateway: address of the decoder; decoder: address of the replica")
    parser.add_argument("--geometry", help="decoder: the replica's patch geometry as JSON")
    asyncio.run(_serve(parser.parse_args()))
