from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PictureRequest(_message.Message):
    __slots__ = ("camera", "kept", "width")
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    camera: str
    kept: bool
    width: int
    def __init__(self, camera: _Optional[str] = ..., kept: _Optional[bool] = ..., width: _Optional[int] = ...) -> None: ...

class PictureReply(_message.Message):
    __slots__ = ("jpeg", "etag", "pts", "age_s", "width", "height")
    JPEG_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    PTS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    jpeg: bytes
    etag: str
    pts: int
    age_s: float
    width: int
    height: int
    def __init__(self, jpeg: _Optional[bytes] = ..., etag: _Optional[str] = ..., pts: _Optional[int] = ..., age_s: _Optional[float] = ..., width: _Optional[int] = ..., height: _Optional[int] = ...) -> None: ...

class TestRequest(_message.Message):
    __slots__ = ("camera", "source", "settings_json")
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_JSON_FIELD_NUMBER: _ClassVar[int]
    camera: str
    source: str
    settings_json: str
    def __init__(self, camera: _Optional[str] = ..., source: _Optional[str] = ..., settings_json: _Optional[str] = ...) -> None: ...

class TestReply(_message.Message):
    __slots__ = ("codec", "width", "height", "fps", "gop_pictures", "gop_s", "kbit_s", "cue", "decode", "first_picture_s", "decode_errors", "kept", "jpeg", "kept_jpeg")
    CODEC_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    FPS_FIELD_NUMBER: _ClassVar[int]
    GOP_PICTURES_FIELD_NUMBER: _ClassVar[int]
    GOP_S_FIELD_NUMBER: _ClassVar[int]
    KBIT_S_FIELD_NUMBER: _ClassVar[int]
    CUE_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    FIRST_PICTURE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_ERRORS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    JPEG_FIELD_NUMBER: _ClassVar[int]
    KEPT_JPEG_FIELD_NUMBER: _ClassVar[int]
    codec: str
    width: int
    height: int
    fps: float
    gop_pictures: int
    gop_s: float
    kbit_s: float
    cue: str
    decode: str
    first_picture_s: float
    decode_errors: int
    kept: float
    jpeg: bytes
    kept_jpeg: bytes
    def __init__(self, codec: _Optional[str] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., fps: _Optional[float] = ..., gop_pictures: _Optional[int] = ..., gop_s: _Optional[float] = ..., kbit_s: _Optional[float] = ..., cue: _Optional[str] = ..., decode: _Optional[str] = ..., first_picture_s: _Optional[float] = ..., decode_errors: _Optional[int] = ..., kept: _Optional[float] = ..., jpeg: _Optional[bytes] = ..., kept_jpeg: _Optional[bytes] = ...) -> None: ...

class DiscoverRequest(_message.Message):
    __slots__ = ("network", "user", "password")
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    PASSWORD_FIELD_NUMBER: _ClassVar[int]
    network: str
    user: str
    password: str
    def __init__(self, network: _Optional[str] = ..., user: _Optional[str] = ..., password: _Optional[str] = ...) -> None: ...

class DiscoverReply(_message.Message):
    __slots__ = ("probed", "total", "answered", "asked", "camera")
    PROBED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    probed: int
    total: int
    answered: int
    asked: int
    camera: DiscoveredCamera
    def __init__(self, probed: _Optional[int] = ..., total: _Optional[int] = ..., answered: _Optional[int] = ..., asked: _Optional[int] = ..., camera: _Optional[_Union[DiscoveredCamera, _Mapping]] = ...) -> None: ...

class DiscoveredCamera(_message.Message):
    __slots__ = ("address", "name", "model", "streams", "error")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    address: str
    name: str
    model: str
    streams: _containers.RepeatedCompositeFieldContainer[DiscoveredStream]
    error: str
    def __init__(self, address: _Optional[str] = ..., name: _Optional[str] = ..., model: _Optional[str] = ..., streams: _Optional[_Iterable[_Union[DiscoveredStream, _Mapping]]] = ..., error: _Optional[str] = ...) -> None: ...

class DiscoveredStream(_message.Message):
    __slots__ = ("profile", "codec", "width", "height", "fps", "source")
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    FPS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    profile: str
    codec: str
    width: int
    height: int
    fps: float
    source: str
    def __init__(self, profile: _Optional[str] = ..., codec: _Optional[str] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., fps: _Optional[float] = ..., source: _Optional[str] = ...) -> None: ...

class LiveRequest(_message.Message):
    __slots__ = ("camera",)
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    camera: str
    def __init__(self, camera: _Optional[str] = ...) -> None: ...

class LivePart(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class FootageRequest(_message.Message):
    __slots__ = ("incident", "kind", "offset", "length", "only_about")
    INCIDENT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    ONLY_ABOUT_FIELD_NUMBER: _ClassVar[int]
    incident: str
    kind: str
    offset: int
    length: int
    only_about: bool
    def __init__(self, incident: _Optional[str] = ..., kind: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., only_about: _Optional[bool] = ...) -> None: ...

class FootageAbout(_message.Message):
    __slots__ = ("camera", "media_type", "size", "etag", "note")
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    MEDIA_TYPE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    camera: str
    media_type: str
    size: int
    etag: str
    note: str
    def __init__(self, camera: _Optional[str] = ..., media_type: _Optional[str] = ..., size: _Optional[int] = ..., etag: _Optional[str] = ..., note: _Optional[str] = ...) -> None: ...

class FootagePart(_message.Message):
    __slots__ = ("about", "data")
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    about: FootageAbout
    data: bytes
    def __init__(self, about: _Optional[_Union[FootageAbout, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ForgetFootageRequest(_message.Message):
    __slots__ = ("camera", "before_s")
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    BEFORE_S_FIELD_NUMBER: _ClassVar[int]
    camera: str
    before_s: float
    def __init__(self, camera: _Optional[str] = ..., before_s: _Optional[float] = ...) -> None: ...

class ForgetFootageReply(_message.Message):
    __slots__ = ("files", "bytes", "incidents", "alerts")
    FILES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    INCIDENTS_FIELD_NUMBER: _ClassVar[int]
    ALERTS_FIELD_NUMBER: _ClassVar[int]
    files: int
    bytes: int
    incidents: int
    alerts: int
    def __init__(self, files: _Optional[int] = ..., bytes: _Optional[int] = ..., incidents: _Optional[int] = ..., alerts: _Optional[int] = ...) -> None: ...

class RecordRequest(_message.Message):
    __slots__ = ("camera", "start", "until", "deadline_s", "moment", "only_clip")
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    MOMENT_FIELD_NUMBER: _ClassVar[int]
    ONLY_CLIP_FIELD_NUMBER: _ClassVar[int]
    camera: str
    start: int
    until: int
    deadline_s: float
    moment: int
    only_clip: bool
    def __init__(self, camera: _Optional[str] = ..., start: _Optional[int] = ..., until: _Optional[int] = ..., deadline_s: _Optional[float] = ..., moment: _Optional[int] = ..., only_clip: _Optional[bool] = ...) -> None: ...

class RecordEnd(_message.Message):
    __slots__ = ("first", "last", "note")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    note: str
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ..., note: _Optional[str] = ...) -> None: ...

class RecordPart(_message.Message):
    __slots__ = ("snapshot", "clip", "end")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    snapshot: bytes
    clip: bytes
    end: RecordEnd
    def __init__(self, snapshot: _Optional[bytes] = ..., clip: _Optional[bytes] = ..., end: _Optional[_Union[RecordEnd, _Mapping]] = ...) -> None: ...
