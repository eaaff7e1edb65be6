"""Memory of a replica: its tiers, requests of the ``Memory`` service on the engine thread, deletions and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster import metrics
from cluster.config import SightlineConfig
from cluster.config.secrets import memory_secret
from cluster.errors import NotReadyError, SightlineError
from cluster.memory.memory_counts import LOST
from cluster.memory.prefetch import TOTALS as PREFETCHED
from cluster.registry import tiers
from cluster.replica.ask_queue import Conversations
from cluster.replica.memory_service import ReplayRange
from cluster.replica.thumbnails import ThumbnailStore
from cluster.replica.worker import EngineWorker
from cluster.types import MICROSECONDS, AskResult, AskSpec, DeletedMemory, FrameSample, MemoryStatus, Moment, StreamSpec
from cluster.wire.answers import AnswerHub

if TYPE_CHECKING:
    from cluster.engine.base import Engine
    from cluster.memory.bank import MemoryBank
    from cluster.memory.tiers.stack import TierStack
    from cluster.wire.tls import PeerTls

log = logging.getLogger(__name__)


def tier_stack(
    config: SightlineConfig,
    fingerprint: str,
    node_address: str | None,
    *,
    find_node: Callable[[], str] | None = None,
    tls: PeerTls | None = None,
) -> TierStack:
    """The tiers of ``tiers.levels``; ``find_node``: looks up the node's tier process when it stops answering."""
    from cluster.memory.tiers.base import TierSettings
    from cluster.memory.tiers.stack import TierStack

    section = config.tiers
    settings = TierSettings(
        fingerprint=fingerprint,
        node_address=node_address,
        find_node=find_node,
        pinned=config.model.device.startswith("cuda"),
        secret=memory_secret(config.security),
        tls=tls,
        **section.model_dump(exclude={"levels", "node", "device_bytes"}),
    )
    opened = (tiers.get(level).from_settings(settings) for level in section.levels)
    return TierStack([tier for tier in opened if tier is not None])


