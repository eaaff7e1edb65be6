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
    """Folder of snapshots and clips; null takes `clips` in alerts.folder, or keeps them until the cluster stops where
    that is null too."""
    before_s: Duration = Field(default=10.0, ge=0, le=300)
    """Lead time of a clip before its incident."""
    after_s: Duration = Field(default=10.0, ge=0, le=300)
    """Time that a clip continues after the alert."""
    longest_s: Duration = Field(default=120.0, ge=2, le=900)
    """Longest clip; longer ones are cut at the beginning."""
    at_end: bool = False
    """Record a second clip when an incident ends, unless the first one shows its end."""
    ring_bytes: Size = Field(default=2**30, ge=2**20)
    """Size of a decoder process's packet rings for all its cameras, from which clips begin before their incident:
    bytes, or a size like 1GiB (the default, which 25 cameras of 4 Mbit/s take)."""
    ring_camera_bytes: Size = Field(default=48 * 2**20, ge=2**18)
    """The same of one camera, like 48MiB (the default, 4.8 Mbit/s with windows of 40 s every 8 s)."""
    max_bytes: Size = Field(default=10 * 2**30, ge=2**20)
    """Size limit of snapshots and clips; the oldest are deleted."""
    keep_free: Size = Field(default=256 * 2**20, ge=0)
    """Free disk space below which no clip is written."""
    retention: Duration = Field(default=30 * 86_400.0, ge=1)
    """Age at which snapshots and clips are deleted, like 30d."""
    at_once: int = Field(default=256, ge=1, le=10_000)
    """Concurrent clips; further incidents get none, which is noted in them."""
    reencode_height: int = Field(default=720, ge=144, le=2160)
    """Largest picture height of re-encoded clips: of cameras with privacy masks, or that do not send H.264."""
    url: str = ""
    """Address of the gateway's HTTP port as people reach it, like https://sightline.example: alerts link to snapshots
    and clips there. Without it the links have no host."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.before_s + self.after_s > self.longest_s:
            raise ValueError(
                f"longest_s = {self.longest_s:g} must be at least before_s + after_s = {self.before_s + self.after_s:g}"
            )
        if self.ring_camera_bytes > self.ring_bytes:
            raise ValueError(
                f"ring_bytes = {self.ring_bytes}, of all cameras, must be at least ring_camera_bytes = "
                f"{self.ring_camera_bytes}, of one"
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
    """Hours in which a sink gets only what is grave, and the ends of what it was told before."""

    start: str = Field(pattern=r"^([01]\d|2[0-3]):[0-5]\d$")
    """Begin, like 22:00."""
    end: str = Field(pattern=r"^([01]\d|2[0-3]):[0-5]\d$")
    """End, like 06:30; before start: on the next day."""
    timezone: TimeZone = "UTC"
    """Time zone of both, like Europe/Berlin."""
    min_severity: Severity | None = "critical"
    """Lowest severity that is sent all the same; null: none."""

    @model_validator(mode="after")
    def _hours(self) -> Self:
        if self.start == self.end:
            raise ValueError(f"start and end must differ, both are {self.start}")
        return self

    def covers(self, at_s: float) -> bool:
        """Whether a moment, seconds since 1970, lies in them."""
        now = datetime.fromtimestamp(at_s, ZoneInfo(self.timezone)).time()
        start, end = time.fromisoformat(self.start), time.fromisoformat(self.end)
        return start <= now < end if start < end else now >= start or now < end

    def end_after(self, at_s: float) -> float:
        """When those that cover a moment are over, seconds since 1970; the moment itself if none do."""
        if not self.covers(at_s):
            return at_s
        zone = ZoneInfo(self.timezone)
        now = datetime.fromtimestamp(at_s, zone)
        left = datetime.combine(now, time.fromisoformat(self.end)) - now.replace(tzinfo=None)
        over_s = round(at_s + (left % timedelta(days=1)).total_seconds())
        if datetime.fromtimestamp(over_s, zone).utcoffset() != now.utcoffset():
            # The clocks change before: they may skip the end, or repeat what is before or after it.
            over_s = int(at_s // 60) * 60
            while self.covers(over_s):
                over_s += 60
        return float(over_s)


class SinkConfig(Section):
    """A destination of alerts."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[\w.-]+$")
    """Name of the sink: letters, digits, _ . -"""
    kind: str
    """Kind: webhook, notify, homeassistant, mqtt, kafka, alertmanager or log."""
    options: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Parameters of the sink, see docs/alerts.md."""
    min_severity: Severity = "info"
    """Lowest severity of incidents that are sent."""
    cameras: list[str] = Field(default_factory=list)
    """Only incidents of cameras that match one of these patterns with * and ?."""
    events: list[EventKind] = Field(default=["new", "update", "end"], min_length=1)
    """Which events are sent."""

    quiet_hours: QuietHoursConfig | None = None
    """Hours in which only grave incidents are sent; null: none."""

    def watches(self, camera: str) -> bool:
        """Whether the camera's incidents are for this sink."""
        return not self.cameras or any(fnmatchcase(camera, pattern) for pattern in self.cameras)

    def wants(self, camera: str, severity: Severity) -> bool:
        """Whether incidents of that severity at the camera are for this sink, at some hour."""
        return self.watches(camera) and _reaches(severity, self.min_severity)

    def quiet_for(self, severity: Severity) -> QuietHoursConfig | None:
        """The quiet hours that hold back incidents of that severity, if any."""
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
            return [Problem(("options", missing[0]), f"is missing; a {self.kind} sink cannot do without")]
        return option_problems(f"{self.kind} sink", sink, policy_parameters(sink), "options", self.options)


