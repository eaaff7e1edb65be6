"""``alerts:`` and ``clips:`` — incident rules, health checks, sinks and incident footage."""

import inspect
from datetime import datetime, time, timedelta
from fnmatch import fnmatchcase
from typing import Any, Literal, Self, get_args
from zoneinfo import ZoneInfo

from pydantic import Field, field_validator, model_validator

from cluster.config.problems import ConflictError, Duration, Problem, Section, Size, TimeZone
from cluster.registry import sinks


class ClipsConfig(Section):
    """Snapshots and clips of incidents."""

    enabled: bool = True
    """Keep a snapshot and a clip of each incident."""
    folder: str | None = None
    """Folder of snapshots and clips; null takes `clips` in alerts.folder, or a temporary folder if that is null too."""
    before_s: Duration = Field(default=10.0, ge=0, le=300)
    """How long before its incident a clip starts."""
    after_s: Duration = Field(default=10.0, ge=0, le=300)
    """How long a clip continues after the alert."""
    longest_s: Duration = Field(default=120.0, ge=2, le=900)
    """Maximum length of a clip; longer ones lose their beginning."""
    at_end: bool = False
    """Record a second clip when an incident ends, unless the first one shows its end."""
    ring_bytes: Size = Field(default=2**30, ge=2**20)
    """Memory of one decoder process for the packet rings of all its cameras, which supply a clip's video before the
    incident: bytes, or a size like 1GiB (the default, enough for 25 cameras at 4 Mbit/s)."""
    ring_camera_bytes: Size = Field(default=48 * 2**20, ge=2**18)
    """The same for one camera, like 48MiB (the default, enough for 4.8 Mbit/s with 40 s windows every 8 s)."""
    max_bytes: Size = Field(default=10 * 2**30, ge=2**20)
    """Total size limit of snapshots and clips; beyond it the oldest are deleted."""
    keep_free: Size = Field(default=256 * 2**20, ge=0)
    """Free disk space below which no clip is written."""
    retention: Duration = Field(default=30 * 86_400.0, ge=1)
    """Age at which snapshots and clips are deleted, like 30d."""
    at_once: int = Field(default=256, ge=1, le=10_000)
    """Maximum clips recorded concurrently; further incidents get none, and say so."""
    reencode_height: int = Field(default=720, ge=144, le=2160)
    """Maximum picture height of re-encoded clips: those of cameras that have privacy masks or do not send H.264."""
    url: str = ""
    """Public address of the gateway's HTTP port, like https://sightline.example, for links to snapshots and clips in
    alerts; without it links have no host."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.before_s + self.after_s > self.longest_s:
            raise ValueError(
                f"longest_s = {self.longest_s:g} must be at least before_s + after_s = {self.before_s + self.after_s:g}"
            )
        if self.ring_camera_bytes > self.ring_bytes:
            raise ValueError(
                f"ring_bytes = {self.ring_bytes} (all cameras) must be at least ring_camera_bytes = "
                f"{self.ring_camera_bytes} (one camera)"
            )
        return self

    @field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        if url and not url.startswith(("http://", "https://")):
            raise ValueError(f"must begin with http:// or https://, not {url!r}")
        return url.rstrip("/")


Severity = Literal["info", "warning", "critical"]
EventKind = Literal["new", "update", "end"]


class QuietHoursConfig(Section):
    """Hours in which a sink gets only severe incidents, and the ends of incidents it was sent before."""

    start: str = Field(pattern=r"^([01]\d|2[0-3]):[0-5]\d$")
    """Start, like 22:00."""
    end: str = Field(pattern=r"^([01]\d|2[0-3]):[0-5]\d$")
    """End, like 06:30; if earlier than start, on the next day."""
    timezone: TimeZone = "UTC"
    """Time zone of start and end, like Europe/Berlin."""
    min_severity: Severity | None = "critical"
    """Lowest severity still sent during these hours; null sends none."""

    @model_validator(mode="after")
    def _hours(self) -> Self:
        if self.start == self.end:
            raise ValueError(f"start and end must differ, both are {self.start}")
        return self

    def covers(self, at_s: float) -> bool:
        """Whether ``at_s``, seconds since 1970, falls within the quiet hours."""
        now = datetime.fromtimestamp(at_s, ZoneInfo(self.timezone)).time()
        start, end = time.fromisoformat(self.start), time.fromisoformat(self.end)
        return start <= now < end if start < end else now >= start or now < end

    def end_after(self, at_s: float) -> float:
        """End, in seconds since 1970, of the quiet hours that cover ``at_s``; ``at_s`` itself outside them."""
        if not self.covers(at_s):
            return at_s
        zone = ZoneInfo(self.timezone)
        now = datetime.fromtimestamp(at_s, zone)
        left = datetime.combine(now, time.fromisoformat(self.end)) - now.replace(tzinfo=None)
        over_s = round(at_s + (left % timedelta(days=1)).total_seconds())
        if datetime.fromtimestamp(over_s, zone).utcoffset() != now.utcoffset():
            # The clocks change before the end, which may then not exist or occur twice: search minute by minute.
            over_s = int(at_s // 60) * 60
            while self.covers(over_s):
                over_s += 60
        return float(over_s)


class SinkConfig(Section):
    """One destination of alerts."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[\w.-]+$")
    """Name of the sink: letters, digits, _ . -"""
    kind: str
    """Kind: webhook, notify, homeassistant, mqtt, kafka, alertmanager or log."""
    options: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Parameters of the sink, see docs/alerts.md."""
    min_severity: Severity = "info"
    """Lowest severity of incidents to send."""
    cameras: list[str] = Field(default_factory=list)
    """Send only incidents of cameras that match one of these patterns (* and ?); empty sends all."""
    events: list[EventKind] = Field(default=["new", "update", "end"], min_length=1)
    """Kinds of events to send."""

    quiet_hours: QuietHoursConfig | None = None
    """Hours in which only severe incidents are sent; null for none."""

    def watches(self, camera: str) -> bool:
        """Whether this sink takes the camera's incidents."""
        return not self.cameras or any(fnmatchcase(camera, pattern) for pattern in self.cameras)

    def wants(self, camera: str, severity: Severity) -> bool:
        """Whether this sink takes the camera's incidents of this severity, quiet hours aside."""
        return self.watches(camera) and _reaches(severity, self.min_severity)

    def quiet_for(self, severity: Severity) -> QuietHoursConfig | None:
        """The quiet hours that hold back incidents of this severity, if any."""
        quiet = self.quiet_hours
        graver = quiet is not None and quiet.min_severity is not None and _reaches(severity, quiet.min_severity)
        return None if graver else quiet

    @model_validator(mode="after")
    def _known(self) -> Self:
        found = self._problems()
        if found:
            raise ConflictError(found)
        return self

    def _problems(self) -> list[Problem]:
        from cluster.config.policies import option_problems, policy_parameters

        if self.kind not in sinks:
            return [Problem(("kind",), sinks.unknown(self.kind))]
        sink = sinks.get(self.kind)
        needed = [name for name, each in inspect.signature(sink).parameters.items() if each.default is each.empty]
        if missing := [name for name in needed if name not in self.options]:
            return [Problem(("options", missing[0]), f"is missing; a {self.kind} sink requires it")]
        return option_problems(f"{self.kind} sink", sink, policy_parameters(sink), "options", self.options)


