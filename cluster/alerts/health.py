"""Detects offline, frozen, covered, turned and unanswered cameras from their reported status (``HealthMonitor``)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.alerts.incident import Incident, Subject
from cluster.alerts.open_incidents import OpenIncidents
from cluster.alerts.tracker import Rule
from cluster.config import CameraConfig
from cluster.config.alerts import AlertsConfig, HealthConfig
from cluster.types import CameraStatus, PictureHealth
from cluster.types.cameras import HEALTH_SUBJECTS, NOT_ASKED


@dataclass(frozen=True, slots=True)
class CameraStates:
    """Status of all cameras. ``settings``: of cameras added or changed since the requested ``version``; ``left_out``:
    name -> life of cameras that cannot run now, but were not removed."""

    version: int
    settings: tuple[CameraConfig, ...]
    statuses: tuple[CameraStatus, ...]
    pictures: Mapping[str, PictureHealth]
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def lives(self) -> dict[str, str]:
        """Life of every existing camera, by name."""
        return {**self.left_out, **{status.name: status.life for status in self.statuses}}


def default_rule(alerts: AlertsConfig) -> Rule:
    """Rule of a question whose camera is not known yet."""
    return Rule(**{name: getattr(alerts, name) for name in RULE_KEYS})


def question_rules(camera: CameraConfig, alerts: AlertsConfig) -> dict[str, Rule]:
    """Incident rule of each question: its own settings over those of ``alerts``. ``stale_s`` is at least a window and a
    stride, since answers of overloaded cameras may be a whole window apart."""
    window = camera.window
    return {
        question.id: replace(
            default_rule(alerts),
            threshold=question.threshold,
            consecutive=question.consecutive or alerts.consecutive,
            cooldown_s=alerts.cooldown_s if question.cooldown_s is None else question.cooldown_s,
            stale_s=max(alerts.stale_s, window.length_s + window.stride_s),
            severity=question.severity or alerts.severity,
            text=question.text,
        )
        for question in camera.questions
    }


RULE_KEYS = ("consecutive", "release", "hysteresis", "cooldown_s", "update_s", "stale_s", "severity")
"""Keys of the ``alerts`` section that are fields of a :class:`Rule`."""

OFFLINE, FROZEN, COVERED, SCENE, UNANSWERED = HEALTH_SUBJECTS

STALL_S = 5.0
"""Seconds without a picture after which a camera counts as offline, whatever its connection state."""

COVERED_SHARE = 0.35
"""Share of the usual luma spread below which a picture counts as covered."""

LEAST_SPREAD = 10.0
"""Luma spread, in grey levels, below which a scene (fog, a bare wall) is too flat to detect covering."""

USUAL_S, LEARN_S = 120.0, 10.0
"""Time constant of the usual luma spread, slow enough for dusk, and the learning time before it is used."""

UNANSWERED_STRIDES = 8.0
"""Strides without an answer that are tolerated, e.g. at a lower quality rung or while a replica starts."""

STRANGE_SHARE = 0.5
"""Share of changed cells above which the picture shows another scene."""


@dataclass(slots=True)
class _Debounce:
    """Debounce state of one condition at one camera: when it began to hold, or ceased to."""

    since_s: float | None = None
    gone_s: float | None = None


@dataclass(slots=True)
class _Camera:
    watches: dict[str, _Debounce] = field(default_factory=lambda: {subject: _Debounce() for subject in HEALTH_SUBJECTS})
    delivered: bool = False
    pts: int | None = None
    usual: float = 0.0
    learnt_s: float = 0.0
    looked_s: float | None = None
    answered: int = 0
    answered_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Finding:
    """``since_s``: start of the condition, Unix time, if known more precisely than by polling."""

    holds: bool
    text: str = ""
    since_s: float | None = None


class HealthMonitor:
    """Checks every camera about once a second through :meth:`update`; times are Unix time.

    ``update_s``: interval of update events of an open incident, in seconds.
    """

    def __init__(self, open_incidents: OpenIncidents, rules: HealthConfig, update_s: float = 60.0) -> None:
        self._open_incidents = open_incidents
        self._rules, self._update_s = rules, update_s
        conditions = rules.offline, rules.frozen, rules.covered, rules.scene_change, rules.unanswered
        self._conditions = dict(zip(HEALTH_SUBJECTS, conditions, strict=True))
        self._cameras: dict[str, _Camera] = {}

    def load(self, tracks: Mapping[Subject, Mapping[str, Any]]) -> None:
        """Restore the usual luma spread of covered cameras."""
        for (name, subject), body in tracks.items():
            if subject == COVERED and name not in self._cameras:
                self._cameras[name] = _Camera(delivered=True, usual=float(body["usual"]), learnt_s=LEARN_S)

    def shift(self, by_s: float) -> None:
        """Compensate a clock step of ``by_s``, so that durations stay correct."""
        for camera in self._cameras.values():
            camera.looked_s, camera.answered_s = _shifted(camera.looked_s, by_s), _shifted(camera.answered_s, by_s)
            for watch in camera.watches.values():
                watch.since_s, watch.gone_s = _shifted(watch.since_s, by_s), _shifted(watch.gone_s, by_s)

    def update(
        self,
        status: CameraStatus,
        picture: PictureHealth | None,
        now_s: float,
        *,
        patient: bool = False,
        stride_s: float = 0.0,
    ) -> None:
        """Check one camera; each picture is evaluated once.

        Args:
            status: current status of the camera.
            picture: its newest picture statistics, if any.
            patient: a file source, whose frames may be held back.
            stride_s: seconds between two answers at full quality.
        """
        camera = self._cameras.setdefault(status.name, _Camera())
        offline = _Finding(False) if patient and status.state == "running" else self._offline(camera, status, now_s)
        fresh = status.state == "running" and status.last_frame_age_s <= STALL_S
        # Whether a question is asked is the decoder's word: at a schedule's edges, another clock may differ by minutes.
        expected = fresh and status.reason != NOT_ASKED and not patient
        unanswered = self._unanswered(camera, status, now_s, stride_s, expected=expected)
        findings = {OFFLINE: offline, UNANSWERED: unanswered}
        if status.state in ("paused", "ended"):
            # No pictures arrive that could clear these conditions.
            findings |= dict.fromkeys((FROZEN, COVERED, SCENE), _Finding(False))
        elif picture is not None and fresh and picture.pts != camera.pts:
            elapsed_s = 0.0 if camera.looked_s is None else min(now_s - camera.looked_s, STALL_S)
            camera.pts, camera.looked_s = picture.pts, now_s
            covered = self._covered(camera, picture, elapsed_s)
            findings |= {FROZEN: self._frozen(picture, now_s), COVERED: covered}
            if not covered.holds:
                findings[SCENE] = self._scene_changed(picture)
        for subject, finding in findings.items():
            self._debounce(camera, status, picture, subject, finding, now_s)

    def retain_cameras(self, cameras: Collection[str], now_s: float) -> None:
        known = set(self._cameras) | {
            incident.camera for incident in self._open_incidents.oldest_first if incident.kind == "health"
        }
        for name in known - set(cameras):
            self._cameras.pop(name, None)
            for subject in HEALTH_SUBJECTS:
                self._open_incidents.end_incident(name, subject, now_s, "the camera was removed")
            self._open_incidents.store_track((name, COVERED), None)

    # -- findings -------------------------------------------------------------------------------
    def _offline(self, camera: _Camera, status: CameraStatus, now_s: float) -> _Finding:
        age_s = status.last_frame_age_s
        # Frame counts survive a restart of the cluster, so they alone do not prove that the camera was opened since.
        camera.delivered |= status.state == "running" and status.frames_decoded > 0
        if status.state in ("ended", "paused"):
            return _Finding(False)
        if status.state == "running":
            if status.frames_decoded and age_s <= STALL_S:
                return _Finding(False)
            since_s = now_s - age_s if status.frames_decoded else None
            return _Finding(True, status.reason or "it is connected, but sends no pictures", since_s)
        if status.state == "waiting" and status.reason and not camera.delivered:
            # The cluster is starting and has not opened the camera yet: keep the previous verdict.
            return _Finding(self._open_incidents.get(status.name, OFFLINE) is not None, status.reason)
        return _Finding(True, status.reason or {"waiting": "no agent pushes for it"}.get(status.state, status.state))

    @staticmethod
    def _unanswered(
        camera: _Camera, status: CameraStatus, now_s: float, stride_s: float, *, expected: bool
    ) -> _Finding:
        """Frames arrive, but no window is answered. Shed cameras, of which no answers are expected, are exempt."""
        answered = status.windows_done + status.windows_gated
        if not expected or not status.windows_per_s or answered != camera.answered or camera.answered_s is None:
            camera.answered, camera.answered_s = answered, now_s
        silent_s = now_s - camera.answered_s
        text = f"it sends pictures, but none was answered for {silent_s:.0f} s"
        text = f"{text}: {status.reason}" if status.reason else text
        return _Finding(silent_s > UNANSWERED_STRIDES * stride_s + STALL_S, text, camera.answered_s)

    def _frozen(self, picture: PictureHealth, now_s: float) -> _Finding:
        still = picture.still_s >= self._rules.frozen.after_s
        return _Finding(
            still, f"the picture has not changed at all for {picture.still_s:.0f} s", now_s - picture.still_s
        )

    @staticmethod
    def _covered(camera: _Camera, picture: PictureHealth, elapsed_s: float) -> _Finding:
        known = camera.learnt_s >= LEARN_S and camera.usual >= LEAST_SPREAD
        if known and picture.spread < COVERED_SHARE * camera.usual:
            share = 100 * picture.spread / camera.usual
            return _Finding(True, f"the picture has {share:.0f} % of its usual contrast, mean luma {picture.luma:.0f}")
        if camera.learnt_s == 0.0 and camera.usual == 0.0:
            camera.usual = picture.spread
        # An arithmetic mean while learning, then an exponential one.
        camera.learnt_s += elapsed_s
        weight = elapsed_s / min(max(camera.learnt_s, elapsed_s, 1e-9), USUAL_S)
        camera.usual += weight * (picture.spread - camera.usual)
        return _Finding(False)

    @staticmethod
    def _scene_changed(picture: PictureHealth) -> _Finding:
        text = f"{100 * picture.strangeness:.0f} % of the picture show another scene"
        return _Finding(picture.strangeness > STRANGE_SHARE, text)

    # -- debounce -------------------------------------------------------------------------------
    def _debounce(
        self,
        camera: _Camera,
        status: CameraStatus,
        picture: PictureHealth | None,
        subject: str,
        finding: _Finding,
        now_s: float,
    ) -> None:
        condition, watch = self._conditions[subject], camera.watches[subject]
        incident = self._open_incidents.get(status.name, subject)
        # A condition that was disabled may still have an open incident.
        if not (condition.enabled and finding.holds):
            watch.since_s = None
            watch.gone_s = now_s if watch.gone_s is None else watch.gone_s
            if incident is not None and now_s - watch.gone_s >= self._rules.clear_s:
                self._open_incidents.end_incident(status.name, subject, now_s, "")
                if subject == COVERED:
                    self._open_incidents.store_track((status.name, COVERED), None)
            return
        watch.gone_s = None
        if watch.since_s is None:
            watch.since_s = now_s if finding.since_s is None else finding.since_s
        pts = picture.pts if picture is not None else 0
        if incident is not None:
            # abs(): the clock may have been set back.
            if abs(now_s - incident.updated_s) >= self._update_s:
                self._open_incidents.extend_incident(
                    replace(incident, end=max(incident.end, pts), text=finding.text), now_s, tell=True
                )
        elif now_s - watch.since_s >= condition.after_s:
            self._open_incidents.open_incident(
                Incident(
                    id="",
                    camera=status.name,
                    kind="health",
                    subject=subject,
                    severity=condition.severity,
                    start=pts,
                    end=pts,
                    opened_s=now_s,
                    updated_s=now_s,
                    text=finding.text,
                ),
                f"{now_s}",
            )
            if subject == COVERED:
                self._open_incidents.store_track((status.name, COVERED), {"usual": camera.usual})


def _shifted(at_s: float | None, by_s: float) -> float | None:
    return None if at_s is None else at_s + by_s
