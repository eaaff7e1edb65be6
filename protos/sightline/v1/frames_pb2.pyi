from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FrameRefusal(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FRAME_REFUSAL_UNSPECIFIED: _ClassVar[FrameRefusal]
    FRAME_REFUSAL_FRAME: _ClassVar[FrameRefusal]
    FRAME_REFUSAL_SPEC: _ClassVar[FrameRefusal]
    FRAME_REFUSAL_NOT_OPEN: _ClassVar[FrameRefusal]
FRAME_REFUSAL_UNSPECIFIED: FrameRefusal
FRAME_REFUSAL_FRAME: FrameRefusal
FRAME_REFUSAL_SPEC: FrameRefusal
FRAME_REFUSAL_NOT_OPEN: FrameRefusal

class FrameMessage(_message.Message):
    __slots__ = ("open", "frame", "close")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    open: StreamOpen
    frame: Frame
    close: StreamClose
    def __init__(self, open: _Optional[_Union[StreamOpen, _Mapping]] = ..., frame: _Optional[_Union[Frame, _Mapping]] = ..., close: _Optional[_Union[StreamClose, _Mapping]] = ...) -> None: ...

class StreamOpen(_message.Message):
    __slots__ = ("camera", "spec_json", "term")
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    camera: str
    spec_json: str
    term: int
    def __init__(self, camera: _Optional[str] = ..., spec_json: _Optional[str] = ..., term: _Optional[int] = ...) -> None: ...

class StreamClose(_message.Message):
    __slots__ = ("camera", "flush", "hand_over", "released")
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    camera: str
    flush: bool
    hand_over: bool
    released: bool
    def __init__(self, camera: _Optional[str] = ..., flush: _Optional[bool] = ..., hand_over: _Optional[bool] = ..., released: _Optional[bool] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("camera", "index", "pts", "duration", "anchor", "fresh", "grid", "mask", "patches", "activity", "trace", "windows_dropped", "gap")
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PTS_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    PATCHES_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    camera: str
    index: int
    pts: int
    duration: int
    anchor: bool
    fresh: bool
    grid: Grid
    mask: bytes
    patches: bytes
    activity: float
    trace: FrameTrace
    windows_dropped: int
    gap: bool
    def __init__(self, camera: _Optional[str] = ..., index: _Optional[int] = ..., pts: _Optional[int] = ..., duration: _Optional[int] = ..., anchor: _Optional[bool] = ..., fresh: _Optional[bool] = ..., grid: _Optional[_Union[Grid, _Mapping]] = ..., mask: _Optional[bytes] = ..., patches: _Optional[bytes] = ..., activity: _Optional[float] = ..., trace: _Optional[_Union[FrameTrace, _Mapping]] = ..., windows_dropped: _Optional[int] = ..., gap: _Optional[bool] = ...) -> None: ...

class FrameTrace(_message.Message):
    __slots__ = ("parent", "sent_s")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    SENT_S_FIELD_NUMBER: _ClassVar[int]
    parent: str
    sent_s: float
    def __init__(self, parent: _Optional[str] = ..., sent_s: _Optional[float] = ...) -> None: ...

class Grid(_message.Message):
    __slots__ = ("rows", "cols", "patch", "merge", "temporal")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLS_FIELD_NUMBER: _ClassVar[int]
    PATCH_FIELD_NUMBER: _ClassVar[int]
    MERGE_FIELD_NUMBER: _ClassVar[int]
    TEMPORAL_FIELD_NUMBER: _ClassVar[int]
    rows: int
    cols: int
    patch: int
    merge: int
    temporal: int
    def __init__(self, rows: _Optional[int] = ..., cols: _Optional[int] = ..., patch: _Optional[int] = ..., merge: _Optional[int] = ..., temporal: _Optional[int] = ...) -> None: ...

class FrameAck(_message.Message):
    __slots__ = ("camera", "index", "credit", "windows_done", "windows_gated", "windows_dropped", "opened", "refused", "refusal", "closed", "saved", "window_end", "windows_closed", "frames_taken", "frames_lost", "more")
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_DONE_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_GATED_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    WINDOW_END_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_CLOSED_FIELD_NUMBER: _ClassVar[int]
    FRAMES_TAKEN_FIELD_NUMBER: _ClassVar[int]
    FRAMES_LOST_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    camera: str
    index: int
    credit: int
    windows_done: int
    windows_gated: int
    windows_dropped: int
    opened: bool
    refused: str
    refusal: FrameRefusal
    closed: bool
    saved: bool
    window_end: int
    windows_closed: int
    frames_taken: int
    frames_lost: int
    more: _containers.RepeatedCompositeFieldContainer[FrameAck]
    def __init__(self, camera: _Optional[str] = ..., index: _Optional[int] = ..., credit: _Optional[int] = ..., windows_done: _Optional[int] = ..., windows_gated: _Optional[int] = ..., windows_dropped: _Optional[int] = ..., opened: _Optional[bool] = ..., refused: _Optional[str] = ..., refusal: _Optional[_Union[FrameRefusal, str]] = ..., closed: _Optional[bool] = ..., saved: _Optional[bool] = ..., window_end: _Optional[int] = ..., windows_closed: _Optional[int] = ..., frames_taken: _Optional[int] = ..., frames_lost: _Optional[int] = ..., more: _Optional[_Iterable[_Union[FrameAck, _Mapping]]] = ...) -> None: ...
