from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CameraState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CAMERA_STATE_UNSPECIFIED: _ClassVar[CameraState]
    CAMERA_STATE_WAITING: _ClassVar[CameraState]
    CAMERA_STATE_CONNECTING: _ClassVar[CameraState]
    CAMERA_STATE_RUNNING: _ClassVar[CameraState]
    CAMERA_STATE_BACKOFF: _ClassVar[CameraState]
    CAMERA_STATE_ERROR: _ClassVar[CameraState]
    CAMERA_STATE_ENDED: _ClassVar[CameraState]
    CAMERA_STATE_PAUSED: _ClassVar[CameraState]
CAMERA_STATE_UNSPECIFIED: CameraState
CAMERA_STATE_WAITING: CameraState
CAMERA_STATE_CONNECTING: CameraState
CAMERA_STATE_RUNNING: CameraState
CAMERA_STATE_BACKOFF: CameraState
CAMERA_STATE_ERROR: CameraState
CAMERA_STATE_ENDED: CameraState
CAMERA_STATE_PAUSED: CameraState

class Question(_message.Message):
    __slots__ = ("id", "text", "threshold", "explain")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    id: str
    text: str
    threshold: float
    explain: bool
    def __init__(self, id: _Optional[str] = ..., text: _Optional[str] = ..., threshold: _Optional[float] = ..., explain: _Optional[bool] = ...) -> None: ...

class AddCameraRequest(_message.Message):
    __slots__ = ("name", "source", "questions", "settings_json", "force", "manager", "takeover")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_JSON_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    MANAGER_FIELD_NUMBER: _ClassVar[int]
    TAKEOVER_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    questions: _containers.RepeatedCompositeFieldContainer[Question]
    settings_json: str
    force: bool
    manager: str
    takeover: bool
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., questions: _Optional[_Iterable[_Union[Question, _Mapping]]] = ..., settings_json: _Optional[str] = ..., force: _Optional[bool] = ..., manager: _Optional[str] = ..., takeover: _Optional[bool] = ...) -> None: ...

class UpdateCameraRequest(_message.Message):
    __slots__ = ("name", "source", "questions", "settings_json", "manager", "takeover", "revision")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_JSON_FIELD_NUMBER: _ClassVar[int]
    MANAGER_FIELD_NUMBER: _ClassVar[int]
    TAKEOVER_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    questions: _containers.RepeatedCompositeFieldContainer[Question]
    settings_json: str
    manager: str
    takeover: bool
    revision: str
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., questions: _Optional[_Iterable[_Union[Question, _Mapping]]] = ..., settings_json: _Optional[str] = ..., manager: _Optional[str] = ..., takeover: _Optional[bool] = ..., revision: _Optional[str] = ...) -> None: ...

class RemoveCameraRequest(_message.Message):
    __slots__ = ("name", "manager", "takeover")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MANAGER_FIELD_NUMBER: _ClassVar[int]
    TAKEOVER_FIELD_NUMBER: _ClassVar[int]
    name: str
    manager: str
    takeover: bool
    def __init__(self, name: _Optional[str] = ..., manager: _Optional[str] = ..., takeover: _Optional[bool] = ...) -> None: ...

class ExportCamerasRequest(_message.Message):
    __slots__ = ("names", "secrets")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    SECRETS_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    secrets: bool
    def __init__(self, names: _Optional[_Iterable[str]] = ..., secrets: _Optional[bool] = ...) -> None: ...

class ExportCamerasResponse(_message.Message):
    __slots__ = ("cameras",)
    CAMERAS_FIELD_NUMBER: _ClassVar[int]
    cameras: _containers.RepeatedCompositeFieldContainer[WrittenCamera]
    def __init__(self, cameras: _Optional[_Iterable[_Union[WrittenCamera, _Mapping]]] = ...) -> None: ...

class WrittenCamera(_message.Message):
    __slots__ = ("name", "manager", "entry_json", "revision")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MANAGER_FIELD_NUMBER: _ClassVar[int]
    ENTRY_JSON_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    name: str
    manager: str
    entry_json: str
    revision: str
    def __init__(self, name: _Optional[str] = ..., manager: _Optional[str] = ..., entry_json: _Optional[str] = ..., revision: _Optional[str] = ...) -> None: ...

class RemoveCameraResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListCamerasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListCamerasResponse(_message.Message):
    __slots__ = ("cameras",)
    CAMERAS_FIELD_NUMBER: _ClassVar[int]
    cameras: _containers.RepeatedCompositeFieldContainer[CameraStatus]
    def __init__(self, cameras: _Optional[_Iterable[_Union[CameraStatus, _Mapping]]] = ...) -> None: ...

class GetCameraRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class CameraStatus(_message.Message):
    __slots__ = ("name", "source", "state", "reason", "retry_in_s", "codec", "width", "height", "cue", "last_frame_age_s", "decoder", "replica", "frames_decoded", "frames_sampled", "decode_errors", "gaps", "windows_done", "windows_gated", "windows_dropped", "windows_lost", "tokens_full", "tokens_kept", "tokens_computed", "latency_s", "last_answers", "memory_bytes", "memory_frames", "memory_oldest_s", "memory_state", "priority", "rung", "rung_reason", "windows_per_s", "expected_lag_s", "manager", "life", "decode")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_IN_S_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    CUE_FIELD_NUMBER: _ClassVar[int]
    LAST_FRAME_AGE_S_FIELD_NUMBER: _ClassVar[int]
    DECODER_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    FRAMES_DECODED_FIELD_NUMBER: _ClassVar[int]
    FRAMES_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    DECODE_ERRORS_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_DONE_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_GATED_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_LOST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FULL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_KEPT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    LAST_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FRAMES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_OLDEST_S_FIELD_NUMBER: _ClassVar[int]
    MEMORY_STATE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RUNG_FIELD_NUMBER: _ClassVar[int]
    RUNG_REASON_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_PER_S_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_LAG_S_FIELD_NUMBER: _ClassVar[int]
    MANAGER_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    state: CameraState
    reason: str
    retry_in_s: float
    codec: str
    width: int
    height: int
    cue: str
    last_frame_age_s: float
    decoder: str
    replica: str
    frames_decoded: int
    frames_sampled: int
    decode_errors: int
    gaps: int
    windows_done: int
    windows_gated: int
    windows_dropped: int
    windows_lost: int
    tokens_full: int
    tokens_kept: int
    tokens_computed: int
    latency_s: float
    last_answers: _containers.RepeatedCompositeFieldContainer[LastAnswer]
    memory_bytes: int
    memory_frames: int
    memory_oldest_s: float
    memory_state: str
    priority: str
    rung: str
    rung_reason: str
    windows_per_s: float
    expected_lag_s: float
    manager: str
    life: str
    decode: str
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., state: _Optional[_Union[CameraState, str]] = ..., reason: _Optional[str] = ..., retry_in_s: _Optional[float] = ..., codec: _Optional[str] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., cue: _Optional[str] = ..., last_frame_age_s: _Optional[float] = ..., decoder: _Optional[str] = ..., replica: _Optional[str] = ..., frames_decoded: _Optional[int] = ..., frames_sampled: _Optional[int] = ..., decode_errors: _Optional[int] = ..., gaps: _Optional[int] = ..., windows_done: _Optional[int] = ..., windows_gated: _Optional[int] = ..., windows_dropped: _Optional[int] = ..., windows_lost: _Optional[int] = ..., tokens_full: _Optional[int] = ..., tokens_kept: _Optional[int] = ..., tokens_computed: _Optional[int] = ..., latency_s: _Optional[float] = ..., last_answers: _Optional[_Iterable[_Union[LastAnswer, _Mapping]]] = ..., memory_bytes: _Optional[int] = ..., memory_frames: _Optional[int] = ..., memory_oldest_s: _Optional[float] = ..., memory_state: _Optional[str] = ..., priority: _Optional[str] = ..., rung: _Optional[str] = ..., rung_reason: _Optional[str] = ..., windows_per_s: _Optional[float] = ..., expected_lag_s: _Optional[float] = ..., manager: _Optional[str] = ..., life: _Optional[str] = ..., decode: _Optional[str] = ...) -> None: ...

class LastAnswer(_message.Message):
    __slots__ = ("question", "score", "positive", "end")
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    POSITIVE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    question: str
    score: float
    positive: bool
    end: int
    def __init__(self, question: _Optional[str] = ..., score: _Optional[float] = ..., positive: _Optional[bool] = ..., end: _Optional[int] = ...) -> None: ...