def _reaches(severity: Severity, least: Severity) -> bool:
    order = get_args(Severity)
    return order.index(severity) >= order.index(least)


_AFTER = "How long the condition must last: seconds, or a duration like 2m."
_SEVERITY = "Severity of its incidents."


class ConditionConfig(Section):
    """One camera state that opens an incident."""

    enabled: bool = True
    """Check this condition."""
    after_s: Duration = Field(default=30.0, gt=0, le=86_400, description=_AFTER)
    severity: Severity = Field(default="warning", description=_SEVERITY)


class OfflineConfig(ConditionConfig):
    """No pictures arrive."""

    severity: Severity = Field(default="critical", description=_SEVERITY)


class FrozenConfig(ConditionConfig):
    """Pictures arrive without any change."""

    after_s: Duration = Field(default=60.0, gt=0, le=86_400, description=_AFTER)


class CoveredConfig(ConditionConfig):
    """The picture has suddenly lost its contrast."""

    after_s: Duration = Field(default=5.0, gt=0, le=86_400, description=_AFTER)
    severity: Severity = Field(default="critical", description=_SEVERITY)


class SceneChangeConfig(ConditionConfig):
    """The camera was turned."""

    after_s: Duration = Field(default=30.0, gt=0, le=240)
    """How long the condition must last, at most 240 s: after 300 s the new scene becomes the reference."""


class UnansweredConfig(ConditionConfig):
    """Pictures arrive, but no window is answered."""

    after_s: Duration = Field(default=120.0, gt=0, le=86_400, description=_AFTER)
    severity: Severity = Field(default="critical", description=_SEVERITY)


