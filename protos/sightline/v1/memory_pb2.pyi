from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AskRequest(_message.Message):
    __slots__ = ("camera", "text", "conversation", "since_s", "max_new_tokens", "with_pictures", "history")
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WITH_PICTURES_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    camera: str
    text: str
    conversation: str
    since_s: float
    max_new_tokens: int
    with_pictures: bool
    history: History
    def __init__(self, camera: _Optional[str] = ..., text: _Optional[str] = ..., conversation: _Optional[str] = ..., since_s: _Optional[float] = ..., max_new_tokens: _Optional[int] = ..., with_pictures: _Optional[bool] = ..., history: _Optional[_Union[History, _Mapping]] = ...) -> None: ...

class AskAllRequest(_message.Message):
    __slots__ = ("text", "cameras", "since_s", "max_new_tokens", "with_pictures", "at_once", "deadline_s")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CAMERAS_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WITH_PICTURES_FIELD_NUMBER: _ClassVar[int]
    AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    text: str
    cameras: _containers.RepeatedScalarFieldContainer[str]
    since_s: float
    max_new_tokens: int
    with_pictures: bool
    at_once: int
    deadline_s: float
    def __init__(self, text: _Optional[str] = ..., cameras: _Optional[_Iterable[str]] = ..., since_s: _Optional[float] = ..., max_new_tokens: _Optional[int] = ..., with_pictures: _Optional[bool] = ..., at_once: _Optional[int] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class AskAllEvent(_message.Message):
    __slots__ = ("answer", "progress")
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    answer: CameraAnswer
    progress: AskAllProgress
    def __init__(self, answer: _Optional[_Union[CameraAnswer, _Mapping]] = ..., progress: _Optional[_Union[AskAllProgress, _Mapping]] = ...) -> None: ...

class CameraAnswer(_message.Message):
    __slots__ = ("camera", "result", "error", "incidents", "empty")
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    INCIDENTS_FIELD_NUMBER: _ClassVar[int]
    EMPTY_FIELD_NUMBER: _ClassVar[int]
    camera: str
    result: AskResult
    error: str
    incidents: _containers.RepeatedScalarFieldContainer[str]
    empty: bool
    def __init__(self, camera: _Optional[str] = ..., result: _Optional[_Union[AskResult, _Mapping]] = ..., error: _Optional[str] = ..., incidents: _Optional[_Iterable[str]] = ..., empty: _Optional[bool] = ...) -> None: ...

class AskAllProgress(_message.Message):
    __slots__ = ("cameras", "answered", "failed", "tokens", "finished", "empty")
    CAMERAS_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    EMPTY_FIELD_NUMBER: _ClassVar[int]
    cameras: int
    answered: int
    failed: int
    tokens: int
    finished: bool
    empty: int
    def __init__(self, cameras: _Optional[int] = ..., answered: _Optional[int] = ..., failed: _Optional[int] = ..., tokens: _Optional[int] = ..., finished: _Optional[bool] = ..., empty: _Optional[int] = ...) -> None: ...

class History(_message.Message):
    __slots__ = ("turns",)
    TURNS_FIELD_NUMBER: _ClassVar[int]
    turns: _containers.RepeatedCompositeFieldContainer[Turn]
    def __init__(self, turns: _Optional[_Iterable[_Union[Turn, _Mapping]]] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("question", "answer")
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    question: str
    answer: str
    def __init__(self, question: _Optional[str] = ..., answer: _Optional[str] = ...) -> None: ...

class AskEvent(_message.Message):
    __slots__ = ("piece", "result")
    PIECE_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    piece: str
    result: AskResult
    def __init__(self, piece: _Optional[str] = ..., result: _Optional[_Union[AskResult, _Mapping]] = ...) -> None: ...

class AskResult(_message.Message):
    __slots__ = ("text", "moments", "oldest", "newest", "newest_age_s", "tokens_held", "tokens_read", "bytes_read", "first_token_s", "total_s", "degraded", "conversation", "prompt_tokens", "answer_tokens", "yes")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MOMENTS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_AGE_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_HELD_FIELD_NUMBER: _ClassVar[int]
    TOKENS_READ_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    YES_FIELD_NUMBER: _ClassVar[int]
    text: str
    moments: _containers.RepeatedCompositeFieldContainer[Moment]
    oldest: int
    newest: int
    newest_age_s: float
    tokens_held: int
    tokens_read: int
    bytes_read: int
    first_token_s: float
    total_s: float
    degraded: bool
    conversation: str
    prompt_tokens: int
    answer_tokens: int
    yes: float
    def __init__(self, text: _Optional[str] = ..., moments: _Optional[_Iterable[_Union[Moment, _Mapping]]] = ..., oldest: _Optional[int] = ..., newest: _Optional[int] = ..., newest_age_s: _Optional[float] = ..., tokens_held: _Optional[int] = ..., tokens_read: _Optional[int] = ..., bytes_read: _Optional[int] = ..., first_token_s: _Optional[float] = ..., total_s: _Optional[float] = ..., degraded: _Optional[bool] = ..., conversation: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., answer_tokens: _Optional[int] = ..., yes: _Optional[float] = ...) -> None: ...

class Moment(_message.Message):
    __slots__ = ("start", "end", "weight", "ago_s", "picture")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    AGO_S_FIELD_NUMBER: _ClassVar[int]
    PICTURE_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    weight: float
    ago_s: float
    picture: bytes
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., weight: _Optional[float] = ..., ago_s: _Optional[float] = ..., picture: _Optional[bytes] = ...) -> None: ...

class ReplayRequest(_message.Message):
    __slots__ = ("camera", "text", "since_s", "windows")
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    camera: str
    text: str
    since_s: float
    windows: int
    def __init__(self, camera: _Optional[str] = ..., text: _Optional[str] = ..., since_s: _Optional[float] = ..., windows: _Optional[int] = ...) -> None: ...

class ReplayedWindow(_message.Message):
    __slots__ = ("start", "end", "ago_s", "score", "done", "total")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    AGO_S_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    ago_s: float
    score: float
    done: int
    total: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., ago_s: _Optional[float] = ..., score: _Optional[float] = ..., done: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class ForgetRequest(_message.Message):
    __slots__ = ("camera", "before_s", "only_here")
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    BEFORE_S_FIELD_NUMBER: _ClassVar[int]
    ONLY_HERE_FIELD_NUMBER: _ClassVar[int]
    camera: str
    before_s: float
    only_here: bool
    def __init__(self, camera: _Optional[str] = ..., before_s: _Optional[float] = ..., only_here: _Optional[bool] = ...) -> None: ...

class ForgetResponse(_message.Message):
    __slots__ = ("frames", "bytes", "files", "file_bytes", "incidents", "alerts")
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    INCIDENTS_FIELD_NUMBER: _ClassVar[int]
    ALERTS_FIELD_NUMBER: _ClassVar[int]
    frames: int
    bytes: int
    files: int
    file_bytes: int
    incidents: int
    alerts: int
    def __init__(self, frames: _Optional[int] = ..., bytes: _Optional[int] = ..., files: _Optional[int] = ..., file_bytes: _Optional[int] = ..., incidents: _Optional[int] = ..., alerts: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("camera",)
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    camera: str
    def __init__(self, camera: _Optional[str] = ...) -> None: ...

class MemoryStatus(_message.Message):
    __slots__ = ("camera", "frames", "tokens", "oldest", "newest", "cap_bytes", "tiers", "compressor", "organiser", "retriever", "counts")
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    CAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    COMPRESSOR_FIELD_NUMBER: _ClassVar[int]
    ORGANISER_FIELD_NUMBER: _ClassVar[int]
    RETRIEVER_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    camera: str
    frames: int
    tokens: int
    oldest: int
    newest: int
    cap_bytes: int
    tiers: _containers.RepeatedCompositeFieldContainer[MemoryTier]
    compressor: str
    organiser: str
    retriever: str
    counts: _containers.RepeatedCompositeFieldContainer[MemoryCount]
    def __init__(self, camera: _Optional[str] = ..., frames: _Optional[int] = ..., tokens: _Optional[int] = ..., oldest: _Optional[int] = ..., newest: _Optional[int] = ..., cap_bytes: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[MemoryTier, _Mapping]]] = ..., compressor: _Optional[str] = ..., organiser: _Optional[str] = ..., retriever: _Optional[str] = ..., counts: _Optional[_Iterable[_Union[MemoryCount, _Mapping]]] = ...) -> None: ...

class MemoryCount(_message.Message):
    __slots__ = ("name", "count")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    count: int
    def __init__(self, name: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class MemoryTier(_message.Message):
    __slots__ = ("name", "bytes", "trouble")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    bytes: int
    trouble: str
    def __init__(self, name: _Optional[str] = ..., bytes: _Optional[int] = ..., trouble: _Optional[str] = ...) -> None: ...
