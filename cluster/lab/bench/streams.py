"""CPU cost of a pushed camera: milliseconds per second of video, by process and kind of thread.

Agents (``sightline push``) send generated footage in real time through a gateway to a decoder, which sends sampled
frames to a replica. All run production code in separate processes, without Ray and with a model that takes no time.
Costs are CPU time per second of decoded video, on which other load on the machine has little effect.
"""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from cluster.codec.file import FileSource
from cluster.errors import SightlineError
from cluster.lab.bench.harness import BenchResult, positive
from cluster.lab.bench.processes import Process, used
from cluster.lab.scenes.street_clips import make_clip
from cluster.wire.push import PushAgent, PushOptions

MODULE = "cluster.lab.bench.push_processes"
KINDS = ("street", "night")
CLIP_S = 24.0
CHAIN = ("decoder", "gateway", "replica")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this bench's options to the parser."""
    parser.add_argument("--cameras", type=positive, default=16, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured seconds, after --warmup")
    parser.add_argument("--warmup", type=float, default=8.0, help="seconds before measuring")
    parser.add_argument("--fps", type=float, default=5.0, help="pictures per second")
    parser.add_argument("--size", type=size, default="640x360", metavar="WxH", help="default: %(default)s")
    parser.add_argument("--crf", type=int, help="CRF of the clips, such as 28, instead of the demo clips' encoding")
    parser.add_argument("--gather", type=float, default=0.5, help="seconds of packets per message")


def size(text: str) -> tuple[int, int]:
    """Argparse ``type`` of a picture size such as 640x360."""
    width, _, height = text.partition("x")
    return positive(width), positive(height)


def run(args: argparse.Namespace) -> BenchResult:
    """Measure one row per process and kind of thread; figures are sums."""
    with tempfile.TemporaryDirectory(prefix="sightline-bench-") as folder:
        clips = [Path(folder) / f"{kind}.mp4" for kind in KINDS]
        for kind, clip in zip(KINDS, clips, strict=True):
            make_clip(kind, clip, seconds=CLIP_S, fps=args.fps, size=args.size, crf=args.crf)
        with (
            Process(MODULE, "replica") as replica,
            Process(
                MODULE, "decoder", "--next", replica.address, "--geometry", json.dumps(replica.hello["geometry"])
            ) as decoder,
            Process(MODULE, "gateway", "--next", decoder.address) as gateway,
        ):
            running = {"replica": replica, "decoder": decoder, "gateway": gateway}
            before, after = asyncio.run(_push(args, clips, gateway.address, running))
    return _result(args, before, after)


Usage = dict[str, dict[str, Any]]


async def _push(
    args: argparse.Namespace, clips: list[Path], address: str, running: dict[str, Process]
) -> tuple[Usage, Usage]:
    """Push all cameras; returns the resource usage of every process at the start and end of measuring."""
    agents = []
    for number in range(args.cameras):
        source = FileSource(clips[number % len(clips)], loop=True, realtime=True)
        options = PushOptions(flush_s=args.gather)
        agents.append(PushAgent(source, address, f"camera-{number}", options=options))

    async def begin(number: int, agent: PushAgent) -> None:
        # Real cameras are not synchronised.
        await asyncio.sleep(number * CLIP_S / 7 % 2.0)
        await agent.run()

    async def read_usage() -> Usage:
        found = {name: await asyncio.to_thread(process.ask) for name, process in running.items()}
        return {**found, "generator": used()}

    tasks = [asyncio.create_task(begin(*each)) for each in enumerate(agents)]
    try:
        await asyncio.sleep(args.warmup)
        before = await read_usage()
        await asyncio.sleep(args.seconds)
        after = await read_usage()
        for task in tasks:
            if task.done():
                task.result()
                raise SightlineError("a push agent ended before the bench")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    dropped = sum(agent.status.dropped + agent.status.cluster_dropped for agent in agents)
    if dropped:
        raise SightlineError(f"{dropped} packets were dropped: the machine is too slow for {args.cameras} cameras")
    return before, after


def _result(args: argparse.Namespace, before: Usage, after: Usage) -> BenchResult:
    pictures = after["decoder"]["pictures"] - before["decoder"]["pictures"]
    if pictures <= 0:
        raise SightlineError("nothing was decoded; increase --seconds")
    lost = sum(after[process]["lost"] - before[process]["lost"] for process in ("decoder", "replica"))
    if lost:
        raise SightlineError(f"{lost} frames or windows were lost: the machine is too slow for {args.cameras} cameras")
    video_s = pictures / args.fps
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {"stream_ms": 0.0}
    for process in (*CHAIN, "generator"):
        old, new = before[process], after[process]
        cpu_ms = 1e3 * sum(new[key] - old[key] for key in ("user_s", "system_s")) / video_s
        figures[f"{process}_ms"] = cpu_ms
        if process in CHAIN:
            figures["stream_ms"] += cpu_ms
        rows.append(
            {
                "process": process,
                "part": "all",
                "ms": cpu_ms,
                "system_ms": 1e3 * (new["system_s"] - old["system_s"]) / video_s,
                "faults": (new["faults"] - old["faults"]) / video_s,
                "switches": (new["switches"] - old["switches"]) / video_s,
            }
        )
        parts = {f"thread {name}": (seconds, old["threads"].get(name, 0.0)) for name, seconds in new["threads"].items()}
        stages = old.get("stages", {})
        parts |= {f"inside: {name}": (seconds, stages[name]) for name, seconds in new.get("stages", {}).items()}
        for part, (seconds, until) in parts.items():
            rows.append({"process": process, "part": part, "ms": 1e3 * (seconds - until) / video_s})
    windows = after["replica"]["windows"] - before["replica"]["windows"]
    notes = [
        "CPU ms, faults and switches per second of one camera's video; stream_ms excludes the generator",
        f"{video_s:.0f} s of video decoded in {args.seconds:g} s from {args.cameras} cameras, "
        f"{windows} windows answered",
    ]
    return BenchResult(figures, rows, notes)
