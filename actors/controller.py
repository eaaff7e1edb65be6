"""The controller actor: sole owner of the camera table. State and rules are in ``cluster.control.directory``.

Cameras are stored in ``cluster.state_dir`` or Ray's key-value store, so that a restarted controller still has those
added at run time. It learns who runs them from the decoders and replicas, which re-register when their heartbeat is
not recognised.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from actors.remote import ANSWER_S, CONTROLLER, RayTable
from actors.startup import InnerProcess, run_task
from cluster import metrics
from cluster.alerts.health import CameraStates
from cluster.config import CameraEntry, SightlineConfig
from cluster.config.sources import bundled_remark
from cluster.control.camera_record import Assignment, DeletionTracker, Route
from cluster.control.cameras.managed import ManagedCamera
from cluster.control.cameras.table import CameraStore, CameraTable, FileTable, StoredCameras
from cluster.control.decoders import DecoderCount
from cluster.control.directory import Directory
from cluster.control.fleet_settings import fleet_settings
from cluster.errors import SightlineError, UnavailableError
from cluster.security.roles import Principal
from cluster.security.sessions import LIFETIME_S, Sessions
from cluster.types import CameraStatus
from cluster.types.reports import (
    CameraReport,
    DecoderInfo,
    DecoderNumbers,
    ReplicaInfo,
    ReplicaReport,
    ReplicaStatus,
    StreamReport,
)
from cluster.wire.answers import yielding
from cluster.wire.server import is_serving

log = logging.getLogger(__name__)
T = TypeVar("T")

FORGET_HEARTBEATS = 4
"""Maximum heartbeats that a removal waits for every live replica to delete the camera's memory."""

