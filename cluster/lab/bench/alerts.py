"""Latency from an answer to its webhook delivery, and alerts lost when processes are killed at random.

A replica's real ``Results`` service publishes synthetic answers of many cameras, alternating two positive and two
negative windows. Alerting (the real service, merger, outbox and webhook sink) and the receiver run in separate
processes. First, without kills, every alert is timed from just before its answer is published to its arrival; then
alerting or the receiver gets SIGKILL at random moments while answers continue. Expected alerts follow from the answers.
"""

import argparse
import asyncio
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Set
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from cluster.alerts.service import AlertService
from cluster.config import SightlineConfig, load_config
from cluster.errors import ConfigError
from cluster.gateway.merger import ResultsMerger
from cluster.lab.bench.harness import BenchResult, positive, print_progress
from cluster.lab.bench.processes import Process, free_port
from cluster.lab.bench.window_accounting import percentile
from cluster.types import MICROSECONDS, Answer, TokenCount
from cluster.wire.answers import AnswerHub, ResultsServicer
from cluster.wire.server import RpcServer

QUESTION = "q"
STRIDE_S, LENGTH_S = 8, 40
PATTERN = (0.9, 0.9, 0.1, 0.1)
SETTLE_S = 60.0
COLUMNS = ("part", "alerts", "p50_ms", "p99_ms", "max_ms", "lost", "beyond", "repeated")
AlertKey = tuple[str, int, str]
"""Camera, start and event of an alert."""

TOKENS = TokenCount(full=5120, kept=600, reused=400, refreshed=60, new=140, query=40, encoded=140)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this bench's options to the parser."""
    parser.add_argument("--cameras", type=positive, default=100, help="cameras")
    parser.add_argument("--period", type=float, default=2.0, help="seconds between two answers of a camera")
    parser.add_argument("--seconds", type=float, default=32.0, help="seconds of latency measurement")
    parser.add_argument("--kills", type=int, default=50, help="number of kills")
    parser.add_argument("--seed", type=int, default=7, help="random seed of the kills")


def run(args: argparse.Namespace) -> BenchResult:
    """Figures: ``alert_latency_ms`` (p99 with answers spread over the period; infinite if more than 1 % are missing),
    ``alerts_missing`` (without kills; expected 0), ``alerts_lost``, ``alerts_duplicated_beyond``."""
    if args.period < 1 or args.kills < 0:
        raise ConfigError("--period must be at least 1 (replicas resend the last minute), and --kills at least 0")
    with tempfile.TemporaryDirectory(prefix="sightline-bench-") as folder:
        return asyncio.run(Bench(args, Path(folder)).run())


class Cameras:
    """Publishes answers of all cameras, staggered over every period unless ``at_once``, and records when."""

    def __init__(self, hub: AnswerHub, count: int, period_s: float, *, at_once: bool = False) -> None:
        self._hub = hub
        self._period_s = period_s
        self.names = [f"camera-{number:04d}" for number in range(count)]
        self._at_once = at_once
        self._window = 0
        self.answers: list[Answer] = []
        self.published: dict[tuple[str, int], float] = {}

    async def publish_windows(self, rounds: int) -> None:
        """Publish ``rounds`` more windows of every camera."""
        for _ in range(rounds):
            began = time.monotonic()
            for number, name in enumerate(self.names):
                due_s = 0.0 if self._at_once else number * self._period_s / len(self.names)
                left_s = began + due_s - time.monotonic()
                if left_s > 0:
                    await asyncio.sleep(left_s)
                self._publish(name)
            self._window += 1
            await asyncio.sleep(max(0.0, began + self._period_s - time.monotonic()))

    def _publish(self, name: str) -> None:
        # Windows start after the stream does, so that every incident has a distinct start.
        end = (LENGTH_S + (self._window + 1) * STRIDE_S) * MICROSECONDS
        start = end - LENGTH_S * MICROSECONDS
        score = PATTERN[self._window % len(PATTERN)]
        answer = Answer(name, self._window, start, end, QUESTION, score, score >= 0.5, "", False, TOKENS)
        self.answers.append(answer)
        self.published[name, end] = time.time()
        self._hub.publish([answer])


