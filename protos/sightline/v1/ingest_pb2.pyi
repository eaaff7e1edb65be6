from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PushRequest(_message.Message):
    __slots__ = ("open", "packets", "end")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PACKETS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    open: Open
    packets: PacketBatch
    end: End
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., packets: _Optional[_Union[PacketBatch, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("camera", "codec", "width", "height", "extradata", "session")
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    EXTRADATA_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    camera: str
    codec: str
    width: int
    height: int
    extradata: bytes
    session: str
    def __init__(self, camera: _Optional[str] = ..., codec: _Optional[str] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., extradata: _Optional[bytes] = ..., session: _Optional[str] = ...) -> None: ...

class PacketBatch(_message.Message):
    __slots__ = ("packets",)
    PACKETS_FIELD_NUMBER: _ClassVar[int]
    packets: _containers.RepeatedCompositeFieldContainer[Packet]
    def __init__(self, packets: _Optional[_Iterable[_Union[Packet, _Mapping]]] = ...) -> None: ...

class Packet(_message.Message):
    __slots__ = ("data", "pts", "dts", "keyframe", "sequence", "discard")
    DATA_FIELD_NUMBER: _ClassVar[int]
    PTS_FIELD_NUMBER: _ClassVar[int]
    DTS_FIELD_NUMBER: _ClassVar[int]
    KEYFRAME_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DISCARD_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    pts: int
    dts: int
    keyframe: bool
    sequence: int
    discard: bool
    def __init__(self, data: _Optional[bytes] = ..., pts: _Optional[int] = ..., dts: _Optional[int] = ..., keyframe: _Optional[bool] = ..., sequence: _Optional[int] = ..., discard: _Optional[bool] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PushReply(_message.Message):
    __slots__ = ("next_sequence", "credit", "dropped", "repeats")
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    next_sequence: int
    credit: int
    dropped: int
    repeats: int
    def __init__(self, next_sequence: _Optional[int] = ..., credit: _Optional[int] = ..., dropped: _Optional[int] = ..., repeats: _Optional[int] = ...) -> None: ...
