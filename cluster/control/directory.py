"""The controller's state: cameras, members, ownership, and their last reports. Plain Python, driven by calls.

Two :class:`~cluster.control.placement.Placement` tables, one in the :class:`DecoderTable` and one in the fleet, place
every camera on a decoder and a replica. Time is an argument (``now_s``, monotonic), so that actor, simulator and tests
run the same code.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from cluster.config import CameraConfig
from cluster.control.accounted_video import AccountedVideo
from cluster.control.camera_record import (
    Assignment,
    CameraAssignment,
    CameraRecord,
    Member,
    Route,
)
from cluster.control.cameras.managed import CLUSTER
from cluster.control.decoders import DecoderTable
from cluster.control.fleet_settings import ALL_EQUAL, FleetSettings, demand_of, observe_pictures
from cluster.control.ladder import Step
from cluster.errors import CameraExistsError, CapacityError, NotFoundError, NotReadyError, UnknownCameraError
from cluster.registry import near
from cluster.types import CameraStatus, PatchGeometry, PictureHealth
from cluster.types.reports import (
    CameraReport,
    DecoderInfo,
    ReplicaInfo,
    ReplicaReport,
    ReplicaStatus,
    StreamReport,
    Totals,
)

GIVEN_UP = 1000
"""Maximum expired replicas remembered in case one comes back."""


class Directory:
    """See the module. Methods raise ``UnknownCameraError`` for an unknown camera.

    ``version`` increases with every change that concerns decoders, starting at ``after``, the last version of earlier
    controllers; ``declared``: the version at which a camera or its settings last changed; ``windows_lost``: windows
    lost with both decoder and replica of a camera, which only this table counts. ``remark``: returns the reason shown
    for a running or ended camera whose state has none."""

    def __init__(
        self,
        *,
        heartbeat_s: float = 1.0,
        heartbeat_timeout_s: float = 10.0,
        quality: FleetSettings = ALL_EQUAL,
        after: int = 0,
        remark: Callable[[CameraConfig], str] = lambda _: "",
    ) -> None:
        self.version = self.declared = after
        # Last version that concerns each decoder, so that a camera's change is sent to its decoder only.
        self._concerned: dict[str, int] = {}
        # Each decoder's last assignment, and its version.
        self._assigned: dict[str, tuple[int, dict[str, CameraAssignment]]] = {}
        self.windows_lost = 0
        self._measured = quality.costs is not None
        self._admission = quality.admission
        self._remark = remark
        self._fleet = quality.fleet()
        self._rungs = {rung.name: rung for rung in quality.ladder.rungs}
        self.geometry: PatchGeometry | None = None
        self._heartbeat_s, self._timeout_s = heartbeat_s, heartbeat_timeout_s
        self._looked_s = math.inf
        self._cameras: dict[str, CameraRecord] = {}
        self.decoder_table = DecoderTable()
        self._replicas: dict[str, Member[ReplicaInfo]] = {}
        # Expired instances, whose cameras others own; the newest last.
        self._given_up: deque[str] = deque(maxlen=GIVEN_UP)
        self._held_by: dict[str, str] = {}
        self._counted: dict[str, Mapping[str, Mapping[str, int]]] = {}

    # -- cameras --------------------------------------------------------------------------------
    def add(self, settings: CameraConfig, now_s: float = 0.0, *, manager: str = CLUSTER, life: str = "") -> None:
        """Add a camera of a new name, after :meth:`check_add`; members that reported it when they joined keep it.
        ``manager``: who alone may change it, which the caller checks (``cluster.control.cameras``); ``life``:
        distinguishes it from an earlier camera of its name, which processes may still report."""
        demand, prefer = demand_of(settings, self.geometry), self._held_by.pop(settings.name, None)
        self._fleet.admit(demand, now_s, force=True, prefer=prefer, idle=True)
        totals, video = Totals(self._counted.pop(life, None)), AccountedVideo(self._heartbeat_s)
        camera = self._cameras[settings.name] = CameraRecord(settings, manager, life, totals=totals, video=video)
        self.decoder_table.add(settings.name)
        self.declared = camera.declared = self._changed([self.decoder_table.owner(settings.name)])

    def check_add(self, settings: CameraConfig, now_s: float, *, force: bool) -> None:
        """Check that a camera can be added; ``force``: skip admission control. Raises ``CameraExistsError``: the name
        has other settings (adding the same camera again is no error); ``CapacityError``: no capacity, even with every
        camera at its lowest permitted rung."""
        known = self._cameras.get(settings.name)
        if known is not None:
            if known.settings != settings:
                raise CameraExistsError(
                    f"there is a camera {settings.name!r} already; update it to change its settings, or remove it first"
                )
        elif not force and self._admission:
            refused = self._fleet.refusal(demand_of(settings, self.geometry), now_s)
            if refused is not None:
                raise CapacityError(f"camera {settings.name!r} is refused: {refused.reason}")

    def update(self, settings: CameraConfig, now_s: float = 0.0, *, manager: str = CLUSTER) -> None:
        """Change a camera's settings; it keeps its place, rung and counts. Never refused: if capacity is short, the
        ladder lowers others."""
        camera = self._require(settings.name)
        camera.manager = manager
        if camera.settings != settings:
            if settings.paused:
                camera.report = None
            if settings.paused != camera.settings.paused:
                camera.video.reset(now_s)
            camera.settings, camera.counted = settings, None
            report = camera.report
            size = report.size if report is not None and report.width else None
            self._fleet.admit(demand_of(settings, self.geometry, size), now_s, force=True)
            self.declared = camera.declared = self._changed([self.decoder_table.owner(settings.name)])

    def remove(self, name: str) -> None:
        """Remove a camera; its decoder stops it at the next request."""
        self._require(name)
        del self._cameras[name]
        concerned = [self.decoder_table.owner(name)]
        everybody = self.decoder_table.remove(name)
        concerned += [self.decoder_table.owner(move.camera) for move in self._fleet.remove(name)]
        self.declared = self._changed(None if everybody else concerned)

    @property
    def cameras(self) -> list[str]:
        return sorted(self._cameras)

    @property
    def expected_cameras(self) -> list[str]:
        """Cameras that are not paused, sorted."""
        return [name for name in self.cameras if not self._cameras[name].settings.paused]

    def export_counts(self) -> dict[str, dict[str, dict[str, int]]]:
        """Counts of each camera's runs, by its life, for a later controller."""
        # Not copied: the counts of a run are replaced, never modified.
        return {camera.life: dict(camera.totals.runs) for camera in self._cameras.values()}

    def restore_counts(self, counted: Mapping[str, Mapping[str, Mapping[str, int]]]) -> None:
        """Restore an earlier controller's :meth:`export_counts`, before any camera is added."""
        self._counted = dict(counted)

    @property
    def decoders(self) -> dict[str, DecoderInfo]:
        return {name: member.info for name, member in self.decoder_table.members.items()}

    @property
    def replicas(self) -> dict[str, ReplicaInfo]:
        return {name: member.info for name, member in self._replicas.items()}

    # -- members --------------------------------------------------------------------------------
    def join_decoder(self, info: DecoderInfo, now_s: float, running: Iterable[str] = ()) -> None:
        """Register a decoder that started, or that met a new controller while ``running`` these cameras."""
        known = self.decoder_table.members.get(info.name)
        if known is not None and known.info.instance != info.instance:
            self._decoder_gone(info.name)
        self.decoder_table.join(info, now_s, [camera for camera in running if camera not in self._cameras])
        self._changed()

    def join_replica(
        self, info: ReplicaInfo, now_s: float, *, known_as: str | None = None, streams: Iterable[str] = ()
    ) -> str:
        """Register a ready replica; returns its name: the one it was ``known_as``, or the lowest free one, so that a
        restarted replica gets its cameras back. ``streams``: cameras whose windows it holds."""
        for name, member in self._replicas.items():
            if member.info.instance == info.instance:
                member.seen_s = now_s
                return name
        names = (f"replica-{number}" for number in range(len(self._replicas) + 1))
        free = known_as is not None and known_as not in self._replicas
        name = known_as if known_as and free else next(name for name in names if name not in self._replicas)
        self._held_by.update((camera, name) for camera in streams if camera not in self._cameras)
        if self.was_expired(info.instance):
            self._given_up.remove(info.instance)
        self._replicas[name] = Member(info, now_s)
        if info.geometry != self.geometry:
            self.geometry = info.geometry
            # A restarted controller learns of pictures before it learns of the model.
            for camera in self._cameras.values():
                if camera.report is not None and camera.report.width:
                    observe_pictures(self._fleet, camera.settings, camera.report, self.geometry)
        self._fleet.join(name, window_tokens=info.window_tokens, waiting_bytes=info.waiting_bytes)
        self._changed()
        return name

    def heartbeat_decoder(
        self, name: str, instance: str, reports: Sequence[CameraReport], now_s: float, busy: float = 0.0
    ) -> bool:
        """Record a decoder's reports and busy share; false if it is unknown and must join again."""
        if not self.decoder_table.heartbeat(name, instance, now_s, busy=busy, running=bool(reports)):
            return False
        for report in reports:
            camera = self._cameras.get(report.camera)
            if camera is None or camera.life != report.life:
                continue
            camera.add_decoder(report, now_s)
            if self.decoder_table.owner(report.camera) == name:
                if report.width and (camera.report is None or camera.report.size != report.size):
                    observe_pictures(self._fleet, camera.settings, report, self.geometry)
                if report.counts.get("frames_decoded"):
                    self._fleet.set_connected(report.camera)
                camera.report = None if camera.settings.paused else report
        return True

    def heartbeat_replica(
        self, instance: str, reports: Iterable[StreamReport], now_s: float, load: ReplicaReport | None = None
    ) -> bool:
        """Record a replica's reports; false if it is unknown and must join again."""
        name = next((name for name, member in self._replicas.items() if member.info.instance == instance), None)
        if name is None:
            return False
        member = self._replicas[name]
        for report in reports:
            camera = self._cameras.get(report.camera)
            if camera is None or camera.life != report.life:
                continue
            camera.totals.update(report.run, report.counts)
            plan = self._fleet.plan(report.camera)
            self.windows_lost += camera.count_lost(report, self._rungs[plan.rung], now_s)
            if plan.owner == name and (counts := camera.add_replica(report, plan.rung, now_s)) is not None:
                if counts.windows:
                    self._fleet.set_connected(report.camera)
                self._fleet.observe_counts(report.camera, counts)
        if load is not None:
            if (since := member.load_since(load, now_s)) is not None:
                busy, steps, windows = since
                self._fleet.replica_report(
                    name, busy_share=busy, backlog_s=load.backlog_s, now_s=now_s, steps=steps, windows=windows
                )
            member.load, member.load_s = load, now_s
        member.seen_s = now_s
        return True

    def tick(self, now_s: float) -> list[Step]:
        """Take the steps on the quality ladder that are due now; assignments include them from then on."""
        steps = self._fleet.tick(now_s)
        if steps:
            self._changed(self.decoder_table.owner(step.camera) for step in steps)
        return steps

    def rungs(self) -> dict[str, int]:
        counts = Counter(self._fleet.plan(name).rung for name in self._cameras)
        return {rung: counts[rung] for rung in self._rungs}

    def drain(self, replica: str, *, undo: bool = False) -> ReplicaStatus:
        """Move every camera off a replica, which gets none until it is restarted; ``undo`` reverts that. Raises
        ``NotFoundError``: no such replica; ``NotReadyError``: no other replica takes cameras."""
        if replica not in self._replicas:
            known = ", ".join(sorted(self._replicas)) or "none"
            raise NotFoundError(f"there is no replica {replica!r}; there are: {known}")
        if undo:
            self._fleet.join(replica)
        else:
            self._fleet.drain(replica)
            if not self._fleet.draining(replica):
                raise NotReadyError(f"no other replica takes cameras; {replica} keeps its own until there is one")
        self._changed()
        return next(status for status in self.replica_statuses() if status.name == replica)

    def replica_statuses(self) -> list[ReplicaStatus]:
        found = []
        for name, member in sorted(self._replicas.items()):
            cameras, lowered = self._fleet.counts_on(name)
            status = member.replica_status(
                name,
                draining=self._fleet.draining(name),
                cameras=cameras,
                lowered=lowered,
                utilisation=self._fleet.utilisation(name) if self._measured else 0.0,
                expected_lag_s=self._lag_s(name),
            )
            found.append(status)
        return found

    def expire(self, now_s: float) -> list[str]:
        """Remove members without a heartbeat within the timeout; returns their names. If a call, one per
        heartbeat, is late by half the timeout, this process was stalled, and all deadlines are extended."""
        if now_s - self._looked_s > self._heartbeat_s + self._timeout_s / 2:
            for decoder in self.decoder_table.members.values():
                decoder.seen_s = now_s
            for replica in self._replicas.values():
                replica.seen_s = now_s
        self._looked_s = now_s
        decoders = self.decoder_table.late(now_s - self._timeout_s)
        replicas = [name for name, member in self._replicas.items() if now_s - member.seen_s > self._timeout_s]
        for name in decoders:
            self.leave_decoder(name)
        for name in replicas:
            self.leave_replica(name)
        return decoders + replicas

    def keep_decoders(self, names: Collection[str]) -> bool:
        """See :meth:`DecoderTable.keep`."""
        moved = self.decoder_table.keep(names)
        if moved:
            self._changed()
        return moved

    def leave_decoder(self, name: str) -> None:
        """Remove a decoder; others take its cameras."""
        self._decoder_gone(name)
        self.decoder_table.leave(name)
        self._concerned.pop(name, None)
        self._assigned.pop(name, None)
        self._changed()

    def was_expired(self, instance: str) -> bool:
        """Whether a returning replica had expired, so that its cameras' windows were counted as lost."""
        return instance in self._given_up

    def heard_since(self, name: str, since_s: float) -> bool:
        """Whether a replica has sent a heartbeat since ``since_s``."""
        return name in self._replicas and self._replicas[name].seen_s > since_s

    def leave_replica(self, name: str) -> None:
        """Remove a replica; others take its cameras, which wait for a replica if there is none."""
        self._given_up.append(self._replicas.pop(name).info.instance)
        self._fleet.leave(name)
        self._changed()

    def _decoder_gone(self, name: str) -> None:
        for key in self.decoder_table.cameras(name):
            self._cameras[key].report = None

    def _changed(self, decoders: Iterable[str | None] | None = None) -> int:
        """Start a new version that concerns these decoders; None: all."""
        self.version += 1
        names = self.decoder_table.members if decoders is None else filter(None, decoders)
        self._concerned |= dict.fromkeys(names, self.version)
        return self.version

    # -- queries --------------------------------------------------------------------------------
    def route(self, name: str) -> Route:
        """Processes that run a camera; a paused one is run by no decoder, though it keeps its place."""
        paused = self._require(name).settings.paused
        decoder, replica = self.decoder_table.owner(name), self._fleet.plan(name).owner
        return Route(
            decoder,
            None if paused else self.decoder_table.address(decoder),
            replica,
            self._replicas[replica].info.address if replica in self._replicas else None,
        )

    def concerns(self, decoder: str, version: int) -> bool:
        """Whether anything that concerns a decoder has changed since ``version``."""
        return self._concerned.get(decoder, self.version) > version

    def assignment(self, decoder: str, version: int = -1) -> Assignment:
        """What a decoder must run now; only changes if its last assignment was at ``version``."""
        addresses = {name: member.info.address for name, member in self._replicas.items()}
        wanted = {}
        for name in sorted(self.decoder_table.cameras(decoder)):
            camera, plan = self._cameras[name], self._fleet.plan(name)
            if not camera.settings.paused:
                address, rung = addresses.get(plan.owner or ""), self._rungs[plan.rung]
                wanted[name] = CameraAssignment(
                    camera.settings, self.geometry, address, rung, camera.life, camera.unsent
                )
        told, known = self._assigned.get(decoder, (-1, {}))
        self._assigned[decoder] = self.version, wanted
        # Settings are long, and most changes, such as a ladder step, concern one camera of many.
        kept = frozenset(name for name, each in wanted.items() if told == version and known.get(name) == each)
        changed = tuple(each for name, each in wanted.items() if name not in kept)
        return Assignment(self.version, changed, frozenset(addresses.values()), self.geometry, kept)

    def status(self, name: str, *, remarks: bool = True) -> CameraStatus:
        """Full status of one camera; without ``remarks`` for callers that decide by its reason."""
        camera, route, plan = self._require(name), self.route(name), self._fleet.plan(name)
        status = camera.status(
            route,
            rung=plan.rung,
            rung_reason="" if plan.rung == self._fleet.ladder.rungs[0].name else plan.why,
            windows_per_s=self._fleet.windows_per_s(name),
            expected_lag_s=self._lag_s(plan.owner),
        )
        if not remarks or status.reason or status.state not in ("running", "ended"):
            return status
        return replace(status, reason=self._remark(camera.settings))

    def statuses(self, *, remarks: bool = True) -> Iterator[CameraStatus]:
        """Yield the status of all cameras, sorted by name; those removed meanwhile are left out."""
        return (self.status(name, remarks=remarks) for name in self.cameras if name in self._cameras)

    def _lag_s(self, replica: str | None) -> float:
        if not self._measured or replica is None:
            return 0.0
        lag_s = self._fleet.lag_s(replica)
        return lag_s if math.isfinite(lag_s) else 0.0

    def settings(self, name: str) -> CameraConfig:
        return self._require(name).settings

    def settings_since(self, version: int) -> tuple[CameraConfig, ...]:
        """Settings of cameras added or changed since ``version``."""
        return tuple(camera.settings for camera in self._cameras.values() if camera.declared > version)

    def pictures(self) -> dict[str, PictureHealth]:
        """Last picture statistics reported by decoders, by camera."""
        reports = ((name, camera.report) for name, camera in self._cameras.items())
        return {name: each.picture for name, each in reports if each is not None and each.picture is not None}

    def _require(self, name: str) -> CameraRecord:
        if name not in self._cameras:
            raise UnknownCameraError(f"there is no camera {name!r}{near(name, self._cameras)}")
        return self._cameras[name]