COUNT_REPLICAS_S, STORE_COUNTERS_S = 5.0, 60.0
"""Intervals, in seconds, of updating per-replica metrics, and of storing counters while no member changes."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """Ready processes by name; ``failure``: why a replica cannot start."""

    decoders: dict[str, DecoderInfo]
    replicas: dict[str, ReplicaInfo]
    failure: SightlineError | None


class Controller(InnerProcess):
    """Ray actor, named ``controller``. ``run_id`` separates this cluster's keys from those of earlier ones."""

    def __init__(self, config: SightlineConfig, run_id: str, host: str | None) -> None:
        super().__init__(config, CONTROLLER, "controller", host)
        self._counted_s = 0.0
        state = config.cluster.state_dir
        table = RayTable(f"sightline-{run_id}") if state is None else FileTable(Path(state, "cameras.sqlite"))
        self._kv = CameraStore(table)
        self._restarted = self._kv.begin(run_id)
        self._directory = Directory(
            heartbeat_s=config.cluster.heartbeat_s,
            heartbeat_timeout_s=config.cluster.heartbeat_timeout_s,
            quality=fleet_settings(config),
            # Milliseconds grow faster than versions, so all versions of earlier controllers are smaller.
            after=self._kv.later_version(time.time_ns() // 1_000_000),
            remark=partial(bundled_remark, config),
        )
        self._table = CameraTable(config, self._directory)
        self._stored = StoredCameras(self._table, self._kv)
        self._decoders = DecoderCount.configured(config.cluster, self._kv.decoders() if self._restarted else 0)
        wanted = {"decoder": self._decoders.count, "replica": config.cluster.replicas}
        self._fleet_metrics = metrics.FleetMetrics(wanted)
        self._deletions = DeletionTracker(config.cluster.replicas, self._kv.removed())
        self._failure: SightlineError | None = None
        # In memory only: sessions hold tokens, which must not reach a disk.
        self._sessions = Sessions()
        self._changed, self._settled = asyncio.Condition(), asyncio.Event()
        self._shown, self._kept = -1, (-1, -1)
        self._keeping = asyncio.Lock()
        self._probing, self._seen_replicas = set[str](), set[str]()
        self._seen_decoders: dict[str, str] = {}
        self._background: set[asyncio.Task[Any]] = {run_task(self._settle()), run_task(self._watch_heartbeats())}

    async def stop(self) -> None:
        """Delete the state that a restart of this process would use."""
        self._kv.end()

    # -- cameras --------------------------------------------------------------------------------
    async def add_camera(self, managed: ManagedCamera, force: bool = False, takeover: bool = False) -> CameraStatus:
        """Add a camera.

        Raises:
            CameraExistsError: the name is taken, with other settings.
            ManagedElsewhereError: another manager has the name, and ``takeover`` is not set.
            ConfigError: settings that contradict each other.
            CapacityError: no capacity, unless ``force`` is set.
            UnavailableError: the change cannot be stored, as in updates and removals; nothing has changed.
        """
        await self._until_settled()
        # Not cancelled with the caller, because the storing thread cannot be.
        return await asyncio.shield(self._spawn(self._apply(self._stored.add(managed, force=force, takeover=takeover))))

    async def update_camera(self, managed: ManagedCamera, takeover: bool = False) -> CameraStatus:
        """Change a camera's settings; see :meth:`Directory.update`. Raises as :meth:`CameraTable.check_update` and
        :meth:`StoredCameras.update` do."""
        await self._until_settled()
        return await asyncio.shield(self._spawn(self._apply(self._stored.update(managed, takeover=takeover))))

    async def tested_source(self, entry: CameraEntry) -> tuple[str, CameraEntry]:
        """Decoder on which to test a camera's source, ``host:port``, and the camera with its secrets. Raises
        ``ConfigError`` and ``UnavailableError``."""
        await self._until_settled()
        entry = self._table.check_test(entry)
        known = self._directory.route(entry.name).decoder_address if entry.name in self._directory.cameras else None
        return known or await self.any_decoder(), entry

    async def any_decoder(self) -> str:
        """``host:port`` of a random decoder. Raises ``UnavailableError``."""
        await self._until_settled()
        decoders = [info.address for info in self._directory.decoders.values()]
        if not decoders:
            raise UnavailableError("no decoder is ready yet; try again in a moment")
        return random.choice(decoders)

    async def managed_cameras(self, names: Sequence[str] = (), left_out: bool = False) -> list[ManagedCamera]:
        """Declared cameras, passwords included; see :meth:`CameraTable.managed`. Raises ``UnknownCameraError``."""
        await self._until_settled()
        return self._table.managed(names, left_out=left_out)

    async def _apply(self, change: Coroutine[Any, Any, ManagedCamera]) -> CameraStatus:
        managed = await change
        await self._notify()
        return self._directory.status(managed.entry.name)

    async def remove_camera(self, name: str, manager: str | None = None, takeover: bool = False) -> None:
        """Remove a camera and order every replica to delete its memory, now or when it rejoins. Raises
        ``UnknownCameraError`` and ``ManagedElsewhereError``."""
        await self._until_settled()
        life = await asyncio.shield(self._spawn(self._remove(name, manager, takeover)))
        # Bounded: replicas may be down.
        timeout_s = FORGET_HEARTBEATS * self._config.cluster.heartbeat_s
        await self._wait_for(lambda: life not in self._deletions.pending, timeout_s)

    async def _remove(self, name: str, manager: str | None, takeover: bool) -> str:
        life = await self._stored.remove(name, manager=manager, takeover=takeover)
        if lost := self._deletions.add(life, name):
            names = ", ".join(lost.values())
            log.warning("too many deletions are pending at replicas: the memory of %s is left to expire", names)
            self._spawn(self._write(self._kv.put_deleted, lost))
        await self._notify()
        return life

    async def list_cameras(self, *, remarks: bool = True) -> list[CameraStatus]:
        """Status of all cameras, sorted by name; ``remarks``: see :meth:`Directory.status`."""
        await self._until_settled()
        return [status async for status in yielding(self._directory.statuses(remarks=remarks))]

    async def get_camera(self, name: str) -> CameraStatus:
        """Status of a camera. Raises ``UnknownCameraError``."""
        await self._until_settled()
        return self._directory.status(name)

    async def where(self, name: str) -> Route:
        """Processes of a camera. Raises ``UnknownCameraError``, and ``UnavailableError`` until cameras are placed: if
        thousands of agents waited here instead, no decoder could join."""
        self._check_settled()
        return self._directory.route(name)

    async def camera_states(self, version: int) -> CameraStates:
        """All cameras as alerting needs them, with the settings changed since ``version``."""
        await self._until_settled()
        # Read before the statuses: later changes are reported next time, and no camera seems removed.
        directory, left = self._directory, self._table.left_out
        now, settings = directory.declared, directory.settings_since(version)
        return CameraStates(now, settings, tuple(await self.list_cameras(remarks=False)), directory.pictures(), left)

    # -- replicas, for operators ----------------------------------------------------------------
    async def list_replicas(self) -> list[ReplicaStatus]:
        """Status of all replicas, sorted by name."""
        return self._directory.replica_statuses()

    async def decoder_numbers(self) -> DecoderNumbers | None:
        return self._decoders.numbers(len(self._directory.decoders))

    async def drain_replica(self, name: str, undo: bool = False) -> ReplicaStatus:
        """See :meth:`Directory.drain`; not kept across restarts of the controller."""
        await self._until_settled()
        status = self._directory.drain(name, undo=undo)
        log.info("%s %s", name, "accepts cameras again" if undo else "is drained")
        await self._notify()
        return status

    # -- members --------------------------------------------------------------------------------
    async def register_decoder(self, info: DecoderInfo, running: Sequence[str]) -> None:
        """Register a decoder, after its start or this controller's."""
        # The directory cannot tell a restart: it drops a decoder that takes longer to start than the heartbeat timeout.
        if self._seen_decoders.get(info.name, info.instance) != info.instance:
            metrics.restarts.labels("decoder").inc()
        self._seen_decoders[info.name] = info.instance
        self._directory.join_decoder(info, time.monotonic(), running)
        log.info("%s joined at %s", info.name, info.address)
        await self._notify()

    async def register_replica(self, info: ReplicaInfo, known_as: str | None, streams: Sequence[str]) -> str:
        """Register a ready replica, after its start or this controller's; returns its name."""
        if info.instance not in self._seen_replicas:
            self._seen_replicas.add(info.instance)
            if len(self._seen_replicas) > self._config.cluster.replicas:
                metrics.restarts.labels("replica").inc()
        name = self._directory.join_replica(info, time.monotonic(), known_as=known_as, streams=streams)
        log.info("%s joined at %s", name, info.address)
        if len(self._directory.replicas) > self._config.cluster.replicas:
            # It replaces a dead replica: find that without waiting for the heartbeat timeout.
            for other in self._directory.replicas.keys() - {name}:
                self._spawn_probe(other)
        await self._notify()
        return name

    async def pending_deletions(self, instance: str) -> dict[str, str]:
        """Cameras whose memory a replica must delete before it gets any; see :meth:`DeletionTracker.orders_for`."""
        return self._deletions.orders_for(instance)

    async def was_expired(self, instance: str) -> bool:
        """Whether a returning replica must close its cameras: it was expired, and others have them."""
        return self._directory.was_expired(instance)

    async def heartbeat_decoder(self, name: str, instance: str, reports: Sequence[CameraReport], busy: float) -> bool:
        """Record a heartbeat; false: the decoder must register again."""
        return self._directory.heartbeat_decoder(name, instance, reports, time.monotonic(), busy)

    async def decoder_names(self) -> list[str]:
        """Decoders that must run: the wanted ones, and others until they have no camera."""
        await self._until_settled()
        return sorted({*self._decoders.names, *self._directory.decoder_table.loads})

    async def heartbeat_replica(
        self,
        instance: str,
        reports: Sequence[StreamReport],
        forgotten: Sequence[str] = (),
        load: ReplicaReport | None = None,
    ) -> dict[str, str] | None:
        """Record a heartbeat and confirmed deletions (``forgotten``); returns pending ones. ``None``: register anew."""
        lost = self._directory.windows_lost
        if not self._directory.heartbeat_replica(instance, reports, time.monotonic(), load):
            return None
        metrics.lose_window(self._directory.windows_lost - lost)
        alive = {info.instance for info in self._directory.replicas.values()}
        if done := self._deletions.confirm(instance, forgotten, alive):
            self._spawn(self._write(self._kv.put_deleted, done))
            await self._notify()
        return self._deletions.orders_for(instance, [report.life for report in reports])

    async def report_broken(self, address: str) -> None:
        """Probe the replica at ``address``, to which a decoder lost its connection, before the heartbeat timeout."""
        for name, known in self._replica_addresses().items():
            if known == address:
                self._spawn_probe(name)

    async def assignment(self, decoder: str, version: int, timeout_s: float) -> Assignment:
        """What ``decoder`` must run, once it differs from ``version`` or after ``timeout_s`` (long polling)."""
        await self._until_settled()
        await self._wait_for(lambda: self._directory.concerns(decoder, version), timeout_s)
        return self._directory.assignment(decoder, version)

    async def replicas(self, known: dict[str, str], timeout_s: float) -> dict[str, str]:
        """Name -> address of all replicas, once they differ from ``known`` or after ``timeout_s`` (long polling)."""
        await self._wait_for(lambda: self._replica_addresses() != known, timeout_s)
        return self._replica_addresses()

    async def report_failure(self, error: SightlineError) -> None:
        """Record why a replica cannot start."""
        log.error("a replica cannot start: %s", error)
        self._failure = error

    async def readiness(self) -> Readiness:
        """Ready processes."""
        return Readiness(self._directory.decoders, self._directory.replicas, self._failure)

    async def metrics_addresses(self) -> dict[str, str]:
        """Process name -> ``host:port`` of its ``/metrics``."""
        members: dict[str, DecoderInfo | ReplicaInfo] = {**self._directory.decoders, **self._directory.replicas}
        return {"controller": self._page.address} | {name: info.metrics_address for name, info in members.items()}

    # -- browsers' sessions, of all gateways -------------------------------------------------------
    async def begin_session(
        self, principal: str, credential: str | Principal, browser: str, lifetime_s: float = LIFETIME_S
    ) -> str:
        return await self._sessions.begin_session(principal, credential, browser, lifetime_s)

    async def credential_of_session(self, session: str, browser: str) -> str | Principal | None:
        return await self._sessions.credential_of_session(session, browser)

    async def end_session(self, session: str) -> None:
        await self._sessions.end_session(session)

    # -- inside ---------------------------------------------------------------------------------
    async def _write(self, call: Callable[..., None], *given: object) -> None:
        # On failure, a deletion stays stored and is ordered again after a restart.
        try:
            await self._stored.write(call, *given)
        except UnavailableError as error:
            log.warning("%s", error)

    def _replica_addresses(self) -> dict[str, str]:
        return {name: info.address for name, info in self._directory.replicas.items()}

    async def _until_settled(self) -> None:
        await self._wait_for(self._settled.is_set, ANSWER_S - 1.0)
        self._check_settled()

    def _check_settled(self) -> None:
        if not self._settled.is_set():
            raise UnavailableError("the controller has just restarted; try again in a moment")

    async def _wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Whether ``condition``, checked at every notification, becomes true within ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                return await self._changed.wait_for(condition)
        except TimeoutError:
            return False

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _settle(self) -> None:
        """Place the cameras once the decoders have joined; after a restart, replicas too, so that no camera moves."""
        found = await self._retry_store(lambda: self._kv.follow(self._config.cameras))
        for camera in found.removed:
            self._deletions.add(camera.life, camera.entry.name)
        for name in found.left:
            log.warning("camera %s is in the configuration, but belongs to another manager: left unchanged", name)
        # Replicas of a new cluster hold no cameras, so none can move.
        here, cluster, decoders = self._directory, self._config.cluster, self._decoders.count
        replicas = cluster.replicas if self._restarted else 0
        if not await self._wait_for(
            lambda: len(here.decoders) >= decoders and len(here.replicas) >= replicas, cluster.heartbeat_timeout_s
        ):
            log.warning("not every decoder and replica joined within %g s", cluster.heartbeat_timeout_s)
        self._directory.restore_counts(await self._retry_store(self._kv.counted))
        for camera in found.cameras:
            self._table.load([camera], time.monotonic())
            # Thousands take seconds; let heartbeats through meanwhile.
            await asyncio.sleep(0)
        self._settled.set()
        await self._notify()

    async def _retry_store(self, call: Callable[[], T]) -> T:
        """Retry a call to the store until the disk accepts it."""
        while True:
            try:
                return await asyncio.to_thread(call)
            except UnavailableError as error:
                log.error("no camera is placed yet: %s", error)
                await asyncio.sleep(self._config.cluster.heartbeat_s)

    async def _watch_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._config.cluster.heartbeat_s)
            try:
                await self._watch_members()
            except Exception:
                log.exception("the work of this heartbeat failed; retrying at the next")

    async def _watch_members(self) -> None:
        if gone := self._directory.expire(time.monotonic()):
            log.warning("no heartbeat from %s", ", ".join(gone))
            await self._notify()
        await self._tick_fleet()
        if self._settled.is_set():
            if self._decoders.decide(self._directory.decoder_table.loads, time.monotonic()):
                self._spawn(self._write(self._kv.put_decoders, self._decoders.count))
                # A decoder removed and added again later has not died.
                left = self._seen_decoders.items()
                self._seen_decoders = {name: each for name, each in left if name in self._decoders.names}
            if self._directory.keep_decoders(self._decoders.names):
                await self._notify()

    async def _tick_fleet(self) -> None:
        """Run the directory's periodic tick: ladder steps and moves."""
        steps = self._directory.tick(now_s := time.monotonic())
        for step in steps:
            metrics.ladder_steps.labels("down" if step.rung_to > step.rung_from else "up").inc()
            log.info("camera %s: quality %d -> %d, %s", step.camera, step.rung_from, step.rung_to, step.reason)
        if now_s - self._counted_s >= COUNT_REPLICAS_S:
            self._counted_s = now_s
            directory = self._directory
            self._fleet_metrics.set_members({"decoder": len(directory.decoders), "replica": len(directory.replicas)})
            self._fleet_metrics.set_replicas(directory.replica_statuses())
            kept = directory.version, int(now_s // STORE_COUNTERS_S)
            if self._settled.is_set() and kept != self._kept and not self._keeping.locked():
                # A run may have ended whose counters only this process has, or end together with this process.
                self._spawn(self._store_counts(directory.export_counts(), kept))
        if self._directory.version != self._shown:
            self._shown = self._directory.version
            self._fleet_metrics.set_expected_cameras(self._directory.expected_cameras)
            for rung, cameras in self._directory.rungs().items():
                metrics.ladder_cameras.labels(rung).set(cameras)
        if steps:
            await self._notify()

    async def _store_counts(self, counts: dict[str, dict[str, dict[str, int]]], kept: tuple[int, int]) -> None:
        """Runs as a task of its own: a slow disk must not delay heartbeats."""
        async with self._keeping:
            try:
                await asyncio.to_thread(self._kv.put_counted, counts)
                self._kept = kept
            except Exception as error:
                log.warning("cannot store the counters; retrying: %s", error)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _spawn_probe(self, replica: str) -> None:
        if replica not in self._probing:
            self._probing.add(replica)
            probe = self._spawn(self._probe(replica, self._directory.replicas[replica]))
            probe.add_done_callback(lambda _: self._probing.discard(replica))

    async def _probe(self, replica: str, info: ReplicaInfo) -> None:
        began_s = time.monotonic()
        serving = await is_serving(info.address, timeout_s=1.0, tls=self._tls)
        if serving is None:
            # It may just be busy: then a heartbeat arrives.
            await asyncio.sleep(2 * self._config.cluster.heartbeat_s)
            serving = self._directory.heard_since(replica, began_s)
        if not serving and self._directory.replicas.get(replica) == info:
            log.warning("%s at %s does not answer", replica, info.address)
            self._directory.leave_replica(replica)
            await self._notify()
