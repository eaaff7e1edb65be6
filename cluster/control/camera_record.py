"""One camera in the controller's table: its settings, and what its decoder and its replica last said of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.config import CameraConfig
from cluster.control.assignments import Route
from cluster.control.cameras.managers import CLUSTER
from cluster.control.demand import Measured
from cluster.types import CameraStatus
from cluster.types.reports import CameraReport, StreamReport, Totals


@dataclass(frozen=True, slots=True)
class Counted:
    """What was last counted of a camera, by which replica, when, and at which rung."""

    instance: str
    at_s: float
    rung: str
    counts: Mapping[str, int]


@dataclass(slots=True)
class CameraRecord:
    """``manager``: who alone may change it; ``life``: see :class:`CameraStatus`."""

    settings: CameraConfig
    manager: str = CLUSTER
    life: str = ""
    report: CameraReport | None = None
    stream: StreamReport | None = None
    counted: Counted | None = None
    totals: Totals = field(default_factory=Totals)

    def since(self, now: Counted) -> Measured | None:
        """What was counted since the last time; ``None`` where that straddles a step, a restart or a move."""
        before, self.counted = self.counted, now
        if before is None or (before.instance, before.rung) != (now.instance, now.rung):
            return None
        grown = {key: value - before.counts.get(key, 0) for key, value in now.counts.items()}
        if min(grown.values(), default=0) < 0:
            return None
        done, gated = grown.get("windows_done", 0), grown.get("windows_gated", 0)
        return Measured(
            period_s=now.at_s - before.at_s,
            windows=done + gated,
            gated=gated,
            tokens_full=grown.get("tokens_full", 0),
            tokens_kept=grown.get("tokens_kept", 0),
            dropped=grown.get("windows_dropped", 0),
        )

    def status(
        self, route: Route, *, rung: str, rung_reason: str, windows_per_s: float, expected_lag_s: float
    ) -> CameraStatus:
        """Everything known of it; what is passed in is the scheduler's word."""
        name = self.settings.name
        report, stream = self.report, self.stream or StreamReport(name)
        if report is None:
            reason = "no decoder is ready for it yet" if route.decoder is None else f"{route.decoder} is starting it"
            report = CameraReport(name, "waiting", reason)
        return CameraStatus(
            name=name,
            source=str(self.settings.source),
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
            priority=self.settings.priority,
            rung=rung,
            rung_reason=rung_reason,
            windows_per_s=windows_per_s,
            expected_lag_s=expected_lag_s,
            latency_s=stream.latency_s,
            memory_bytes=stream.memory_bytes,
            memory_frames=stream.memory_frames,
            memory_oldest_s=stream.memory_oldest_s,
            memory_state=stream.memory_state,
            last_answers=stream.last_answers,
            manager=self.manager,
            life=self.life,
            **self.totals.counts(),
        )
