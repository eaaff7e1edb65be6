"""The controller's state: cameras, members, who owns what, and what they last said. Plain Python, driven by calls.

Two :class:`~cluster.scheduling.placement.Placement` tables place every camera on a decoder and on a replica. Time comes
in as an argument (``now_s``, monotonic), so that the same code runs in the actor, in the simulator and in tests.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cluster.config import CameraConfig
from cluster.errors import CameraExistsError, UnknownCameraError
from cluster.redaction import redact
from cluster.scheduling.placement import Placement
from cluster.scheduling.reports import CameraReport, DecoderInfo, ReplicaInfo, StreamReport, Totals
from cluster.types import CameraStatus, PatchGeometry

Info = TypeVar("Info", DecoderInfo, ReplicaInfo)


@dataclass(frozen=True, slots=True)
class Route:
    """Where a camera lives now; ``None`` where no process is ready for it."""

    decoder: str | None
    decoder_address: str | None
    replica: str | None
    replica_address: str | None


@dataclass(frozen=True, slots=True)
class CameraAssignment:
    """A camera a decoder must run. Without ``geometry`` no replica has ever been ready: it has to wait."""

    settings: CameraConfig
    geometry: PatchGeometry | None
    replica: str | None
    replica_address: str | None


@dataclass(frozen=True, slots=True)
class Assignment:
    """All cameras of one decoder at one ``version`` of the table."""

    version: int
    cameras: tuple[CameraAssignment, ...]


@dataclass(slots=True)
class Member(Generic[Info]):
    """A decoder or replica that is alive as far as we know."""

    info: Info
    seen_s: float


@dataclass(slots=True)
class _Camera:
    settings: CameraConfig
    report: CameraReport | None = None
    reporter: str = ""
    stream: StreamReport | None = None
    totals: Totals = field(default_factory=Totals)


class Directory:
    """See the module. ``version`` grows with every change a decoder must know of."""

    def __init__(self, *, heartbeat_timeout_s: float = 10.0, slack: float = 0.25) -> None:
        self.version = 0
        self.geometry: PatchGeometry | None = None
        self._timeout_s = heartbeat_timeout_s
        self._cameras: dict[str, _Camera] = {}
        self._decoders: dict[str, Member[DecoderInfo]] = {}
        self._replicas: dict[str, Member[ReplicaInfo]] = {}
        self._on_decoder = Placement(slack=slack)
        self._on_replica = Placement(slack=slack)
        self._running_on: dict[str, str] = {}
        self._held_by: dict[str, str] = {}

    # -- cameras --------------------------------------------------------------------------------
    def add(self, settings: CameraConfig) -> None:
        """Take a camera in; members that said they have it already when they joined keep it.

        Raises:
            CameraExistsError: there is one of that name already with other settings; the same again is no error.
        """
        known = self._cameras.get(settings.name)
        if known is not None:
            if known.settings == settings:
                return
            raise CameraExistsError(
                f"there is a camera {settings.name!r} already; remove it first to change its settings"
            )
        self._cameras[settings.name] = _Camera(settings)
        self._on_decoder.add(settings.name, prefer=self._running_on.pop(settings.name, None))
        self._on_replica.add(settings.name, prefer=self._held_by.pop(settings.name, None))
        self.version += 1

    def remove(self, name: str) -> None:
        """Forget a camera; its decoder stops it when it next asks.

        Raises:
            UnknownCameraError: no such camera.
        """
        self._known(name)
        del self._cameras[name]
        self._on_decoder.remove(name)
        self._on_replica.remove(name)
        self.version += 1

    @property
    def cameras(self) -> list[str]:
        return sorted(self._cameras)

    @property
    def decoders(self) -> dict[str, DecoderInfo]:
        return {name: member.info for name, member in self._decoders.items()}

    @property
    def replicas(self) -> dict[str, ReplicaInfo]:
        return {name: member.info for name, member in self._replicas.items()}

    # -- members --------------------------------------------------------------------------------
    def join_decoder(self, info: DecoderInfo, now_s: float, running: Iterable[str] = ()) -> None:
        """A decoder started, or met a controller that does not know it and says which cameras it is ``running``."""
        known = self._decoders.get(info.name)
        if known is not None and known.info.instance != info.instance:
            self._decoder_gone(info.name)
        self._running_on.update((camera, info.name) for camera in running if camera not in self._cameras)
        self._decoders[info.name] = Member(info, now_s)
        self._on_decoder.join(info.name)
        self.version += 1

    def join_replica(
        self, info: ReplicaInfo, now_s: float, *, known_as: str | None = None, streams: Iterable[str] = ()
    ) -> str:
        """A replica is ready; returns the name it has from now on: the one it was ``known_as``, or the lowest free one,
        so that a restarted replica gets its cameras back. ``streams``: the cameras it holds windows of."""
        for name, member in self._replicas.items():
            if member.info.instance == info.instance:
                member.seen_s = now_s
                return name
        names = (f"replica-{number}" for number in range(len(self._replicas) + 1))
        free = known_as is not None and known_as not in self._replicas
        name = known_as if known_as and free else next(name for name in names if name not in self._replicas)
        self._held_by.update((camera, name) for camera in streams if camera not in self._cameras)
        self._replicas[name] = Member(info, now_s)
        self.geometry = info.geometry
        self._on_replica.join(name)
        self.version += 1
        return name

    def heartbeat_decoder(self, name: str, instance: str, reports: Iterable[CameraReport], now_s: float) -> bool:
        """Take a decoder's reports; false when it is not known (any more) and has to join again."""
        member = self._decoders.get(name)
        if member is None or member.info.instance != instance:
            return False
        member.seen_s = now_s
        for report in reports:
            camera = self._cameras.get(report.camera)
            if camera is not None and self._on_decoder.owner(report.camera) == name:
                camera.report = report
                if camera.reporter != name:
                    # It may come back there, and count from zero again.
                    camera.totals.end(camera.reporter)
                    camera.reporter = name
                camera.totals.update(name, report.counts)
        return True

    def heartbeat_replica(self, instance: str, reports: Iterable[StreamReport], now_s: float) -> bool:
        """Take a replica's reports; false when it is not known (any more) and has to join again."""
        name = next((name for name, member in self._replicas.items() if member.info.instance == instance), None)
        if name is None:
            return False
        self._replicas[name].seen_s = now_s
        for report in reports:
            camera = self._cameras.get(report.camera)
            if camera is None:
                continue
            camera.totals.update(instance, report.counts)
            if self._on_replica.owner(report.camera) == name:
                camera.stream = report
        return True

    def expire(self, now_s: float) -> list[str]:
        """Let everyone go who has been silent for too long; returns their names."""
        decoders = [name for name, member in self._decoders.items() if now_s - member.seen_s > self._timeout_s]
        replicas = [name for name, member in self._replicas.items() if now_s - member.seen_s > self._timeout_s]
        for name in decoders:
            self.leave_decoder(name)
        for name in replicas:
            self.leave_replica(name)
        return decoders + replicas

    def leave_decoder(self, name: str) -> None:
        """A decoder is gone for good: others take its cameras."""
        self._decoder_gone(name)
        del self._decoders[name]
        self._on_decoder.leave(name)
        self.version += 1

    def leave_replica(self, name: str) -> None:
        """A replica is gone: others take its cameras, or they wait for it to come back."""
        member = self._replicas.pop(name)
        for camera in self._cameras.values():
            camera.totals.end(member.info.instance)
        self._on_replica.leave(name)
        self.version += 1

    def _decoder_gone(self, name: str) -> None:
        for key in self._on_decoder.keys(name):
            camera = self._cameras[key]
            camera.report = None
            camera.totals.end(name)

    # -- questions ------------------------------------------------------------------------------
    def route(self, name: str) -> Route:
        """Where a camera lives.

        Raises:
            UnknownCameraError: no such camera.
        """
        self._known(name)
        decoder, replica = self._on_decoder.owner(name), self._on_replica.owner(name)
        return Route(
            decoder,
            self._decoders[decoder].info.address if decoder in self._decoders else None,
            replica,
            self._replicas[replica].info.address if replica in self._replicas else None,
        )

    def assignment(self, decoder: str) -> Assignment:
        """What a decoder must run now."""
        cameras = []
        for name in sorted(self._on_decoder.keys(decoder)):
            route = self.route(name)
            settings = self._cameras[name].settings
            cameras.append(CameraAssignment(settings, self.geometry, route.replica, route.replica_address))
        return Assignment(self.version, tuple(cameras))

    def status(self, name: str) -> CameraStatus:
        """Everything known of one camera.

        Raises:
            UnknownCameraError: no such camera.
        """
        camera, route = self._known(name), self.route(name)
        report, stream = camera.report, camera.stream or StreamReport(name)
        if report is None:
            reason = "no decoder is ready for it yet" if route.decoder is None else f"{route.decoder} is starting it"
            report = CameraReport(name, "waiting", reason)
        return CameraStatus(
            name=name,
            source=redact(camera.settings.source),
            state=report.state,
            reason=report.reason,
            retry_in_s=report.retry_in_s,
            codec=report.codec,
            width=report.width,
            height=report.height,
            cue=report.cue,
            last_frame_age_s=report.last_frame_age_s,
            decoder=route.decoder or "",
            replica=route.replica or "",
            latency_s=stream.latency_s,
            memory_bytes=stream.memory_bytes,
            memory_frames=stream.memory_frames,
            memory_oldest_s=stream.memory_oldest_s,
            memory_state=stream.memory_state,
            last_answers=stream.last_answers,
            **camera.totals.counts(),
        )

    def _known(self, name: str) -> _Camera:
        try:
            return self._cameras[name]
        except KeyError:
            near = difflib.get_close_matches(name, self._cameras, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UnknownCameraError(f"there is no camera {name!r}{hint}") from None
