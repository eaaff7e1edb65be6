"""``cameras:``, ``source:``, ``questions:`` — cameras, their connections and standing questions."""

import re
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, TypeAlias
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, Field, field_validator

from cluster.config.memory import MemoryConfig
from cluster.config.polygon import MAX_MASKS, MAX_ZONES, PicturePolygon
from cluster.config.problems import Duration, OneOf, Section, TimeZone
from cluster.config.sources import check_address
from cluster.redaction import SourceAddress
from cluster.registry import pruners, refresh_policies
from cluster.types import Question, StreamSpec


class PruningConfig(Section):
    """The pruning policy and its parameters."""

    policy: Annotated[str, OneOf(pruners)] = "replenish"
    """replenish (ours: keeps cells that differ from when they were last encoded), codecsight (as published) or none."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the policy by name; omitted ones take its defaults."""


class SamplingConfig(Section):
    """Sampling of frames from the decoded video; does not reduce decoding."""

    fps: float = Field(default=2.0, gt=0, le=60)
    """Frames sampled per second of the camera's clock."""
    anchor_interval_s: float = Field(default=16.0, gt=0)
    """Seconds between anchors, the samples that keep every patch; must not exceed window.length_s. The default is
    capped at window.length_s."""
    lazy_decode: Literal["off", "auto"] = "off"
    """auto: on the CPU, skip decoding H.264 and HEVC packets while their sizes and quantisers indicate a quiet scene.
    Full decoding resumes by itself where that misses changes."""


class WindowConfig(Section):
    """Length, stride and refresh of every camera's window."""

    length_s: float = Field(default=40.0, gt=0, le=3600)
    """Seconds of video on which each answer is based."""
    stride_s: float = Field(default=8.0, ge=0.1)
    """Seconds between answers; must not exceed length_s."""
    refresh: Annotated[str, OneOf(refresh_policies)] = "anchors"
    """Policy that selects the reused tokens to recompute: all, none, anchors, first_n, shifted, random, topk_deviation
    (CacheBlend), first_percent (VLCache) or budget (ours)."""
    refresh_budget: float | None = Field(default=None, ge=0, le=1)
    """Fraction of the reused tokens to recompute, 0..1; null leaves it to the policy."""
    static_gate: bool = True
    """Repeat the last answer without computing when nothing moved during the stride."""
    max_idle_s: float = Field(default=60.0, ge=0)
    """Maximum time, in seconds, that the static gate repeats an answer; by camera name, up to a third less."""


class BackoffConfig(Section):
    """Exponential backoff between attempts to reach a source, with an upper bound and jitter."""

    initial_s: float = Field(default=0.5, gt=0)
    """Seconds before the first retry."""
    max_s: float = Field(default=30.0, gt=0)
    """Maximum wait in seconds; must not be below initial_s."""
    jitter: float = Field(default=0.2, ge=0, le=1)
    """Random fraction of the wait, 0..1, so that cameras do not reconnect simultaneously."""