class WorkerMemory:
    """Passes requests of the ``Memory`` service to the engine thread; called on the event loop.

    ``bank``: the engine's, whose clock thumbnails use; ``None`` if it keeps no memory. ``answers``: of its windows.

    Raises, from every request:
        UnknownCameraError: there is no such camera.
        NotReadyError: the camera has no memory.
        ConfigError: the model cannot take the question.
    """

    def __init__(
        self,
        worker: EngineWorker,
        album: ThumbnailStore,
        bank: MemoryBank | None = None,
        *,
        timeout_s: float,
        answers: AnswerHub | None = None,
    ) -> None:
        self.answers = AnswerHub() if answers is None else answers
        self._worker, self._album, self._bank, self._timeout_s = worker, album, bank, timeout_s
        # Specification with which each camera was last opened here.
        self._specs: dict[str, StreamSpec] = {}
        # Monotonic arrival time of each camera's newest frame.
        self._newest_s: dict[str, float] = {}

    def register_camera(self, spec: StreamSpec) -> None:
        """Register an opened or changed camera; thumbnails are kept as long as its memory, and deleted without one."""
        self._specs[spec.stream] = spec
        if spec.memory is None:
            self._album.delete(spec.stream)

    async def ask(self, ask: AskSpec) -> AsyncGenerator[str | AskResult, None]:
        """Yield pieces of the answer, then one result. Closing the iterator cancels the question."""
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
            try:
                result: AskResult = await asyncio.wrap_future(done)
            except SightlineError:
                # A replay asks about hundreds of windows, some of which are no longer held.
                if not ask.standing:
                    metrics.asks.labels("failed").inc()
                raise
            if not ask.standing:
                metrics.record_ask(result)
            yield replace(result, newest_age_s=self._age_s(ask.stream, result.newest))
        finally:
            done.cancel()

    async def delete_memory(self, camera: str, ago_s: float | None, *, only_here: bool = False) -> DeletedMemory:
        """Delete what was seen more than ``ago_s`` seconds ago; ``None``: everything.

        ``only_here``: another replica has the camera and deletes it in the tiers, once this one has written the rest.
        """
        before_s, bank = ago_s, self._bank
        if before_s is not None and bank is not None and (camera in bank or not only_here):
            # The engine counts from the newest frame.
            with contextlib.suppress(NotReadyError):
                asked = self._worker.call_on_engine_thread(lambda _: bank.get_memory(camera)[0].newest_s)
                before_s -= time.monotonic() - await asyncio.wrap_future(asked)
        deletion = await asyncio.wrap_future(self._worker.delete_memory(camera, before_s, only_open=only_here))
        self.answers.forget(lambda name: name == camera, ago_s or 0.0)
        # Before waiting for the tiers, which may be down.
        self._delete_pictures(camera, 0.0 if ago_s is None else ago_s)
        deleted: DeletedMemory = await asyncio.wrap_future(deletion)
        if only_here:
            await self.delete_copies(camera)
        return deleted

    async def describe(self, camera: str) -> MemoryStatus:
        status = await self._status(camera)
        if self._bank is None:
            return status
        # Off the engine thread: windows must not wait for the tiers.
        usage = await asyncio.to_thread(self._bank.tiers.usage, camera)
        return replace(status, tier_bytes={**status.tier_bytes, **usage})

    async def _status(self, camera: str) -> MemoryStatus:
        return await asyncio.wrap_future(
            self._worker.call_on_engine_thread(lambda engine: engine.memory_status(camera))
        )

    async def replay_range(self, camera: str) -> ReplayRange:
        """The range of video that can be replayed."""
        status = await self._status(camera)
        newest = max(status.newest, self._album.newest_pts(camera) or 0)
        if newest <= 0 or (spec := self._specs.get(camera)) is None:
            raise NotReadyError(f"camera {camera!r} has seen nothing yet; replay after its first window")
        oldest = status.oldest if status.frames else max(0, newest - round(spec.window_s * MICROSECONDS))
        return ReplayRange(oldest, newest, spec.window_s, spec.stride_s, self._age_s(camera, newest))

    def _age_s(self, camera: str, at: int) -> float:
        """Seconds since ``at`` on the memory's clock; 0 before this replica has got a frame of the camera."""
        newest, now_s = self._album.newest_pts(camera), time.monotonic()
        silent_s = now_s - self._newest_s.get(camera, now_s)
        return 0.0 if newest is None else max(0.0, silent_s + (newest - at) / MICROSECONDS)

    async def pictures(self, camera: str, moments: Sequence[Moment]) -> list[bytes]:
        """The thumbnail nearest to the middle of each moment; ``b""`` if there is none."""
        return [self._album.nearest(camera, (moment.start + moment.end) // 2) or b"" for moment in moments]

    def add_frame(self, sample: FrameSample) -> None:
        """Add a frame that the engine has taken to the thumbnails if the camera has a memory. Not every engine keeps
        one, whatever the specification: without it no question about the past is answered, and nobody sees them."""
        spec = self._specs.get(sample.stream)
        if spec is not None and spec.memory is None:
            return
        if self._bank is not None:
            if sample.stream not in self._bank:
                return
            sample = replace(sample, pts=self._bank.memory_time(sample.stream, sample.pts))
        self._album.add_frame(sample)
        self._newest_s[sample.stream] = time.monotonic()
        self._expire_pictures(sample.stream)

    def expire_pictures(self) -> None:
        """Delete thumbnails older than their camera's retention, also of cameras that send nothing."""
        for camera in self._newest_s:
            self._expire_pictures(camera)

    def _expire_pictures(self, camera: str) -> None:
        spec = self._specs.get(camera)
        if spec is not None and spec.memory is not None and spec.memory.retention_s is not None:
            self._delete_pictures(camera, spec.memory.retention_s)

    def _delete_pictures(self, camera: str, ago_s: float) -> None:
        """Delete thumbnails of more than ``ago_s`` seconds ago; 0 deletes all."""
        newest, now_s = self._album.newest_pts(camera), time.monotonic()
        left_s = ago_s - (now_s - self._newest_s.get(camera, now_s))
        self._album.delete(camera, newest - round(left_s * MICROSECONDS) if newest is not None and left_s > 0 else None)

    async def remove_camera(self, camera: str, life: str) -> None:
        """See :meth:`EngineWorker.remove_camera`."""
        await asyncio.wrap_future(self._worker.remove_camera(camera, life))

    def delete_pictures(self, camera: str) -> None:
        """Delete the thumbnails of a camera that has left this replica."""
        self._specs.pop(camera, None)
        self._newest_s.pop(camera, None)
        self._album.delete(camera)

    async def delete_copies(self, camera: str, *, elsewhere: bool = True) -> None:
        """Delete this process's own copies of a camera that is closed here, once its last write is done. ``elsewhere``:
        another replica has the camera; if not, a memory that no shared tier holds is kept."""
        if self._bank is not None and self._bank.tiers.shared:
            await asyncio.to_thread(self._bank.drop_copies, camera)
            return

        def delete(engine: Engine) -> None:
            if camera not in self._worker.open_streams():
                with contextlib.suppress(NotReadyError):
                    engine.delete_memory(camera)

        if elsewhere:
            await asyncio.wrap_future(self._worker.call_on_engine_thread(delete))


class MemoryDeletions:
    """Carries out the controller's orders to delete removed cameras' memories, off the heartbeats that bring them.

    A deletion is :attr:`done` once no tier holds anything of the camera: a tier that is down deletes when it is back.
    """

    def __init__(self, memory: WorkerMemory, conversations: Conversations, bank: MemoryBank) -> None:
        self._memory, self._conversations, self._bank = memory, conversations, bank
        # By name: life of the camera last opened here.
        self._lives: dict[str, str] = {}
        self._orders: dict[str, str] = {}
        # Deleted here, but perhaps not yet in every tier.
        self._deleted: dict[str, str] = {}
        self._running: asyncio.Task[None] | None = None

    @property
    def done(self) -> set[str]:
        """Lives of the cameras that every tier has deleted."""
        deleting = self._bank.tiers.deleting
        return {life for life, camera in self._deleted.items() if camera not in deleting}

    def open_camera(self, spec: StreamSpec) -> None:
        """Call before opening a camera: discards what is left here of an earlier one of the same name."""
        if self._lives.setdefault(spec.stream, spec.life) != spec.life:
            self._end_camera(spec.stream)
            self._lives[spec.stream] = spec.life

    def _end_camera(self, camera: str) -> None:
        self._memory.delete_pictures(camera)
        self._conversations.end_camera(camera)
        self._memory.answers.forget(lambda name: name == camera)

    def schedule(self, orders: Mapping[str, str]) -> None:
        """Schedule deletions (life -> name of the removed camera) without waiting."""
        self._orders |= {life: camera for life, camera in orders.items() if life not in self._deleted}
        if self._orders and (self._running is None or self._running.done()):
            self._running = asyncio.create_task(self._run())

    async def leave_camera(self, camera: str, *, elsewhere: bool) -> None:
        """Delete this process's copies of a camera that it has closed; see :meth:`WorkerMemory.delete_copies`."""
        try:
            self._memory.delete_pictures(camera)
            self._conversations.end_camera(camera)
            await self._memory.delete_copies(camera, elsewhere=elsewhere)
        except Exception:
            log.exception("what is left here of camera %s could not be deleted", camera)

    async def surrender_all(self, worker: EngineWorker) -> None:
        """Close every camera without saving anything: other replicas own them."""
        cameras = worker.open_streams()
        await asyncio.wrap_future(worker.release_all())
        for camera in cameras:
            await self.leave_camera(camera, elsewhere=True)

    async def wait_until_done(self) -> None:
        """Wait until every scheduled deletion was tried; tiers that are down delete later."""
        if self._running is not None:
            await self._running

    def acknowledge(self, lives: Iterable[str]) -> None:
        """Drop confirmed deletions; if ordered again, they are carried out again."""
        for life in lives:
            self._deleted.pop(life, None)

    async def _run(self) -> None:
        while self._orders:
            life, camera = next(iter(self._orders.items()))
            try:
                await self._memory.remove_camera(camera, life)
                if self._lives.get(camera, life) == life:
                    self._lives.pop(camera, None)
                    self._end_camera(camera)
                self._deleted[life] = camera
            except Exception:
                log.exception("the memory of removed camera %s is not deleted yet", camera)
            del self._orders[life]


_BYTES = {"bytes_in": "in", "bytes_out": "out"}
_EVENTS = ("hits", "misses", "retries", "stored", "evicted", "damaged", "failures")
"""Exported from the first scrape on, so that rates start at zero; other events appear when they occur."""

_PREFETCH_EVENTS = ("predicted", "used", "late", "wasted", "missed", "expired")


def _counter(name: str, text: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


class MemoryCollector(Collector):
    """Prometheus collector of this process's tiers and prefetchers; register it beside
    :data:`cluster.metrics.REGISTRY`."""

    def __init__(self, tiers: TierStack) -> None:
        self._tiers = tiers
        self._bytes = {tier.name: 0 for tier in tiers.tiers}

    def refresh(self) -> None:
        """Query the tiers' sizes, which is too slow for a scrape: each may take up to its deadline."""
        self._bytes = {tier.name: tier.nbytes() for tier in self._tiers.tiers}

    def collect(self) -> Iterator[Metric]:
        yield from self._of_tiers()
        yield from self._of_stack()
        yield from self._of_prefetch()

    def _of_tiers(self) -> Iterator[Metric]:
        held = GaugeMetricFamily("sightline_tier_bytes", "KV held by a tier, in bytes.", labels=["tier"])
        up = GaugeMetricFamily("sightline_tier_up", "1 when a tier works.", labels=["tier"])
        blocks = CounterMetricFamily("sightline_tier_blocks", "Blocks of a tier, by event.", labels=["tier", "event"])
        moved = CounterMetricFamily(
            "sightline_tier_moved_bytes", "Bytes into and out of a tier.", labels=["tier", "direction"]
        )
        for name, state in self._tiers.states().items():
            held.add_metric([name], self._bytes[name])
            # Also 0 for a tier that answers but cannot store: full, read-only, or without a disk to save to.
            up.add_metric([name], float(not state.trouble))
            for event, count in ({**dict.fromkeys(_EVENTS, 0), **state.counts}).items():
                if event not in _BYTES:
                    blocks.add_metric([name, event], count)
            for event, direction in _BYTES.items():
                moved.add_metric([name, direction], state.counts.get(event, 0))
        yield from (held, up, blocks, moved)

    def _of_stack(self) -> Iterator[Metric]:
        yield _counter(
            "sightline_memory_blocks",
            "Blocks of all tiers together: stored, promoted (copied up), refused.",
            "event",
            dict(self._tiers.counts),
        )
        yield _counter(
            "sightline_memory_lost",
            "Losses of memories: frames that no tier took in time, tokens whose blocks are missing or damaged.",
            "kind",
            LOST,
        )
        yield GaugeMetricFamily(
            "sightline_memory_deletions", "Cameras that some tier has yet to delete.", len(self._tiers.deleting)
        )

    def _of_prefetch(self) -> Iterator[Metric]:
        yield _counter(
            "sightline_prefetch_blocks",
            "Blocks prefetched for questions: predicted, of these used, late or wasted; missed were not predicted.",
            "event",
            {event: getattr(PREFETCHED, event) for event in _PREFETCH_EVENTS},
        )
        yield CounterMetricFamily(
            "sightline_prefetch_transfer_seconds", "Seconds spent loading blocks.", PREFETCHED.transfer_s
        )
        yield CounterMetricFamily(
            "sightline_prefetch_waited_seconds", "Seconds of these that computation waited.", PREFETCHED.waited_s
        )
