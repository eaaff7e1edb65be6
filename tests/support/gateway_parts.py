"""The real gateway with 500 made-up cameras behind it, for tests of its HTTP and for work on the console.

``python tests/support/gateway_parts.py --port 8080`` serves until Ctrl-C; ``--tokens`` prints a token for each role.
"""

import argparse
import asyncio
import contextlib
import random
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

from gallery_parts import Gallery
from loop_thread import EventLoopThread

from actors import gateway
from cluster.alerts.grpc_service import IncidentsServicer
from cluster.alerts.service import AlertService
from cluster.config import load_config
from cluster.control.camera_record import Route
from cluster.control.cameras.managed import ManagedCamera
from cluster.errors import (
    CameraExistsError,
    NotFoundError,
    NotReadyError,
    UnavailableError,
    UnknownCameraError,
)
from cluster.replica.memory_service import MemoryServicer, ReplayRange
from cluster.security.roles import Role
from cluster.security.sessions import Sessions, SessionStore
from cluster.security.tokens import make_token, write_tokens
from cluster.types import (
    Answer,
    AskResult,
    CameraStatus,
    DeletedMemory,
    LastAnswer,
    MemoryStatus,
    Moment,
    Timing,
    TokenCount,
)
from cluster.types.reports import ReplicaStatus
from cluster.wire.server import RpcServer

QUESTIONS = ("person", "smoke")
RUNGS = ("full", "pruned", "slower", "fewer")
STATES = ("running",) * 16 + ("backoff", "connecting", "error", "ended")


