"""A question to many cameras' memories, and how old a live view's picture is in a real browser.

``ask_all``: one replica's engine, worker, memory and gRPC, and the gateway's fan-out before it, in this process; the
cameras are synthetic and their memories real. ``live``: a camera encoded in real time whose pictures say when they were
taken, through the decoder's packet ring, remuxer and gateway HTTP, read back from the frames that Chromium shows.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from console_bench import browser
from console_city import City
from console_gateway import ConsoleGateway
from live_camera import FPS, READ, LiveCamera
from rpc_serving import serving_in_thread
from waiting import until

from cluster.client import GatewayClient
from cluster.engine.native import NativeEngine
from cluster.errors import ConfigError
from cluster.gateway.memory_proxy import MemoryProxy
from cluster.lab.bench.harness import BenchResult, run_parts
from cluster.lab.bench.soak import SyntheticCamera
from cluster.memory.bank import MemoryBank
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.models.loading import load_model
from cluster.replica.memory import WorkerMemory
from cluster.replica.memory_service import MemoryServicer
from cluster.replica.thumbnails import ThumbnailStore
from cluster.replica.worker import EngineWorker
from cluster.types import CameraStatus, MemorySpec, Question, StreamSpec
from cluster.wire.channel import ChannelPool
from cluster.wire.memory_wire import CameraOutcome

QUESTION = "Is there a person?"
GOALS = {"ask_all_s": ("<=", 5.0), "live_view_latency_s": ("<=", 1.0)}
WIDTH, HEIGHT = 308, 168
MIB = 2**20
WAIT_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes of both parts."""
    parser.add_argument("--cameras", type=int, default=100, help="memories that are asked")
    parser.add_argument("--frames", type=int, default=32, help="frames that each has seen")
    parser.add_argument("--model", default="demo", help="bundled model or preset")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the live view")
    parser.add_argument("--browser", help="Chromium's command (default: the first that is found)")
    parser.add_argument("--only", choices=("ask_all", "live"), help="one part (default: both)")


def run(args: argparse.Namespace) -> BenchResult:
    """Figures: ``ask_all_s`` (seconds to the first camera's answer), ``ask_all_whole_s`` (to the last),
    ``live_view_latency_s`` (median from before a picture is encoded to the frame that shows it), its 95 %.

    Raises:
        ConfigError: nothing to measure, or no browser.
    """
    if args.cameras < 1 or args.frames < 16 or args.seconds <= 0:
        raise ConfigError("--cameras must be at least 1, --frames at least 16, --seconds above 0")
    parts = {"ask_all": lambda: ask_all(args), "live": lambda: live(args)}
    return run_parts({n: p for n, p in parts.items() if args.only in (None, n)}, GOALS)


def ask_all(args: argparse.Namespace) -> BenchResult:
    """Every camera has its own window and memory in one engine; the question is asked as by any client."""
    names = [f"cam-{number:03d}" for number in range(args.cameras)]
    model = load_model(args.model)
    bank = MemoryBank(TierStack([Arena(512 * MIB)]))
    worker = EngineWorker(NativeEngine(model, memories=bank, max_new_tokens=4), Silent())
    worker.start()
    try:
        held = [watch(worker, bank, name, model.geometry, args.frames) for name in names]
        servicer = MemoryServicer(WorkerMemory(worker, ThumbnailStore(), bank, timeout_s=WAIT_S))
        with serving_in_thread(servicer) as behind, serving_in_thread(proxy(behind, names)) as address:
            first_s, whole_s, answered = asked(address)
    finally:
        worker.stop(WAIT_S)
    row = {"cameras": args.cameras, "answered": answered, "first_s": first_s, "all_s": whole_s, "tokens": sum(held)}
    figures = {"ask_all_s": first_s, "ask_all_whole_s": whole_s, "ask_all_unanswered": args.cameras - answered}
    return BenchResult(figures, [row], [f"model {args.model}, one engine on the CPU for all cameras"])


def watch(worker: EngineWorker, bank: MemoryBank, name: str, geometry: Any, frames: int) -> int:
    """Frames into one camera; tokens that its memory holds then."""
    memory = MemorySpec(block_frames=4)
    spec = StreamSpec(name, (Question("person", QUESTION),), 4.0, 4.0, static_gate=False, memory=memory)
    worker.open(spec).result(WAIT_S)
    camera = SyntheticCamera(name, geometry, width=WIDTH, height=HEIGHT)
    for index in range(frames):
        worker.offer(camera.sample(index)).result(WAIT_S)
    bank.wait_written(WAIT_S)
    return int(worker.call_on_engine_thread(lambda engine: engine.memory_status(name)).result(WAIT_S).tokens)


def proxy(replica: str, names: list[str]) -> MemoryProxy:
    """The gateway's side of a replica at ``host:port`` that has these cameras."""
    statuses = [CameraStatus(name, state="running", replica="replica-0", memory_frames=1) for name in names]

    async def route(_camera: str) -> str:
        return replica

    async def cameras() -> list[CameraStatus]:
        return statuses

    return MemoryProxy(route, ChannelPool(), cameras=cameras)


def asked(address: str) -> tuple[float, float, int]:
    """Seconds to the first answer and to the last, and how many there were."""
    first_s, answered = 0.0, 0
    began_s = time.perf_counter()
    with GatewayClient(address) as client:
        for event in client.ask_all(QUESTION, deadline_s=300.0):
            if isinstance(event, CameraOutcome) and event.outcome is not None:
                answered += 1
                first_s = first_s or time.perf_counter() - began_s
    return first_s, time.perf_counter() - began_s, answered


def live(args: argparse.Namespace) -> BenchResult:
    """The console's camera page with its live view open."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ConsoleGateway(City(8), Path(folder), live=False) as gateway,
        browser(args.browser) as chromium,
    ):
        name = next(status.name for status in gateway.city.cameras.values() if status.state == "running")
        ring = gateway.footage_of(name).ring
        assert ring is not None
        with LiveCamera(ring):
            while ring.seconds < 1:
                time.sleep(0.05)
            page = chromium.new_page()
            page.goto(f"{gateway.url}/#/camera/{name}")
            page.get_by_role("button", name="Live view").click()
            # The page's policy forbids the evaluation that Playwright's own wait does.
            shown = "document.querySelector('.live-view video')?.currentTime > 1"
            until(lambda: page.evaluate(shown), "no picture of the live view", 30.0)
            ages_s = sorted(page.evaluate(READ, [".live-view video", round(args.seconds * FPS)]))
    figures = {
        "live_view_latency_s": statistics.median(ages_s),
        "live_view_latency_p95_s": ages_s[int(0.95 * len(ages_s))],
    }
    row = {"frames": len(ages_s), "least_s": ages_s[0], "median_s": statistics.median(ages_s), "most_s": ages_s[-1]}
    return BenchResult(
        figures, [row], [f"H.264 at {FPS} pictures a second, a keyframe every 2 s, Chromium on the same cores"]
    )


class Silent:
    """Nobody listens to the windows' answers."""

    def answered(self, answers: Any, *, late: Any) -> None: ...
    def batch(self, windows: Any) -> None: ...
    def dropped(self, stream: str, reason: Any, windows: int) -> None: ...
    def lost(self, stream: str, windows: int) -> None: ...