class SourceConfig(Section):
    """Timeouts, TLS and playback of sources; a camera overrides them under ``source_options``."""

    connect_timeout_s: float = Field(default=5.0, gt=0)
    """Timeout for connecting to a camera, in seconds."""
    frozen_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds without a packet after which a camera counts as frozen."""
    ca_file: str | None = Field(default=None, min_length=1)
    """PEM file, on the decoders' machines, of certificate authorities. The certificate of an rtsps, https or rtmps
    server must be signed by one of them for the host in its address, and HLS is refused because the addresses in its
    playlists cannot be verified. null trusts any certificate."""
    backoff: BackoffConfig = Field(default_factory=BackoffConfig)
    """Backoff between reconnection attempts."""
    loop: bool = False
    """Files: loop, with continuous timestamps."""
    realtime: bool = False
    """Files: deliver packets in real time instead of as fast as possible."""
    speed: float = Field(default=1.0, gt=0, le=1000)
    """Files with realtime: playback speed."""
    decoded_bytes: int = Field(default=192 * 2**20, ge=2**20)
    """Maximum bytes of decoded pictures held by a camera's decoder. 8-bit H.264 and HEVC take 2.25 bytes per pixel for
    each reference picture the video declares, plus two; video that needs more is not decoded, and the camera reports
    it. The default of 192 MiB allows 4K with 8 references; 8K with 4 takes 430 MiB."""


Day: TypeAlias = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-(?:([01]\d|2[0-3]):([0-5]\d)|(24):(00))")


def _minutes(text: str) -> tuple[int, int]:
    """Parse ``HH:MM-HH:MM`` into minutes since midnight, start and end. Raises ``ValueError``: another format, or start
    equals end."""
    found = _HOURS.fullmatch(text)
    if found is None:
        raise ValueError(f"hours are written like 08:00-18:30 or 22:00-06:00, not {text[:40]!r}")
    hour, minute, *end = [int(each) for each in found.groups() if each is not None]
    begin, until = 60 * hour + minute, 60 * end[0] + end[1]
    if begin == until:
        raise ValueError(f"hours {text} start and end at the same time; omit hours to ask all day")
    return begin, until


def _check_hours(text: str) -> str:
    _minutes(text)
    return text


Hours: TypeAlias = Annotated[str, AfterValidator(_check_hours)]


class ScheduleConfig(Section):
    """Local days and hours; hours that cross midnight belong to the day on which they start."""

    days: list[Day] = Field(default_factory=lambda: list(DAYS), min_length=1)
    """Days of the week."""
    hours: list[Hours] = Field(default_factory=list, max_length=16)
    """Hours on these days, each like 08:00-18:30 or, across midnight, 22:00-06:00; empty means all day."""
    timezone: TimeZone = Field(default="UTC", max_length=64)
    """Time zone of days and hours, like Europe/Berlin."""

    def holds(self, at_s: float) -> bool:
        """Whether ``at_s``, seconds since 1970, falls within the schedule."""
        now = datetime.fromtimestamp(at_s, ZoneInfo(self.timezone))
        minute = 60 * now.hour + now.minute
        today, yesterday = DAYS[now.weekday()], DAYS[(now.date() - timedelta(days=1)).weekday()]
        if not self.hours:
            return today in self.days
        for begin, end in map(_minutes, self.hours):
            crosses = end < begin
            if today in self.days and minute >= begin and (crosses or minute < end):
                return True
            if crosses and yesterday in self.days and minute < end:
                return True
        return False


class QuestionConfig(Section):
    """One standing yes/no question."""

    id: str = Field(min_length=1, max_length=64, pattern=r"^[\w.-]+$")
    """Short name of the question: letters, digits, _ . -"""
    text: str = Field(min_length=1, max_length=2000)
    """Yes/no question in plain language."""
    threshold: float = Field(default=0.5, gt=0, lt=1)
    """Score, 0..1, at or above which an answer is positive."""
    explain: bool = False
    """Also generate an explanation; costs time on every window."""

    consecutive: int | None = Field(default=None, ge=1, le=1000)
    """Consecutive positive windows that open an incident; null takes the alerts section's."""
    cooldown_s: Duration | None = Field(default=None, ge=0)
    """Cooldown before the question can open another incident; null takes the alerts section's."""
    severity: Literal["info", "warning", "critical"] | None = None
    """Severity of its incidents; null takes the alerts section's."""
    when: ScheduleConfig | None = None
    """Days and hours in which the question is asked; null means always. At other times it costs nothing."""

    @field_validator("id")
    @classmethod
    def _not_a_state(cls, name: str) -> str:
        from cluster.types.cameras import HEALTH_SUBJECTS

        if name in HEALTH_SUBJECTS:
            raise ValueError(f"must not be {name!r}, which names a state of the camera itself (docs/alerts.md)")
        return name

    @field_validator("text")
    @classmethod
    def _yes_or_no(cls, text: str) -> str:
        from cluster.types.cameras import is_open_question

        if is_open_question(text):
            raise ValueError(
                f"{text!r} asks for more than yes or no; word it like 'Is …?', or ask it with `sightline ask`"
            )
        return text

    def is_asked(self, at_s: float) -> bool:
        """Whether the question is asked at ``at_s``, seconds since 1970."""
        return self.when is None or self.when.holds(at_s)

    def question(self) -> Question:
        return Question(self.id, self.text, self.threshold, self.explain)


