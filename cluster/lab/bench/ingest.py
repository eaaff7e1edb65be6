"""Packets per second through the gateway by gRPC push, flow control on.

Push agents send packets to a gateway that has one core to itself and forwards them to a decoder process; all three are
the real parts, only the decoding is left out. The agents and the decoder share the other cores.
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
    """Length of a measurement, size of a packet."""
    parser.add_argument("--packets", type=positive, default=20_000, help="most packets of one measurement")
    parser.add_argument("--seconds", type=float, default=4.0, help="longest measurement, seconds")
    parser.add_argument("--size", type=positive, default=8192, help="bytes of a packet")


class Synthetic:
    """A source of equal packets, as fast as they are taken, until ``packets`` or ``seconds`` are over."""

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
    """Gateway and decoder; the gateway alone on the last core while there are two or more."""
    cores = os.sched_getaffinity(0)
    one = {max(cores)}
    with ExitStack() as running:
        running.callback(os.sched_setaffinity, 0, cores)
        # A process begins on the cores of the one that starts it.
        os.sched_setaffinity(0, cores - one or one)
        decoder = running.enter_context(Process(MODULE, "discard"))
        os.sched_setaffinity(0, one)
        gateway = running.enter_context(Process(MODULE, "gateway", "--next", decoder.address))
        os.sched_setaffinity(0, cores - one or one)
        yield gateway, decoder


class Bench:
    """The processes, and one measurement after another on them."""

    def __init__(self, args: argparse.Namespace, gateway: Process, decoder: Process) -> None:
        self._args = args
        self._gateway = gateway
        self._decoder = decoder
        self._cameras = 0

    def measure(self, to: Process, batch: int, cameras: int = 1, packets: int | None = None) -> dict[str, Any]:
        """``cameras`` pushing at once, from the first packet to the last confirmed end."""
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
    """The headline is the hardest case, one packet in every message; batches are what the agent sends under load."""
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
        "packets_per_s: one camera, one packet per message, which is the worst case",
        "gateway_core_packets_per_s: what the gateway's processor time allows at that",
    ]
    return BenchResult(figures, [*through.values(), many, *direct], notes)
