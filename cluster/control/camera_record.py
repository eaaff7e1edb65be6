"""Records of the controller's table: cameras, members, assignments, moves and deletions."""

import itertools
from collections import ChainMap, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from cluster.config import CameraConfig
from cluster.control.accounted_video import AccountedVideo
from cluster.control.admission import MemoryDemand
from cluster.control.cameras.managed import CLUSTER
from cluster.control.demand import Demand, DemandEstimate, Measured, stride_at
from cluster.control.ladder import CameraOnLadder, Rung
from cluster.errors import NotPlacedError
from cluster.types import CameraStatus, PatchGeometry
from cluster.types.reports import (
    CameraReport,
    DecoderInfo,
    ReplicaInfo,
    ReplicaReport,
    ReplicaStatus,
    StreamReport,
    Totals,
)

Loads = tuple[float, ...]
"""Seconds per second at each rung of the ladder."""


@dataclass(slots=True, kw_only=True)
class FleetCamera(CameraOnLadder):
    """A camera of the fleet.

    ``unit``: predicted loads of ``unit_demand`` at each rung at the declared rate, with every window computed;
    ``needed``: these times the measured factor. ``held``: memory on its replica at full quality.

    ``idle``: it has sent nothing yet. ``needed`` counts for admission and placement, but its ``loads`` are zero.
    """

    estimate: DemandEstimate
    unit: Loads
    unit_demand: Demand
    held: MemoryDemand
    idle: bool
    needed: Loads = ()
    owner: str | None = None
    why: str = "as asked for"

    def __post_init__(self) -> None:
        self.use_estimate()

    def use_estimate(self) -> None:
        """Apply the current declaration and measurements."""
        estimate = self.estimate
        self.priority = estimate.declared.priority
        self.needed = tuple([each * estimate.factor for each in self.unit])
        self.loads = tuple(0.0 for _ in self.needed) if self.idle else self.needed

    def windows_per_s(self, rung: Rung) -> float:
        """Windows per second at a rung, gated ones included."""
        return 0.0 if rung.shed else self.estimate.rate / stride_at(self.estimate.declared, rung)


@dataclass(frozen=True, slots=True)
class CameraMove:
    """A camera's move between replicas; ``None`` for no replica. ``warm``: its owner is alive and can hand its state
    over, so that nothing is recomputed."""

    camera: str
    source: str | None
    to: str | None
    warm: bool


@dataclass(frozen=True, slots=True)
class CameraPlan:
    """Replica and rung of a camera, and the reason."""

    camera: str
    owner: str | None
    rung: str
    why: str


@dataclass(frozen=True, slots=True)
class Route:
    """Processes of a camera; ``None`` if none is ready for it."""

    decoder: str | None
    decoder_address: str | None
    replica: str | None
    replica_address: str | None

    def to_decoder(self, camera: str) -> str:
        """``host:port`` of the camera's decoder. Raises ``NotPlacedError``: none is ready, or it is paused."""
        if self.decoder_address is None:
            raise NotPlacedError(f"no decoder runs camera {camera!r}: it is paused, or no decoder is ready yet")
        return self.decoder_address

    def to_replica(self, camera: str) -> str:
        """``host:port`` of the camera's replica. Raises ``NotPlacedError``: none is ready."""
        if self.replica_address is None:
            raise NotPlacedError(f"no replica is ready for camera {camera!r} yet")
        return self.replica_address


@dataclass(frozen=True, slots=True)
class CameraAssignment:
    """A camera that a decoder must run at ``rung``; it waits while ``geometry`` is None, before any replica was ready.
    A different ``life`` means a different camera, even with the same settings. ``unsent``: windows that decoders have
    counted as dropped, for one that starts the camera."""

    settings: CameraConfig
    geometry: PatchGeometry | None
    replica_address: str | None
    rung: Rung
    life: str = ""
    unsent: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Assignment:
    """All cameras of one decoder at one ``version`` of the table. ``alive``: addresses of all live replicas;
    ``geometry``: of the model, None before a replica was ready; ``kept``: names of cameras unchanged since the last
    assignment, which are not repeated in ``cameras``."""

    version: int
    cameras: tuple[CameraAssignment, ...]
    alive: frozenset[str] = frozenset()
    geometry: PatchGeometry | None = None
    kept: frozenset[str] = frozenset()


