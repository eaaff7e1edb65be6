"""A scripted replica behind the Memory service, and servers around it."""

import asyncio
import contextlib

from rpc_serving import serving

from cluster.errors import NotReadyError, UnknownCameraError
from cluster.replica.memory_service import MemoryServicer, ReplayRange
from cluster.types import AskResult, DeletedMemory, MemoryStatus, Moment

MOMENTS = (Moment(277_000_000, 285_000_000, 0.5), Moment(990_000_000, 1_000_000_000, 0.25))
STATUS = MemoryStatus(
    camera="gate",
    frames=120,
    tokens=4_000,
    oldest=-5,
    newest=1_000_000_000,
    cap_bytes=64 * 2**20,
    tier_bytes={"recent": 1, "zone": 2**31, "arena": 3},
    compressor="infinipot_v",
    organiser="mosaic",
    retriever="two_stage",
    counts={"frames": 500, "lost": 0},
    tier_states={"zone": "", "arena": "no room", "redis": "nobody answers at 127.0.0.1:1"},
)


def result(text, camera="gate"):
    return AskResult(camera, text, MOMENTS, -5, 1_000_000_000, 4_000, 100, 2**33, 0.25, 1.5, degraded=True)


class Replica:
    """Answers word by word: ``two words`` to anything, unless told otherwise. Knows one camera, ``gate``."""

    def __init__(self):
        self.asked = []
        self.words = ["two ", "", "words"]
        self.error = None
        self.error_at = 0
        self.stuck_at = None
        self.go = asyncio.Event()
        self.begun = asyncio.Event()
        self.ended = 0
        self.under_way = 0
        self.forgotten = []
        self.jpegs = [b"\xff\xd8one", b""]
        self.with_result = True

    async def ask(self, ask):
        self.asked.append(ask)
        self._check(ask.stream)
        self.under_way += 1
        self.begun.set()
        try:
            for number, word in enumerate(self.words):
                if self.error is not None and number == self.error_at:
                    raise self.error
                if number == self.stuck_at:
                    await self.go.wait()
                yield word
            if self.with_result:
                yield result("".join(self.words), ask.stream)
        finally:
            # As a real one does that has to tell another thread.
            await asyncio.sleep(0)
            self.under_way -= 1
            self.ended += 1

    async def delete_memory(self, camera, ago_s, *, only_here=False):
        self._check(camera)
        self.forgotten.append((camera, ago_s))
        return DeletedMemory(7, -3 if ago_s == 1 else 2**40)

    async def describe(self, camera):
        self._check(camera)
        if self.stuck_at is not None:
            await self.go.wait()
        return STATUS

    async def replay_range(self, camera):
        self._check(camera)
        return ReplayRange(0, 60_000_000, 40.0, 8.0)

    async def pictures(self, camera, moments):
        assert moments == MOMENTS
        if isinstance(self.jpegs, Exception):
            raise self.jpegs
        return self.jpegs

    def _check(self, camera):
        if camera == "dark":
            raise NotReadyError("camera 'dark' has seen nothing yet")
        if camera not in ("gate", "yard"):
            raise UnknownCameraError(f"there is no camera {camera!r}")


@contextlib.asynccontextmanager
async def replica(**options):
    """``(handler, address)`` of a replica's own server."""
    handler = Replica()
    async with serving(MemoryServicer(handler, **options)) as address:
        yield handler, address