class World:
    """What the controller says: ``cameras`` that change with :meth:`tick`, two replicas, and addresses."""

    def __init__(self, cameras: int = 500, seed: int = 7) -> None:
        self._random = random.Random(seed)
        self.cameras = {}
        for number in range(cameras):
            name = f"cam-{number:03d}"
            self.cameras[name] = self._camera(name, number)
        self.entries: dict[str, ManagedCamera] = {}
        self.scores = {(name, question): 0.1 for name in self.cameras for question in QUESTIONS}
        self.window = 0
        self.drained: set[str] = set()
        self.sessions: SessionStore = Sessions()
        self.controller = self
        self.others: dict[str, object] = {}
        self.replica_address: str | None = None
        self.decoder_address: str | None = None
        self.alerting_address: str | None = None
        self.trouble = ""
        self.looks = 0

    def _camera(self, name: str, number: int) -> CameraStatus:
        state = STATES[number % len(STATES)]
        rung = RUNGS[0] if number % 7 else RUNGS[1 + number // 7 % 3]
        return CameraStatus(
            name,
            source=f"rtsp://10.0.{number // 256}.{number % 256}/stream",
            state=state,
            reason="" if state == "running" else "the camera does not answer",
            codec="h264",
            width=1280,
            height=720,
            cue="motion",
            decoder=f"decoder-{number % 4}",
            replica=f"replica-{number % 2}",
            tokens_full=1000,
            tokens_kept=300,
            tokens_computed=120,
            latency_s=0.4 + 0.001 * number,
            memory_bytes=2**20,
            memory_frames=600,
            memory_oldest_s=600.0,
            rung=rung,
            rung_reason="" if rung == "full" else "replica-0 has more work than it can do in time",
            windows_per_s=0.125,
            expected_lag_s=0.5,
        )

    def tick(self, share: float = 0.2) -> list[Answer]:
        """One window of a share of the cameras; their answers."""
        self.window += 1
        answers = []
        running = [name for name, status in self.cameras.items() if status.state == "running"]
        for name in self._random.sample(running, max(1, round(share * len(running)))) if running else ():
            status = self.cameras[name]
            last = []
            for question in QUESTIONS:
                walk = self._random.uniform(-0.15, 0.16)
                score = min(1.0, max(0.0, self.scores.get((name, question), 0.1) + walk))
                self.scores[name, question] = score
                answer = make_answer(name, question, score, self.window)
                answers.append(answer)
                last.append(LastAnswer(question, score, answer.positive, answer.end))
            self.cameras[name] = replace(
                status,
                last_answers=tuple(last),
                windows_done=status.windows_done + 1,
                frames_decoded=status.frames_decoded + 200,
                frames_sampled=status.frames_sampled + 16,
                tokens_full=status.tokens_full + 1000,
                tokens_kept=status.tokens_kept + 300,
                tokens_computed=status.tokens_computed + 120,
            )
        return answers

    # -- as the gateway asks the controller ---------------------------------------------------
    def _check(self, name: str | None = None) -> None:
        if self.trouble:
            raise UnavailableError(self.trouble)
        if name is not None and name not in self.cameras:
            raise UnknownCameraError(f"there is no camera {name!r}")

    async def where(self, name):
        self._check(name)
        return Route(None, self.decoder_address, None, self.replica_address)

    # No test asks for it.
    any_decoder = where

    async def gateways(self, but):
        return self.others

    async def list_cameras(self):
        self.looks += 1
        self._check()
        return list(self.cameras.values())

    async def get_camera(self, name):
        self._check(name)
        return self.cameras[name]

    async def add_camera(self, managed, force=False, takeover=False):
        self._check()
        name = managed.entry.name
        if name in self.cameras and self.entries.get(name) != managed:
            raise CameraExistsError(f"there is a camera {name!r} already")
        self.cameras[name] = CameraStatus(name, source=str(managed.entry.source))
        self.entries[name] = managed
        return self.cameras[name]

    async def update_camera(self, managed, takeover=False):
        name = managed.entry.name
        self._check(name)
        self.cameras[name] = replace(self.cameras[name], source=str(managed.entry.source))
        self.entries[name] = managed
        return self.cameras[name]

    async def remove_camera(self, name, manager, takeover=False):
        self._check(name)
        del self.cameras[name]

    async def tested_source(self, entry):
        self._check()
        if self.decoder_address is None:
            raise UnavailableError("no decoder is ready yet; try again in a moment")
        return self.decoder_address, entry

    async def managed_cameras(self, names=()):
        """Of those that were added here."""
        self._check()
        return [each for name, each in self.entries.items() if name in (names or self.entries)]

    async def list_replicas(self):
        self._check()
        half = len(self.cameras) // 2
        return [
            ReplicaStatus(
                name, f"10.0.0.{number}:7000", name in self.drained, half, half, 3, 0.6 + 0.2 * number, 0.5, 0.1
            )
            for number, name in enumerate(("replica-0", "replica-1"))
        ]

    async def decoder_numbers(self):
        return None

    async def drain_replica(self, name, undo):
        self._check()
        if name not in ("replica-0", "replica-1"):
            raise NotFoundError(f"there is no replica {name!r}")
        (self.drained.discard if undo else self.drained.add)(name)
        return ReplicaStatus(name, draining=not undo)

    async def replicas(self, known, timeout_s):
        if timeout_s:
            raise UnavailableError("there are no real replicas")
        return {}

    async def metrics_addresses(self):
        return {}

    async def alerting(self):
        if self.alerting_address is None:
            raise NotReadyError("this cluster makes no incidents; alerts.enabled is off")
        return self.alerting_address


def make_answer(camera: str, question: str, score: float, window: int) -> Answer:
    tokens = TokenCount(full=1000, kept=300, reused=200, refreshed=20, new=80, query=20, encoded=80)
    end = window * 8_000_000
    text = "yes" if score >= 0.5 else "no"
    return Answer(
        camera, window, end - 40_000_000, end, question, score, score >= 0.5, text, False, tokens, Timing(latency_s=0.4)
    )


class Replica:
    """Answers word by word to anything about any camera but ``dark``. ``pause_s`` between the words."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.words = ["Somebody ", "in a red ", "coat ", "came in."]
        self.pause_s = pause_s
        self.asked = []
        self.error: Exception | None = None
        self.error_at = 0
        self.forgotten = []
        self.under_way = 0

    async def ask(self, ask):
        self.asked.append(ask)
        self._check(ask.stream)
        self.under_way += 1
        try:
            words = self.words[: ask.max_new_tokens]
            if ask.span is not None:
                await asyncio.sleep(self.pause_s)
                yield AskResult(ask.stream, "", (), *ask.span, 0, 0, 0, 0.0, 0.0, yes=ask.span[1] / 100_000_000)
                return
            for number, word in enumerate(words):
                if self.error is not None and number == self.error_at:
                    raise self.error
                await asyncio.sleep(self.pause_s)
                yield word
            moments = (Moment(0, 8_000_000, 0.6), Moment(16_000_000, 24_000_000, 0.3))
            counts = 0, 60_000_000, 4000, 900, 2**20, 0.1, 0.4, False, 17, len(words), self.yes(ask.stream)
            yield AskResult(ask.stream, "".join(words), moments, *counts)
        finally:
            self.under_way -= 1

    async def delete_memory(self, camera, ago_s, *, only_here=False):
        self._check(camera)
        self.forgotten.append((camera, ago_s))
        return DeletedMemory(7, 2**20)

    async def describe(self, camera):
        self._check(camera)
        return MemoryStatus(camera, 600, 4000, 0, 60_000_000, 2**26, {"recent": 2**10, "zone": 2**20}, "a", "b", "c")

    async def replay_range(self, camera):
        self._check(camera)
        return ReplayRange(0, 60_000_000, 40.0, 8.0)

    async def pictures(self, camera, moments):
        return [b"\xff\xd8\xff\xd9" for _ in moments]

    def yes(self, camera):
        """P(yes): the higher, the higher the camera's number."""
        return int(camera[-3:]) / 1000 if camera[-3:].isdigit() else 0.5

    def _check(self, camera):
        if camera == "dark":
            raise NotReadyError("camera 'dark' has seen nothing yet")


@dataclass
class Served:
    """A gateway that runs: ``url`` of its HTTP, ``rpc`` address, secrets by role (none: nobody is asked for one)."""

    url: str
    rpc: str
    gateway: gateway.Gateway
    world: World
    replica: Replica
    alerts: AlertService
    secrets: dict[str, str]
    gallery: Gallery

    def publish(self, answers) -> None:
        """As the replicas would: to whoever watches, and to alerting."""
        self.gateway._hub.publish(answers)
        for answer in answers:
            self.alerts.accept_answer(answer)

    async def go_on(self, every_s: float = 1.0, share: float = 0.2) -> None:
        """Let cameras see things until cancelled."""
        while True:
            self.publish(self.world.tick(share))
            await asyncio.sleep(every_s)


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    *,
    cameras: int = 500,
    tokens: bool = False,
    port: int = 0,
    scopes=("*",),
    security=None,
    alerts=None,
    gateway_keys=None,
    name="gateway",
):
    """A :class:`Served`. ``scopes``: cameras of the tokens; ``security``, ``alerts``: keys of these sections; ``name``:
    of the gateway among several."""
    world, handler = World(cameras), Replica()
    secrets = {}
    keys = dict(security or {})
    if tokens:
        made = {role: make_token(f"{role}-token", [role], list(scopes)) for role in Role}
        write_tokens(folder / "tokens.json", [token for _, token in made.values()])
        secrets = {str(role): secret for role, (secret, _) in made.items()}
        keys = {"tokens_file": str(folder / "tokens.json"), "audit_log": str(folder / "audit.jsonl"), **keys}
    # Two cores share everything in tests: nothing here is to be slowed down by a limit that is not the test's.
    keys = {"calls_burst": 10_000, "calls_per_s": 10_000.0, **keys}
    config = load_config(
        None,
        {
            "gateway": {"port": 0, "http_port": port, **(gateway_keys or {})},
            "security": keys,
            "alerts": alerts or {},
        },
    )
    inner = RpcServer()
    inner.add(MemoryServicer(handler))
    service = AlertService(config, folder)
    await service.start()
    inner.add(IncidentsServicer(service))
    gallery = Gallery(service)
    inner.add(gallery)
    inner.add(gallery)
    address = f"127.0.0.1:{inner.bind('127.0.0.1', 0)}"
    await inner.start()
    world.replica_address = world.decoder_address = world.alerting_address = address
    with (
        mock.patch.object(gateway, "ControllerDirectory", return_value=world),
        mock.patch("actors.startup.configure_logging"),
    ):
        running = gateway.Gateway(config, name)
        try:
            addresses = await running.ready()
            scheme = "https" if config.security.tls.certificate else "http"
            url = f"{scheme}://{addresses.metrics}"
            yield Served(url, addresses.rpc, running, world, handler, service, secrets, gallery)
        finally:
            await running.stop()
            await inner.stop(0.0)
            await service.stop()


@contextlib.contextmanager
def served_in_thread(folder: Path, *, live: bool = True, **options):
    """A :class:`Served` on a thread of its own, for tests that block (browsers); ``live``: things go on happening."""
    with EventLoopThread("gateway") as thread:
        stack = contextlib.AsyncExitStack()

        async def start():
            served = await stack.enter_async_context(serving(folder, **options))
            if live:
                task = asyncio.create_task(served.go_on())
                stack.callback(task.cancel)
            return served

        served = thread.run(start(), 30.0)
        try:
            yield served
        finally:
            thread.run(stack.aclose(), 30.0)


async def _main(port: int, cameras: int, tokens: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with serving(Path(folder), port=port, cameras=cameras, tokens=tokens) as served:
            served.replica.pause_s = 0.3
            print(f"console {served.url}/  gRPC {served.rpc}", flush=True)
            for role, secret in served.secrets.items():
                print(f"{role}: {secret}", flush=True)
            await served.go_on()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--cameras", type=int, default=500)
    parser.add_argument("--tokens", action="store_true")
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(options.port, options.cameras, options.tokens))