Info = TypeVar("Info", DecoderInfo, ReplicaInfo)


@dataclass(slots=True)
class Member(Generic[Info]):
    """A live decoder or replica. ``seen_s``: time of its last heartbeat; ``load``, ``load_s``: a replica's last report
    and its time; ``busy``: a decoder's busy share; ``empty``: a decoder that is draining and ran no camera then."""

    info: Info
    seen_s: float
    load: ReplicaReport | None = None
    load_s: float = 0.0
    busy: float = 0.0
    empty: bool = False

    def load_since(self, load: ReplicaReport, now_s: float) -> tuple[float, int, int] | None:
        """Busy share (free questions excluded), steps and windows since the last report; ``None`` at the first."""
        before = self.load
        if before is None or now_s <= self.load_s:
            return None
        busy_s = load.busy_s - load.asked_s - (before.busy_s - before.asked_s)
        return busy_s / (now_s - self.load_s), load.steps - before.steps, load.windows - before.windows

    def replica_status(self, name: str, **found: Any) -> ReplicaStatus:
        """Status of a replica for operators; ``found``: fields from the fleet."""
        names = ("held", "backlog_s", "trouble", "memory")
        reported = {key: getattr(self.load, key) for key in names if self.load is not None}
        return ReplicaStatus(name, self.info.address, **reported, **found)


_OF_DECODER = ("state", "reason", "retry_in_s", "codec", "width", "height", "cue", "decode", "last_frame_age_s")
_OF_REPLICA = ("latency_s", "last_answers", "memory_bytes", "memory_frames", "memory_oldest_s", "memory_state")
"""Fields of a camera's status copied from its decoder's and its replica's reports."""

_UNSENT = "windows_unsent"
"""Total of the dropped windows that decoders counted, the rest being its replicas'."""


@dataclass(slots=True)
class CameraRecord:
    """``manager``: who alone may change it; ``life``: see :class:`CameraStatus`; ``declared``: version of its settings;
    ``counted``: time and rung of its replica's last report, if counts can continue from it."""

    settings: CameraConfig
    manager: str = CLUSTER
    life: str = ""
    declared: int = 0
    report: CameraReport | None = None
    stream: StreamReport | None = None
    counted: tuple[float, str] | None = None
    totals: Totals = field(default_factory=Totals)
    video: AccountedVideo = field(default_factory=AccountedVideo)

    @property
    def unsent(self) -> int:
        """Windows that its decoders counted as dropped."""
        return self.totals.counts().get(_UNSENT, 0)

    def add_decoder(self, report: CameraReport, now_s: float) -> None:
        """Record a decoder's report, also from a former decoder of the camera, which counted until it was told."""
        unsent = report.counts.get("windows_dropped", 0)
        self.totals.update(report.run, {**report.counts, _UNSENT: unsent})
        if not self.settings.paused:
            self.video.add_decoder(report, now_s)

    def add_replica(self, report: StreamReport, rung: str, now_s: float) -> Measured | None:
        """Record its replica's report, received at ``now_s``; returns the counts since the last one, ``None`` across a
        ladder step, a restart or a move."""
        stream, counted = self.stream, self.counted
        self.stream, self.counted = report, (now_s, rung)
        if stream is None or counted is None or (stream.run, counted[1]) != (report.run, rung):
            return None
        grown: dict[str, int] = {}
        # Skipped for most heartbeats, which come between two windows.
        if stream.counts != report.counts or stream.computed != report.computed:
            # Demand is about computed windows, so that `computed` replaces the token counts of all.
            before, now = {**stream.counts, **stream.computed}, {**report.counts, **report.computed}
            grown = {key: value - before.get(key, 0) for key, value in now.items()}
            if min(grown.values(), default=0) < 0:
                return None
        done, gated = grown.get("windows_done", 0), grown.get("windows_gated", 0)
        return Measured(
            period_s=now_s - counted[0],
            windows=done + gated,
            gated=gated,
            tokens_full=grown.get("tokens_full", 0),
            tokens_kept=grown.get("tokens_kept", 0),
            dropped=grown.get("windows_dropped", 0),
            resumed=grown.get("windows_resumed", 0),
        )

    def count_lost(self, report: StreamReport, rung: Rung, now_s: float) -> int:
        """Count windows that a replica's report shows to be uncounted so far; returns how many."""
        if self.settings.paused:
            return 0
        window = self.settings.window
        stride_s = rung.stride_s(window.stride_s, window.length_s)
        if lost := self.video.add_replica(report, now_s, stride_s):
            self.totals.add({"windows_lost": lost})
        return lost

    def status(self, route: Route, **scheduled: Any) -> CameraStatus:
        """Status of the camera; ``scheduled``: fields from the scheduler."""
        name = self.settings.name
        report, stream = self.report, self.stream or StreamReport(name)
        if self.settings.paused:
            report = CameraReport(name, "paused")
        elif report is None:
            reason = "no decoder is ready for it yet" if route.decoder is None else f"{route.decoder} is starting it"
            report = CameraReport(name, "waiting", reason)
        found: dict[str, Any] = {key: getattr(report, key) for key in _OF_DECODER}
        found |= {key: getattr(stream, key) for key in _OF_REPLICA}
        found |= self.totals.counts() | scheduled
        found.pop(_UNSENT, None)
        return CameraStatus(
            name=name,
            source=str(self.settings.source),
            decoder=route.decoder or "",
            replica=route.replica or "",
            priority=self.settings.priority,
            manager=self.manager,
            life=self.life,
            **found,
        )


