from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListReplicasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListReplicasResponse(_message.Message):
    __slots__ = ("replicas", "decoders")
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    DECODERS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    decoders: DecoderNumbers
    def __init__(self, replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ..., decoders: _Optional[_Union[DecoderNumbers, _Mapping]] = ...) -> None: ...

class DecoderNumbers(_message.Message):
    __slots__ = ("running", "wanted", "least", "most")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    running: int
    wanted: int
    least: int
    most: int
    def __init__(self, running: _Optional[int] = ..., wanted: _Optional[int] = ..., least: _Optional[int] = ..., most: _Optional[int] = ...) -> None: ...

class DrainReplicaRequest(_message.Message):
    __slots__ = ("name", "undo")
    NAME_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    name: str
    undo: bool
    def __init__(self, name: _Optional[str] = ..., undo: _Optional[bool] = ...) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("name", "address", "draining", "cameras", "held", "lowered", "utilisation", "expected_lag_s", "backlog_s", "trouble", "memory")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    CAMERAS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    LOWERED_FIELD_NUMBER: _ClassVar[int]
    UTILISATION_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_LAG_S_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_S_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    draining: bool
    cameras: int
    held: int
    lowered: int
    utilisation: float
    expected_lag_s: float
    backlog_s: float
    trouble: str
    memory: str
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., draining: _Optional[bool] = ..., cameras: _Optional[int] = ..., held: _Optional[int] = ..., lowered: _Optional[int] = ..., utilisation: _Optional[float] = ..., expected_lag_s: _Optional[float] = ..., backlog_s: _Optional[float] = ..., trouble: _Optional[str] = ..., memory: _Optional[str] = ...) -> None: ...
