from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Incident(_message.Message):
    __slots__ = ("id", "camera", "kind", "subject", "severity", "start", "end", "score", "windows", "opened_s", "updated_s", "ended_s", "text", "reason", "acknowledged_by", "acknowledged_s", "muted", "snapshot_url", "clip_url", "clip", "footage_note", "question", "verdict", "reviewed_by", "reviewed_s", "level", "memory_shift", "events", "announced_s", "told_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    OPENED_S_FIELD_NUMBER: _ClassVar[int]
    UPDATED_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_BY_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_S_FIELD_NUMBER: _ClassVar[int]
    MUTED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_URL_FIELD_NUMBER: _ClassVar[int]
    CLIP_URL_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    FOOTAGE_NOTE_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REVIEWED_BY_FIELD_NUMBER: _ClassVar[int]
    REVIEWED_S_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MEMORY_SHIFT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_S_FIELD_NUMBER: _ClassVar[int]
    TOLD_S_FIELD_NUMBER: _ClassVar[int]
    id: str
    camera: str
    kind: str
    subject: str
    severity: str
    start: int
    end: int
    score: float
    windows: int
    opened_s: float
    updated_s: float
    ended_s: float
    text: str
    reason: str
    acknowledged_by: str
    acknowledged_s: float
    muted: bool
    snapshot_url: str
    clip_url: str
    clip: str
    footage_note: str
    question: str
    verdict: str
    reviewed_by: str
    reviewed_s: float
    level: float
    memory_shift: int
    events: int
    announced_s: float
    told_s: float
    def __init__(self, id: _Optional[str] = ..., camera: _Optional[str] = ..., kind: _Optional[str] = ..., subject: _Optional[str] = ..., severity: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., score: _Optional[float] = ..., windows: _Optional[int] = ..., opened_s: _Optional[float] = ..., updated_s: _Optional[float] = ..., ended_s: _Optional[float] = ..., text: _Optional[str] = ..., reason: _Optional[str] = ..., acknowledged_by: _Optional[str] = ..., acknowledged_s: _Optional[float] = ..., muted: _Optional[bool] = ..., snapshot_url: _Optional[str] = ..., clip_url: _Optional[str] = ..., clip: _Optional[str] = ..., footage_note: _Optional[str] = ..., question: _Optional[str] = ..., verdict: _Optional[str] = ..., reviewed_by: _Optional[str] = ..., reviewed_s: _Optional[float] = ..., level: _Optional[float] = ..., memory_shift: _Optional[int] = ..., events: _Optional[int] = ..., announced_s: _Optional[float] = ..., told_s: _Optional[float] = ...) -> None: ...

class IncidentEvent(_message.Message):
    __slots__ = ("key", "event", "at_s", "incident", "missed", "silent", "cause", "before_s")
    KEY_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    INCIDENT_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    BEFORE_S_FIELD_NUMBER: _ClassVar[int]
    key: str
    event: str
    at_s: float
    incident: Incident
    missed: int
    silent: bool
    cause: str
    before_s: float
    def __init__(self, key: _Optional[str] = ..., event: _Optional[str] = ..., at_s: _Optional[float] = ..., incident: _Optional[_Union[Incident, _Mapping]] = ..., missed: _Optional[int] = ..., silent: _Optional[bool] = ..., cause: _Optional[str] = ..., before_s: _Optional[float] = ...) -> None: ...

class Delivery(_message.Message):
    __slots__ = ("event", "sink", "state", "attempts", "error")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    SINK_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    event: IncidentEvent
    sink: str
    state: str
    attempts: int
    error: str
    def __init__(self, event: _Optional[_Union[IncidentEvent, _Mapping]] = ..., sink: _Optional[str] = ..., state: _Optional[str] = ..., attempts: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class ListIncidentsRequest(_message.Message):
    __slots__ = ("camera", "subject", "only_open", "since_s", "limit", "scope", "verdict", "before", "within_s")
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    ONLY_OPEN_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    camera: str
    subject: str
    only_open: bool
    since_s: float
    limit: int
    scope: _containers.RepeatedScalarFieldContainer[str]
    verdict: str
    before: str
    within_s: float
    def __init__(self, camera: _Optional[str] = ..., subject: _Optional[str] = ..., only_open: _Optional[bool] = ..., since_s: _Optional[float] = ..., limit: _Optional[int] = ..., scope: _Optional[_Iterable[str]] = ..., verdict: _Optional[str] = ..., before: _Optional[str] = ..., within_s: _Optional[float] = ...) -> None: ...

class ListIncidentsResponse(_message.Message):
    __slots__ = ("incidents",)
    INCIDENTS_FIELD_NUMBER: _ClassVar[int]
    incidents: _containers.RepeatedCompositeFieldContainer[Incident]
    def __init__(self, incidents: _Optional[_Iterable[_Union[Incident, _Mapping]]] = ...) -> None: ...

class GetIncidentRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class IncidentDetail(_message.Message):
    __slots__ = ("incident", "events", "deliveries")
    INCIDENT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    incident: Incident
    events: _containers.RepeatedCompositeFieldContainer[IncidentEvent]
    deliveries: _containers.RepeatedCompositeFieldContainer[Delivery]
    def __init__(self, incident: _Optional[_Union[Incident, _Mapping]] = ..., events: _Optional[_Iterable[_Union[IncidentEvent, _Mapping]]] = ..., deliveries: _Optional[_Iterable[_Union[Delivery, _Mapping]]] = ...) -> None: ...

class AcknowledgeRequest(_message.Message):
    __slots__ = ("id", "by")
    ID_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    id: str
    by: str
    def __init__(self, id: _Optional[str] = ..., by: _Optional[str] = ...) -> None: ...

class ReviewRequest(_message.Message):
    __slots__ = ("id", "verdict", "by")
    ID_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    id: str
    verdict: str
    by: str
    def __init__(self, id: _Optional[str] = ..., verdict: _Optional[str] = ..., by: _Optional[str] = ...) -> None: ...

class TimelineRequest(_message.Message):
    __slots__ = ("camera", "since_s", "until_s")
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    UNTIL_S_FIELD_NUMBER: _ClassVar[int]
    camera: str
    since_s: float
    until_s: float
    def __init__(self, camera: _Optional[str] = ..., since_s: _Optional[float] = ..., until_s: _Optional[float] = ...) -> None: ...

class TimelineReply(_message.Message):
    __slots__ = ("questions", "states", "cooldown_s")
    QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    COOLDOWN_S_FIELD_NUMBER: _ClassVar[int]
    questions: _containers.RepeatedCompositeFieldContainer[QuestionScores]
    states: _containers.RepeatedCompositeFieldContainer[CameraStateChange]
    cooldown_s: float
    def __init__(self, questions: _Optional[_Iterable[_Union[QuestionScores, _Mapping]]] = ..., states: _Optional[_Iterable[_Union[CameraStateChange, _Mapping]]] = ..., cooldown_s: _Optional[float] = ...) -> None: ...

class QuestionScores(_message.Message):
    __slots__ = ("question", "at_s", "highest", "level", "windows", "positives")
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    POSITIVES_FIELD_NUMBER: _ClassVar[int]
    question: str
    at_s: _containers.RepeatedScalarFieldContainer[float]
    highest: _containers.RepeatedScalarFieldContainer[float]
    level: _containers.RepeatedScalarFieldContainer[float]
    windows: _containers.RepeatedScalarFieldContainer[int]
    positives: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, question: _Optional[str] = ..., at_s: _Optional[_Iterable[float]] = ..., highest: _Optional[_Iterable[float]] = ..., level: _Optional[_Iterable[float]] = ..., windows: _Optional[_Iterable[int]] = ..., positives: _Optional[_Iterable[int]] = ...) -> None: ...

class CameraStateChange(_message.Message):
    __slots__ = ("at_s", "state", "rung", "gaps")
    AT_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RUNG_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    at_s: float
    state: str
    rung: str
    gaps: int
    def __init__(self, at_s: _Optional[float] = ..., state: _Optional[str] = ..., rung: _Optional[str] = ..., gaps: _Optional[int] = ...) -> None: ...

class Mute(_message.Message):
    __slots__ = ("camera", "subject", "until_s", "by")
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    UNTIL_S_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    camera: str
    subject: str
    until_s: float
    by: str
    def __init__(self, camera: _Optional[str] = ..., subject: _Optional[str] = ..., until_s: _Optional[float] = ..., by: _Optional[str] = ...) -> None: ...

class MuteRequest(_message.Message):
    __slots__ = ("camera", "subject", "for_s", "by")
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    FOR_S_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    camera: str
    subject: str
    for_s: float
    by: str
    def __init__(self, camera: _Optional[str] = ..., subject: _Optional[str] = ..., for_s: _Optional[float] = ..., by: _Optional[str] = ...) -> None: ...

class UnmuteRequest(_message.Message):
    __slots__ = ("camera", "subject")
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    camera: str
    subject: str
    def __init__(self, camera: _Optional[str] = ..., subject: _Optional[str] = ...) -> None: ...

class ListMutesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListMutesResponse(_message.Message):
    __slots__ = ("mutes",)
    MUTES_FIELD_NUMBER: _ClassVar[int]
    mutes: _containers.RepeatedCompositeFieldContainer[Mute]
    def __init__(self, mutes: _Optional[_Iterable[_Union[Mute, _Mapping]]] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("cameras", "open")
    CAMERAS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    cameras: _containers.RepeatedScalarFieldContainer[str]
    open: bool
    def __init__(self, cameras: _Optional[_Iterable[str]] = ..., open: _Optional[bool] = ...) -> None: ...

class OutboxRequest(_message.Message):
    __slots__ = ("dead", "scope")
    DEAD_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    dead: int
    scope: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, dead: _Optional[int] = ..., scope: _Optional[_Iterable[str]] = ...) -> None: ...

class SinkStatus(_message.Message):
    __slots__ = ("name", "kind", "waiting", "delivered", "failures", "dead", "trouble", "dropped")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    waiting: int
    delivered: int
    failures: int
    dead: int
    trouble: str
    dropped: int
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., waiting: _Optional[int] = ..., delivered: _Optional[int] = ..., failures: _Optional[int] = ..., dead: _Optional[int] = ..., trouble: _Optional[str] = ..., dropped: _Optional[int] = ...) -> None: ...

