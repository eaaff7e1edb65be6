"""A replica's memories: the tiers they lie in, and the ``Memory`` service's questions on the engine's thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from cluster.config import SightlineConfig
from cluster.errors import NotReadyError
from cluster.memory.album import Album
from cluster.scheduling.worker import EngineWorker
from cluster.types import AskResult, AskSpec, Forgotten, FrameSample, MemoryStatus, Moment

if TYPE_CHECKING:
    from cluster.memory.tiers.stack import TierStack


def tier_stack(config: SightlineConfig, fingerprint: str, node_address: str | None) -> TierStack:
    """Host memory, and below it the node's process and Redis where they are configured."""
    from cluster.memory.tiers.arena import Arena
    from cluster.memory.tiers.base import Tier
    from cluster.memory.tiers.redis import RedisTier
    from cluster.memory.tiers.stack import TierStack
    from cluster.rpc.kv_tier import RemoteTier

    settings = config.tiers
    cuda = config.model.device.startswith("cuda")
    tiers: list[Tier] = [Arena(settings.host_bytes, name="host", pinned=cuda)]
    form, deadline_s = settings.store_as, settings.deadline_s
    if node_address is not None:
        tiers.append(
            RemoteTier(node_address, fingerprint=fingerprint, store_as=form, deadline_s=deadline_s, name="node")
        )
    if settings.redis_url is not None:
        cap = settings.redis_bytes or config.memory.cap
        redis = RedisTier(
            settings.redis_url,
            fingerprint=fingerprint,
            cap_bytes=cap,
            ttl_s=settings.redis_ttl_s,
            deadline_s=deadline_s,
            store_as=form,
        )
        tiers.append(redis)
    return TierStack(tiers)


class WorkerMemory:
    """Questions off the wire into the engine thread (:class:`cluster.rpc.memory.MemoryHandler`)."""

    def __init__(self, worker: EngineWorker, album: Album, *, timeout_s: float) -> None:
        self._worker, self._album, self._timeout_s = worker, album, timeout_s

    async def ask(self, ask: AskSpec) -> AsyncIterator[str | AskResult]:
        """See ``MemoryHandler``."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[str | None] = asyncio.Queue()

        def tell(piece: str | None) -> None:
            # The loop may have ended before the engine.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        done = self._worker.ask(ask, tell, timeout_s=self._timeout_s)
        done.add_done_callback(lambda _: tell(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            result: AskResult = await asyncio.wrap_future(done)
            yield result
        finally:
            done.cancel()

    async def forget(self, camera: str, ago_s: float | None) -> Forgotten:
        """See ``MemoryHandler``."""
        before = None
        if ago_s is not None:
            with contextlib.suppress(NotReadyError):
                before = (await self.describe(camera)).newest - round(ago_s * 1e6)
        forgotten: Forgotten = await asyncio.wrap_future(self._worker.run(lambda engine: engine.forget(camera, ago_s)))
        self._album.forget(camera, before)
        return forgotten

    async def describe(self, camera: str) -> MemoryStatus:
        """See ``MemoryHandler``."""
        return await asyncio.wrap_future(self._worker.run(lambda engine: engine.describe(camera)))

    async def pictures(self, camera: str, moments: Sequence[Moment]) -> list[bytes]:
        """See ``MemoryHandler``; the picture nearest to a moment's middle."""
        return [self._album.at(camera, (moment.start + moment.end) // 2) or b"" for moment in moments]

    def see(self, sample: FrameSample) -> None:
        """A frame came in."""
        self._album.see(sample)
