"""A replica that keeps what it is told, served, and a decoder's sender to it."""

import asyncio
from collections import Counter, defaultdict
from contextlib import asynccontextmanager

import rpc_serving

from cluster import metrics
from cluster.codec.supervisor import Backoff
from cluster.decoder.frame_sender import FrameSender
from cluster.errors import ConfigError
from cluster.replica.frames_service import FramesServicer
from cluster.types.reports import WindowCounters

QUICK = Backoff(first_s=0.02, longest_s=0.05)


class Replica:
    """A handler that keeps everything it is told; ``gate`` holds frames back while cleared, ``arrived`` counts them."""

    def __init__(self):
        self.opened = []
        self.frames = defaultdict(list)
        self.closed = []
        self.lost = []
        self.arrived = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.refuse = {}

    async def on_open(self, spec):
        if spec.refresh == "unheard_of":
            raise ConfigError("unknown refresh policy 'unheard_of'")
        self.opened.append(spec)

    async def on_frame(self, sample, arrived_s):
        self.arrived += 1
        await self.gate.wait()
        if reason := self.refuse.pop(sample.index, None):
            raise ValueError(reason)
        self.frames[sample.stream].append(sample)

    async def on_close(self, camera, flush):
        self.closed.append((camera, flush))

    async def on_lost(self, cameras):
        self.lost += cameras

    def counters(self, camera):
        done = len(self.frames[camera])
        return WindowCounters(done=done, closed=done)

    def indices(self, camera="gate"):
        return [sample.index for sample in self.frames[camera]]


def serving(handler, *, port=0, credit=8, gather_s=0.02):
    return rpc_serving.serving(FramesServicer(handler, credit=credit, gather_s=gather_s), port=port)


@asynccontextmanager
async def sending(**options):
    lost = []
    sender = FrameSender(lost.extend, backoff=QUICK, **options)
    try:
        yield sender, lost
    finally:
        await sender.stop(0.1)


def frame_counts():
    """What this process has counted of frames: ``sent``, and ``dropped`` and ``lost`` by reason."""
    counts = Counter()
    for family in metrics.REGISTRY.collect():
        for sample in family.samples:
            for name in ("sent", "dropped", "lost"):
                if sample.name == f"sightline_frames_{name}_total":
                    counts[" ".join([name, *sample.labels.values()])] = int(sample.value)
    return counts