class HealthConfig(Section):
    """Incidents about the cameras themselves, from reports of decoders and replicas."""

    offline: OfflineConfig = Field(default_factory=OfflineConfig)
    """camera-offline: no pictures arrive."""
    frozen: FrozenConfig = Field(default_factory=FrozenConfig)
    """frozen-image: pictures arrive without any change, not even noise; set after_s to several keyframe intervals of
    the camera."""
    covered: CoveredConfig = Field(default_factory=CoveredConfig)
    """covered-lens: the picture has suddenly lost its contrast."""
    scene_change: SceneChangeConfig = Field(default_factory=SceneChangeConfig)
    """scene-change: most of the picture shows another scene, as after the camera was turned."""
    unanswered: UnansweredConfig = Field(default_factory=UnansweredConfig)
    """camera-unanswered: pictures arrive, but no window is answered for at least eight strides; shed cameras are
    exempt."""
    clear_s: Duration = Field(default=10.0, ge=0, le=3600)
    """How long a condition must be absent before its incident ends."""


class RetryConfig(Section):
    """Backoff between attempts to deliver an alert."""

    first_s: Duration = Field(default=0.5, gt=0, le=60)
    """Wait before the second attempt; doubled after each failure."""
    longest_s: Duration = Field(default=60.0, gt=0, le=3600)
    """Longest wait between two attempts."""
    give_up_s: Duration = Field(default=86_400.0, gt=0)
    """Age after which an alert becomes a dead letter at its next failure, like 24h."""

    @model_validator(mode="after")
    def _grows(self) -> Self:
        if self.longest_s < self.first_s:
            raise ValueError(f"longest_s = {self.longest_s:g} must be at least first_s = {self.first_s:g}")
        return self


class AlertsConfig(Section):
    """Default incident rules, which questions may override, and the sinks of alerts."""

    enabled: bool = True
    """Enable incidents and alerts."""
    folder: str | None = None
    """Folder of the incident database; null takes `alerts` in cluster.state_dir, or a temporary folder if that is null
    too."""
    consecutive: int = Field(default=2, ge=1, le=1000)
    """Consecutive positive windows that open an incident (CodecSight: 2)."""
    release: int = Field(default=2, ge=1, le=1000)
    """Consecutive negative windows that end an incident."""
    hysteresis: float = Field(default=0.1, ge=0, lt=1)
    """How far below the threshold a score still keeps an open incident open; capped at half the threshold."""
    cooldown_s: Duration = Field(default=60.0, ge=0)
    """Cooldown before the question can open another incident: seconds, or a duration like 5m."""
    update_s: Duration = Field(default=60.0, gt=0)
    """Interval between updates of an open incident."""
    stale_s: Duration = Field(default=300.0, gt=0)
    """End an incident after this long without answers, but not before another window and stride have passed."""
    severity: Severity = "warning"
    """Severity of question incidents."""
    health: HealthConfig = Field(default_factory=HealthConfig)
    """Camera health incidents."""
    sinks: list[SinkConfig] = Field(default_factory=list)
    """Destinations of alerts."""
    retry: RetryConfig = Field(default_factory=RetryConfig)
    """Retries of failed deliveries."""
    max_events: int = Field(default=10_000, ge=100)
    """Maximum alerts kept; beyond it the oldest delivered ones are deleted."""
    max_bytes: Size = Field(default=64 * 2**20, ge=2**20)
    """Size limit of the database: bytes, or a size like 64MiB."""
    retention: Duration = Field(default=30 * 86_400.0, ge=60)
    """Age at which ended incidents are deleted, like 30d."""

    @field_validator("sinks")
    @classmethod
    def _one_of_each_name(cls, sinks: list[SinkConfig]) -> list[SinkConfig]:
        names = [sink.name for sink in sinks]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two sinks are called {name!r}; names must be unique")
        return sinks

    @model_validator(mode="after")
    def _held_until_the_next_update(self) -> Self:
        for number, sink in enumerate(self.sinks):
            held_s = sink.options.get("hold_s", getattr(sinks.get(sink.kind), "hold_s", None))
            if held_s is not None and held_s <= self.update_s:
                message = f"must exceed alerts.update_s = {self.update_s:g}, or alerts resolve between updates"
                raise ConflictError([Problem(("sinks", number, "options", "hold_s"), message)])
        return self