def _reaches(severity: Severity, least: Severity) -> bool:
    order = get_args(Severity)
    return order.index(severity) >= order.index(least)


_AFTER = "Time it must last: seconds, or like 2m."
_SEVERITY = "Severity of its incidents."


class ConditionConfig(Section):
    """One camera state that opens an incident."""

    enabled: bool = True
    """Whether this condition is checked."""
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
    """Time it must last, at most 240 s: after 300 s the new scene is the reference."""


class UnansweredConfig(ConditionConfig):
    """Pictures arrive, but no window is answered."""

    after_s: Duration = Field(default=120.0, gt=0, le=86_400, description=_AFTER)
    severity: Severity = Field(default="critical", description=_SEVERITY)


class HealthConfig(Section):
    """Incidents of the cameras themselves, from reports of decoders and replicas."""

    offline: OfflineConfig = Field(default_factory=OfflineConfig)
    """camera-offline: no pictures arrive."""
    frozen: FrozenConfig = Field(default_factory=FrozenConfig)
    """frozen-image: pictures arrive without any change, not even noise; after_s should be some of the camera's keyframe
    intervals."""
    covered: CoveredConfig = Field(default_factory=CoveredConfig)
    """covered-lens: the picture has suddenly lost its contrast."""
    scene_change: SceneChangeConfig = Field(default_factory=SceneChangeConfig)
    """scene-change: most of the picture shows another scene, as after turning the camera."""
    unanswered: UnansweredConfig = Field(default_factory=UnansweredConfig)
    """camera-unanswered: pictures arrive, but no window is answered for at least eight strides; shed cameras are
    exempt."""
    clear_s: Duration = Field(default=10.0, ge=0, le=3600)
    """Time a condition must be gone before its incident ends."""


class RetryConfig(Section):
    """Backoff of a sink that does not accept an alert."""

    first_s: Duration = Field(default=0.5, gt=0, le=60)
    """Seconds before the second attempt; doubled after each."""
    longest_s: Duration = Field(default=60.0, gt=0, le=3600)
    """Longest wait between two attempts."""
    give_up_s: Duration = Field(default=86_400.0, gt=0)
    """Age of an alert from which a failure makes it a dead letter: like 24h."""

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
    """Folder of the incident database; null keeps it until the cluster stops."""
    consecutive: int = Field(default=2, ge=1, le=1000)
    """Positive windows in a row that open an incident (CodecSight: 2)."""
    release: int = Field(default=2, ge=1, le=1000)
    """Negative windows in a row that end it."""
    hysteresis: float = Field(default=0.1, ge=0, lt=1)
    """An incident stays open down to the question's threshold less this, at least half of it."""
    cooldown_s: Duration = Field(default=60.0, ge=0)
    """Cooldown before the question can open another incident: seconds, or like 5m."""
    update_s: Duration = Field(default=60.0, gt=0)
    """Interval of updates of an open incident."""
    stale_s: Duration = Field(default=300.0, gt=0)
    """Close the incident after this long without answers, but not before another window and stride."""
    severity: Severity = "warning"
    """Severity of incidents of questions."""
    health: HealthConfig = Field(default_factory=HealthConfig)
    """Incidents of camera health."""
    sinks: list[SinkConfig] = Field(default_factory=list)
    """Destinations of alerts."""
    retry: RetryConfig = Field(default_factory=RetryConfig)
    """Retries of failed deliveries."""
    max_events: int = Field(default=10_000, ge=100)
    """Most alerts kept; beyond it the oldest delivered ones are deleted."""
    max_bytes: Size = Field(default=64 * 2**20, ge=2**20)
    """Size limit of the database: bytes, or like 64MiB."""
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
                message = f"must be longer than alerts.update_s = {self.update_s:g}: alerts would end between updates"
                raise ConflictError([Problem(("sinks", number, "options", "hold_s"), message)])
        return self
