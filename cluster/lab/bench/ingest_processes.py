"""The other processes of the ingest bench: the gateway, and a decoder that takes packets and throws them away.

``python -m cluster.lab.bench.ingest_processes ROLE`` prints ``{"port": n}`` once it serves, answers every line on its
standard input with its counters, and ends when that is closed: it cannot outlive the bench.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import threading

from sightline.v1 import ingest_pb2_grpc

from cluster.codec.push import PushSource
from cluster.decoder.packet_sink import QueueSink
from cluster.gateway.ingest_proxy import ProxySink
from cluster.lab.bench.processes import serve
from cluster.wire.channel import ChannelPool
from cluster.wire.ingest import SERVICE, IngestServicer, PacketSink
from cluster.wire.server import RpcServer, push_message_bytes

MAX_PACKET_BYTES = 4 * 2**20


class Discard:
    """Push cameras under any name, each with a thread that takes its packets as a decoder would."""

    def __init__(self, credit: int) -> None:
        self._credit = credit
        self._sinks: dict[str, QueueSink] = {}
        self.packets = 0
        self.bytes = 0

    async def find(self, camera: str) -> PacketSink:
        if camera not in self._sinks:
            source = PushSource(max_packets=2 * self._credit)
            self._sinks[camera] = QueueSink(source, max_credit=self._credit)
            threading.Thread(target=self._take, args=(source,), daemon=True).start()
        return self._sinks[camera]

    def counts(self) -> dict[str, int]:
        return {"packets": self.packets, "bytes": self.bytes}

    def _take(self, source: PushSource) -> None:
        while True:
            source.open()
            for packet in source.packets():
                self.packets += 1
                self.bytes += len(packet.data)


class Forward:
    """Every camera belongs to the one decoder."""

    def __init__(self, decoder: str) -> None:
        self._decoder = decoder
        self._channels = ChannelPool()

    async def find(self, camera: str) -> PacketSink:
        return ProxySink(camera, self._route, self._channels)

    async def _route(self, camera: str) -> str:  # noqa: ARG002
        return self._decoder


def main() -> None:
    """One role until standard input is closed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["decoder", "gateway"])
    parser.add_argument("--decoder", help="gateway: address of the decoder")
    parser.add_argument("--credit", type=int, default=256)
    parser.add_argument("--cores", help="cores to keep to, as in 0 or 0,1")
    args = parser.parse_args()
    if args.cores:
        os.sched_setaffinity(0, {int(core) for core in args.cores.split(",")})

    async def run() -> None:
        discard = Discard(args.credit) if args.role == "decoder" else None
        find = discard.find if discard is not None else Forward(args.decoder).find
        server = RpcServer(max_message_bytes=push_message_bytes(MAX_PACKET_BYTES))
        servicer = IngestServicer(find, max_packet_bytes=MAX_PACKET_BYTES)
        server.add(SERVICE, ingest_pb2_grpc.add_IngestServicer_to_server, servicer)
        await serve(server, {}, discard.counts if discard is not None else dict)

    asyncio.run(run())


if __name__ == "__main__":
    main()
