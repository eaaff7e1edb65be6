"""A replica that keeps what it is told, served, and a decoder's sender to it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager

from sightline.v1 import frames_pb2_grpc

from cluster.codec.supervisor import Backoff
from cluster.decoder.frame_sender import FrameSender
from cluster.errors import ConfigError
from cluster.replica.frames_service import SERVICE, FramesServicer
from cluster.types.reports import WindowCounters
from cluster.wire.server import RpcServer

QUICK = Backoff(first_s=0.02, longest_s=0.05)


class Replica:
    """A handler that keeps everything it is told; ``gate`` holds frames back while cleared."""

    def __init__(self):
        self.opened = []
        self.frames = defaultdict(list)
        self.closed = []
        self.lost = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.refuse = {}

    async def on_open(self, spec):
        if spec.refresh == "unheard_of":
            raise ConfigError("unknown refresh policy 'unheard_of'")
        self.opened.append(spec)

    async def on_frame(self, sample, arrived_s):
        await self.gate.wait()
        if reason := self.refuse.pop(sample.index, None):
            raise ValueError(reason)
        self.frames[sample.stream].append(sample)

    async def on_close(self, camera, flush):
        self.closed.append((camera, flush))

    async def on_lost(self, cameras):
        self.lost += cameras

    def counters(self, camera):
        return WindowCounters(done=len(self.frames[camera]))

    def indices(self, camera="gate"):
        return [sample.index for sample in self.frames[camera]]


@asynccontextmanager
async def serving(handler, *, port=0, credit=8, gather_s=0.02):
    server = RpcServer()
    servicer = FramesServicer(handler, credit=credit, gather_s=gather_s)
    server.add(SERVICE, frames_pb2_grpc.add_FramesServicer_to_server, servicer)
    bound = server.bind("127.0.0.1", port)
    await server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(0.0)


@asynccontextmanager
async def sending(**options):
    lost = []
    sender = FrameSender(lost.extend, backoff=QUICK, **options)
    try:
        yield sender, lost
    finally:
        await sender.stop(0.1)