class OutboxStatus(_message.Message):
    __slots__ = ("sinks", "trouble", "unwritten", "trimmed", "lost", "answers_missed", "dead", "free_bytes")
    SINKS_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    UNWRITTEN_FIELD_NUMBER: _ClassVar[int]
    TRIMMED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_MISSED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    sinks: _containers.RepeatedCompositeFieldContainer[SinkStatus]
    trouble: str
    unwritten: int
    trimmed: int
    lost: int
    answers_missed: int
    dead: _containers.RepeatedCompositeFieldContainer[Delivery]
    free_bytes: int
    def __init__(self, sinks: _Optional[_Iterable[_Union[SinkStatus, _Mapping]]] = ..., trouble: _Optional[str] = ..., unwritten: _Optional[int] = ..., trimmed: _Optional[int] = ..., lost: _Optional[int] = ..., answers_missed: _Optional[int] = ..., dead: _Optional[_Iterable[_Union[Delivery, _Mapping]]] = ..., free_bytes: _Optional[int] = ...) -> None: ...

class ResendRequest(_message.Message):
    __slots__ = ("sink", "key", "scope")
    SINK_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    sink: str
    key: str
    scope: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sink: _Optional[str] = ..., key: _Optional[str] = ..., scope: _Optional[_Iterable[str]] = ...) -> None: ...

class ResendResponse(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class TestSinkRequest(_message.Message):
    __slots__ = ("sink",)
    SINK_FIELD_NUMBER: _ClassVar[int]
    sink: str
    def __init__(self, sink: _Optional[str] = ...) -> None: ...

class TestSinkResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