ORDERS = 256
"""Maximum deletions ordered from a replica per heartbeat; the next one continues."""


class DeletionTracker:
    """Tracks which replicas must still delete the memory of removed cameras, identified by their lives, since another
    camera may have the name by then.

    Args:
        replicas: configured number; while fewer are alive, one that is down may still hold something.
        pending: life -> name, of deletions begun before this process started.
        limit: maximum pending deletions, and maximum completed ones remembered.
    """

    def __init__(self, replicas: int, pending: Mapping[str, str] | None = None, *, limit: int = 4096) -> None:
        self._replicas, self._limit = replicas, limit
        self.pending: OrderedDict[str, str] = OrderedDict(pending or {})
        self._confirmed: dict[str, set[str]] = {}
        # For replicas that got frames of a removed camera from a decoder that learnt of the removal late.
        self._done: OrderedDict[str, str] = OrderedDict()

    def add(self, life: str, camera: str) -> dict[str, str]:
        """Add a removed camera. Returns those whose deletion is given up because too many are pending."""
        self.pending[life] = camera
        lost = dict(self.pending.popitem(last=False) for _ in range(len(self.pending) - self._limit))
        for each in lost:
            self._confirmed.pop(each, None)
        return lost

    def orders_for(self, instance: str, reported: Iterable[str] = ()) -> dict[str, str]:
        """Deletions (life -> name) to order from a replica: those it has not confirmed, and those it ``reported``
        although they were removed."""
        orders = {life: name for life, name in self.pending.items() if instance not in self._confirmed.get(life, ())}
        removed = ChainMap(self.pending, self._done)
        orders |= {life: removed[life] for life in reported if life in removed}
        return dict(itertools.islice(orders.items(), ORDERS))

    def confirm(self, instance: str, lives: Iterable[str], alive: Collection[str]) -> list[str]:
        """Record a replica's confirmed deletions; returns the lives that all ``alive`` replicas have deleted now."""
        for life in self.pending.keys() & set(lives):
            self._confirmed.setdefault(life, set()).add(instance)
        if len(alive) < self._replicas:
            return []
        found = [life for life in self.pending if self._confirmed.get(life, set()).issuperset(alive)]
        for life in found:
            self._done[life] = self.pending.pop(life)
            self._confirmed.pop(life, None)
        while len(self._done) > self._limit:
            self._done.popitem(last=False)
        return found
