"""Packets per second pushed through the gateway over gRPC, with flow control.

Push agents send packets to a gateway, pinned to its own core, which forwards them to a decoder process that discards
them; all code is production's except for the missing decoding. Agents and decoder share the other cores.
"""

import argparse
import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from cluster.codec.source import StreamHeader
from cluster.errors import SightlineError
from cluster.lab.bench.harness import BenchResult, positive
from cluster.lab.bench.processes import Process
from cluster.lab.bench.push_processes import CREDIT
from cluster.types import EncodedPacket
from cluster.wire.push import PushAgent, PushOptions, PushStatus

BATCHES = (1, 4, 16)
MANY = 16
GOP = 50
MODULE = "cluster.lab.bench.push_processes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this bench's options to the parser."""
    parser.add_argument("--packets", type=positive, default=20_000, help="maximum packets per measurement")
    parser.add_argument("--seconds", type=float, default=4.0, help="maximum seconds per measurement")
    parser.add_argument("--size", type=positive, default=8192, help="bytes per packet")


class Synthetic:
    """A source of identical packets at full speed, limited by ``packets`` and ``seconds``."""

    live = False
    pushed = False

    def __init__(self, packets: int, seconds: float, size: int) -> None:
        self._packets = packets
        self._seconds = seconds
        self._data = os.urandom(size)
        self._closed = threading.Event()

    @property
    def ended(self) -> bool:
        return True

    def open(self) -> StreamHeader:
        return StreamHeader("h264", 1920, 1080, b"")

    def packets(self) -> Iterator[EncodedPacket]:
        stop = time.monotonic() + self._seconds
        for sequence in range(self._packets):
            if self._closed.is_set() or time.monotonic() > stop:
                return
            yield EncodedPacket("h264", self._data, sequence * 40_000, None, sequence % GOP == 0, sequence)

    def close(self) -> None:
        self._closed.set()


@contextmanager
def processes() -> Iterator[tuple[Process, Process]]:
    """Run gateway and decoder; with two or more cores, the gateway has the last one to itself."""
    cores = os.sched_getaffinity(0)
    one = {max(cores)}
    with ExitStack() as running:
        running.callback(os.sched_setaffinity, 0, cores)
        # A child process inherits the CPU affinity.
        os.sched_setaffinity(0, cores - one or one)
        decoder = running.enter_context(Process(MODULE, "discard"))
        os.sched_setaffinity(0, one)
        gateway = running.enter_context(Process(MODULE, "gateway", "--next", decoder.address))
        os.sched_setaffinity(0, cores - one or one)
        yield gateway, decoder


class Bench:
    """Measurements on running processes."""

    def __init__(self, args: argparse.Namespace, gateway: Process, decoder: Process) -> None:
        self._args = args
        self._gateway = gateway
        self._decoder = decoder
        self._cameras = 0

    def measure(self, to: Process, batch: int, cameras: int = 1, packets: int | None = None) -> dict[str, Any]:
        """Push from ``cameras`` cameras at once, timed from the first packet to the last acknowledged end."""
        options, agents = PushOptions(batch_packets=batch), []
        for _ in range(cameras):
            self._cameras += 1
            source = Synthetic(max(1, (packets or self._args.packets) // cameras), self._args.seconds, self._args.size)
            agents.append(PushAgent(source, to.address, f"camera-{self._cameras}", options=options))

        async def push() -> list[PushStatus]:
            return await asyncio.gather(*(agent.run() for agent in agents))

        gateway_before, decoder_before = self._gateway.ask(), self._decoder.ask()
        started = time.perf_counter()
        statuses = asyncio.run(push())
        seconds = time.perf_counter() - started
        gateway_after, decoder_after = self._gateway.ask(), self._decoder.ask()
        sent = sum(status.packets for status in statuses)
        arrived = decoder_after["packets"] - decoder_before["packets"]
        if arrived != sent or any(status.dropped or status.cluster_dropped for status in statuses):
            raise SightlineError(f"{sent} packets were sent, but {arrived:.0f} arrived")
        busy = sum(gateway_after[key] - gateway_before[key] for key in ("user_s", "system_s"))
        proxied = to is self._gateway
        return {
            "via": "gateway" if proxied else "decoder directly",
            "cameras": cameras,
            "packets_per_message": batch,
            "packets": sent,
            "packets_per_s": sent / seconds,
            "mb_per_s": sent * self._args.size / seconds / 1e6,
            "gateway_cpu_us": 1e6 * busy / sent if proxied else None,
            "gateway_busy": busy / seconds if proxied else None,
            "gateway_rss_mb": gateway_after["rss"] / 1e6 if proxied else None,
        }


def run(args: argparse.Namespace) -> BenchResult:
    """The main figure is the worst case, one packet per message; under load, the agent sends batches."""
    with processes() as (gateway, decoder):
        bench = Bench(args, gateway, decoder)
        bench.measure(gateway, 1, packets=500)
        through = {batch: bench.measure(gateway, batch) for batch in BATCHES}
        many = bench.measure(gateway, 1, cameras=MANY)
        direct = [bench.measure(decoder, batch) for batch in BATCHES]
    figures = {
        "packets_per_s": through[1]["packets_per_s"],
        **{f"packets_per_s_batch_{batch}": through[batch]["packets_per_s"] for batch in BATCHES[1:]},
        f"packets_per_s_{MANY}_cameras": many["packets_per_s"],
        "gateway_core_packets_per_s": 1e6 / through[1]["gateway_cpu_us"],
    }
    notes = [
        f"packets of {args.size} bytes, credit {CREDIT}",
        "packets_per_s: one camera, one packet per message, the worst case",
        "gateway_core_packets_per_s: limit by the gateway's CPU time in that case",
    ]
    return BenchResult(figures, [*through.values(), many, *direct], notes)