DecodeName: TypeAlias = Literal["auto", "cuda", "cpu"]
PriorityName: TypeAlias = Literal["critical", "normal", "background"]


class CameraEntry(Section):
    """A camera as declared; its sections override individual keys of the global ones."""

    name: str = Field(min_length=1, max_length=128, pattern=r"^\w[\w.-]*$")
    """Unique name of the camera: letters, digits, _ . -, not starting with . or -"""
    source: Annotated[SourceAddress, AfterValidator(check_address)] = SourceAddress()
    """rtsp(s)://, http(s):// (HLS, MPEG-TS, MJPEG) or rtmp(s):// address, path of a video file, v4l2:///dev/video0 for
    a USB camera that sends MJPEG, or empty for a camera that pushes over gRPC."""
    paused: bool = False
    """Neither connect, decode nor ask; the camera's memory is kept."""
    priority: PriorityName = "normal"
    """Priority class: critical is kept on time at the expense of others, background is shed first."""
    sampling: SamplingConfig | None = None
    """Keys that differ from the global sampling section."""
    pruning: PruningConfig | None = None
    """Keys that differ from the global pruning section."""
    window: WindowConfig | None = None
    """Keys that differ from the global window section."""
    memory: MemoryConfig | None = None
    """Keys that differ from the global memory section."""
    source_options: SourceConfig | None = None
    """Keys that differ from the global source section."""
    decode: DecodeName | None = None
    """Where this camera is decoded: auto, cuda or cpu; null takes cluster.decode."""
    questions: list[QuestionConfig] | None = None
    """Questions of this camera, in place of the global ones."""
    privacy_masks: list[PicturePolygon] = Field(default_factory=list, max_length=MAX_MASKS)
    """Parts of the picture blacked out before any processing: each a list of points [x, y], text like '0,0 0.3,0
    0.3,0.5', or a rectangle {x, y, width, height}, in fractions of the picture's width and height, 0..1."""
    zones: list[PicturePolygon] = Field(default_factory=list, max_length=MAX_ZONES)
    """Parts of the picture outlined for the model in red, yellow, blue and green, in this order; questions name them by
    colour, as in 'Is anyone inside the red zone?'. Same formats as privacy_masks."""


class CameraConfig(Section):
    """A camera with every setting resolved (global sections, then its own keys); see :class:`CameraEntry`."""

    name: str
    source: SourceAddress
    paused: bool = False
    priority: PriorityName = "normal"
    sampling: SamplingConfig
    pruning: PruningConfig
    window: WindowConfig
    memory: MemoryConfig
    source_options: SourceConfig
    decode: DecodeName = "auto"
    questions: list[QuestionConfig]
    privacy_masks: list[PicturePolygon] = Field(default_factory=list)
    zones: list[PicturePolygon] = Field(default_factory=list)

    def asks_at(self, at_s: float) -> bool:
        """Whether any question is asked at ``at_s``, seconds since 1970."""
        return not self.questions or any(each.is_asked(at_s) for each in self.questions)

    def stream_spec(self, at_s: float | None = None) -> StreamSpec:
        """Stream specification for the engine with the questions asked at ``at_s`` (seconds since 1970); with all
        questions if ``at_s`` is None or none is asked then."""
        asked = [each for each in self.questions if at_s is None or each.is_asked(at_s)] or self.questions
        return StreamSpec(
            stream=self.name,
            questions=tuple(question.question() for question in asked),
            window_s=self.window.length_s,
            fps=self.sampling.fps,
            # Without pruning every frame may open a window.
            lookback_s=0.0 if self.pruning.policy == "none" else self.sampling.anchor_interval_s,
            **self.window.model_dump(exclude={"length_s"}),
            patient=self.is_patient,
            memory=self.memory.spec(),
            priority=self.priority,
        )

    @property
    def is_file(self) -> bool:
        return bool(self.source) and self.source.scheme in ("", "file", "demo")

    @property
    def is_patient(self) -> bool:
        """Whether the source is a file read as fast as possible, so that its frames may be held back."""
        return self.is_file and not self.source_options.realtime

    @property
    def is_pushed(self) -> bool:
        """Whether a push agent sends the packets."""
        return not self.source