class Bench:
    """The latency and the kill measurements."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._folder = folder
        self._log = folder / "received.jsonl"
        self._random = random.Random(args.seed)

    async def run(self) -> BenchResult:
        notes = [
            f"{self._args.cameras} cameras that answer every {self._args.period:g} s, kill seed {self._args.seed}; "
            "spread: answers staggered over the period; at once: all cameras at the same time"
        ]
        rows = [await self._measure("spread", at_once=False), await self._measure("at once", at_once=True)]
        figures = {
            "alert_latency_ms": rows[0]["p99_ms"],
            "alert_burst_ms": rows[1]["p99_ms"],
            "alerts_missing": float(sum(row["lost"] for row in rows)),
        }
        if self._args.kills:
            killed = await self._measure_losses()
            rows.append(killed)
            figures |= {
                "alerts_lost": float(killed["lost"]),
                "alerts_duplicated_beyond": float(killed["beyond"]),
                "alerts_repeated": float(killed["repeated"]),
                "kills": float(self._args.kills),
            }
        return BenchResult(figures, [dict.fromkeys(COLUMNS) | row for row in rows], notes)

    async def _measure(self, what: str, *, at_once: bool) -> dict[str, Any]:
        async with self._run_processes(what) as (alerting, hook):
            for process in (alerting, hook):
                await asyncio.to_thread(lambda started: started.hello, process)
            cameras = Cameras(self._hub, self._args.cameras, self._args.period, at_once=at_once)
            rounds = max(1, round(self._args.seconds / self._args.period / len(PATTERN))) * len(PATTERN)
            await cameras.publish_windows(rounds)
            wanted = expected(cameras.answers)
            await self._wait_received(wanted)
        took = alert_latencies(wanted, self._received(), cameras.published)
        row: dict[str, Any] = {"part": what, "alerts": len(took), "lost": took.count(math.inf)}
        return row | {
            f"{name}_ms": 1000 * percentile(took, share) for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
        }

    async def _measure_losses(self) -> dict[str, Any]:
        async with self._run_processes("kills") as processes:
            cameras = Cameras(self._hub, self._args.cameras, self._args.period)
            playing = asyncio.create_task(self._publish_patterns(cameras))
            for number in range(self._args.kills):
                await asyncio.sleep(self._random.uniform(0.1, 4.0))
                victim = self._random.choice(processes)
                victim.kill()
                await asyncio.sleep(self._random.uniform(0.0, 1.0))
                victim.start()
                print_progress(f"alerts: {number + 1}/{self._args.kills} kills")
            self._over = True
            await playing
            wanted = expected(cameras.answers)
            await self._wait_received(wanted)
        keys: dict[tuple[str, int, str], set[str]] = {}
        received = list(self._received())
        for line in received:
            keys.setdefault((line["camera"], line["start"], line["event"]), set()).add(line["key"])
        return {
            "part": "kills",
            "alerts": len(wanted),
            "lost": len(wanted - keys.keys()),
            "beyond": sum(len(each) - 1 for each in keys.values()) + len(keys.keys() - wanted),
            "repeated": len(received) - sum(len(each) for each in keys.values()),
        }

    async def _publish_patterns(self, cameras: Cameras) -> None:
        """Publish whole patterns until ``_over``, so that no incident is open at the end."""
        self._over = False
        while not self._over:
            await cameras.publish_windows(len(PATTERN))

    @asynccontextmanager
    async def _run_processes(self, what: str) -> AsyncIterator[tuple[Process, Process]]:
        """Start alerting and the receiver, fed by a replica in this process."""
        self._log.unlink(missing_ok=True)
        self._hub = AnswerHub(recent=100_000)
        server = RpcServer()
        server.add(ResultsServicer(self._hub))
        replica = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
        await server.start()
        port = free_port()
        folder = self._folder / what.replace(" ", "-")
        module = "cluster.lab.bench.alerts"
        hook = Process(module, "hook", str(port), str(self._log), quiet=True)
        alerting = Process(module, "alerting", replica, f"http://127.0.0.1:{port}/", str(folder), quiet=True)
        try:
            yield alerting, hook
        finally:
            for process in (hook, alerting):
                process.kill()
            await server.stop(0.0)

    async def _wait_received(self, wanted: Set[AlertKey]) -> None:
        """Wait until all of ``wanted`` arrived, or nothing new for ``SETTLE_S``."""
        deadline, before = time.monotonic() + SETTLE_S, -1
        while time.monotonic() < deadline:
            got = {(line["camera"], line["start"], line["event"]) for line in self._received()}
            if got >= wanted:
                return
            if len(got) != before:
                deadline, before = time.monotonic() + SETTLE_S, len(got)
            await asyncio.sleep(0.5)

    def _received(self) -> Iterator[dict[str, Any]]:
        if self._log.exists():
            # The last line may be incomplete while it is written.
            yield from (json.loads(line) for line in self._log.read_bytes().split(b"\n")[:-1])


def expected(answers: Iterable[Answer]) -> set[AlertKey]:
    """Alerts that must follow from the answers, which are ordered per camera: two positive windows in a row open an
    incident, two negative ones end it. Deliberately independent of the tracker, to not repeat its faults."""
    by_camera: dict[str, list[Answer]] = {}
    for answer in answers:
        by_camera.setdefault(answer.stream, []).append(answer)
    alerts: set[AlertKey] = set()
    for camera, windows in by_camera.items():
        start: int | None = None
        for before, now in pairwise(windows):
            if start is None and before.positive and now.positive:
                start = before.start
                alerts.add((camera, start, "new"))
            elif start is not None and not (before.positive or now.positive):
                alerts.add((camera, start, "end"))
                start = None
    return alerts


def alert_latencies(
    wanted: Set[AlertKey], received: Iterable[Mapping[str, Any]], published: Mapping[tuple[str, int], float]
) -> list[float]:
    """Seconds from the answer that triggered each alert to its first arrival, infinite if it never arrived. ``end`` is
    triggered two windows after the last positive one."""
    took: dict[AlertKey, float] = {}
    for line in received:
        later = 2 * STRIDE_S * MICROSECONDS if line["event"] == "end" else 0
        key = line["camera"], line["start"], line["event"]
        took.setdefault(key, line["at"] - published[line["camera"], line["end"] + later])
    return [took.get(each, math.inf) for each in wanted]


# -- killed processes ------------------------------------------------------------------------------
def configuration(hook: str) -> SightlineConfig:
    """One webhook, without cooldown or updates."""
    return load_config(
        None,
        {
            "questions": [{"id": QUESTION, "text": "Is anything there?"}],
            "alerts": {
                "sinks": [{"name": "hook", "kind": "webhook", "options": {"url": hook, "secret": "bench"}}],
                "cooldown_s": 0,
                "update_s": "1h",
                "retry": {"first_s": 0.1, "longest_s": 1.0},
            },
        },
    )


async def serve_alerting(replica: str, hook: str, folder: Path) -> None:
    """Run alerting without the controller until killed."""
    service = AlertService(configuration(hook), folder)
    await service.start()
    hub = AnswerHub(limit=50_000)
    merger = ResultsMerger(hub)
    with hub.subscribe() as answers:
        merger.follow([replica])
        print("{}", flush=True)
        async for answer, missed in answers:
            service.accept_answer(answer, missed)


async def serve_hook(port: int, log: Path) -> None:
    """Accept alerts and append them to ``log`` with their arrival time until killed."""
    from aiohttp import web

    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def accept(request: web.Request) -> web.Response:
        at_s = time.time()
        body = await request.json()
        incident = body["incident"]
        line = {"at": at_s, "key": body["key"], "event": body["event"], "camera": incident["camera"]}
        line |= {"start": incident["start_us"], "end": incident["end_us"]}
        os.write(out, json.dumps(line).encode() + b"\n")
        return web.Response(status=204)

    app = web.Application()
    app.router.add_post("/", accept)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    print("{}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    # ``alerting REPLICA HOOK FOLDER`` or ``hook PORT LOG``.
    role, *arguments = sys.argv[1:]
    if role == "alerting":
        asyncio.run(serve_alerting(arguments[0], arguments[1], Path(arguments[2])))
    else:
        asyncio.run(serve_hook(int(arguments[0]), Path(arguments[1])))
