from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchRequest(_message.Message):
    __slots__ = ("cameras", "recent", "after", "watching_s")
    CAMERAS_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    WATCHING_S_FIELD_NUMBER: _ClassVar[int]
    cameras: _containers.RepeatedScalarFieldContainer[str]
    recent: bool
    after: int
    watching_s: float
    def __init__(self, cameras: _Optional[_Iterable[str]] = ..., recent: _Optional[bool] = ..., after: _Optional[int] = ..., watching_s: _Optional[float] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("camera", "window", "start", "end", "question", "score", "positive", "text", "gated", "tokens", "timing", "missed", "trace", "incarnation", "memory_shift", "number", "age_s")
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    POSITIVE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    GATED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_SHIFT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    camera: str
    window: int
    start: int
    end: int
    question: str
    score: float
    positive: bool
    text: str
    gated: bool
    tokens: TokenCount
    timing: Timing
    missed: int
    trace: str
    incarnation: str
    memory_shift: int
    number: int
    age_s: float
    def __init__(self, camera: _Optional[str] = ..., window: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., question: _Optional[str] = ..., score: _Optional[float] = ..., positive: _Optional[bool] = ..., text: _Optional[str] = ..., gated: _Optional[bool] = ..., tokens: _Optional[_Union[TokenCount, _Mapping]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., missed: _Optional[int] = ..., trace: _Optional[str] = ..., incarnation: _Optional[str] = ..., memory_shift: _Optional[int] = ..., number: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class TokenCount(_message.Message):
    __slots__ = ("full", "kept", "reused", "refreshed", "new", "query", "encoded")
    FULL_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    REUSED_FIELD_NUMBER: _ClassVar[int]
    REFRESHED_FIELD_NUMBER: _ClassVar[int]
    NEW_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    ENCODED_FIELD_NUMBER: _ClassVar[int]
    full: int
    kept: int
    reused: int
    refreshed: int
    new: int
    query: int
    encoded: int
    def __init__(self, full: _Optional[int] = ..., kept: _Optional[int] = ..., reused: _Optional[int] = ..., refreshed: _Optional[int] = ..., new: _Optional[int] = ..., query: _Optional[int] = ..., encoded: _Optional[int] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("queue_s", "vision_s", "plan_s", "llm_s", "latency_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    VISION_S_FIELD_NUMBER: _ClassVar[int]
    PLAN_S_FIELD_NUMBER: _ClassVar[int]
    LLM_S_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    vision_s: float
    plan_s: float
    llm_s: float
    latency_s: float
    def __init__(self, queue_s: _Optional[float] = ..., vision_s: _Optional[float] = ..., plan_s: _Optional[float] = ..., llm_s: _Optional[float] = ..., latency_s: _Optional[float] = ...) -> None: ...
