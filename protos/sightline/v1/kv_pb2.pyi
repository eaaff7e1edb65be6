from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KVOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_OUTCOME_UNSPECIFIED: _ClassVar[KVOutcome]
    KV_OUTCOME_HIT: _ClassVar[KVOutcome]
    KV_OUTCOME_MISS: _ClassVar[KVOutcome]
    KV_OUTCOME_RETRY: _ClassVar[KVOutcome]
KV_OUTCOME_UNSPECIFIED: KVOutcome
KV_OUTCOME_HIT: KVOutcome
KV_OUTCOME_MISS: KVOutcome
KV_OUTCOME_RETRY: KVOutcome

class KVKey(_message.Message):
    __slots__ = ("stream", "layer", "head", "block")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    stream: str
    layer: int
    head: int
    block: int
    def __init__(self, stream: _Optional[str] = ..., layer: _Optional[int] = ..., head: _Optional[int] = ..., block: _Optional[int] = ...) -> None: ...

class StoreRequest(_message.Message):
    __slots__ = ("fingerprint", "blocks")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    blocks: _containers.RepeatedCompositeFieldContainer[StoredBlock]
    def __init__(self, fingerprint: _Optional[str] = ..., blocks: _Optional[_Iterable[_Union[StoredBlock, _Mapping]]] = ...) -> None: ...

class StoredBlock(_message.Message):
    __slots__ = ("key", "data", "cap_bytes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    key: KVKey
    data: bytes
    cap_bytes: int
    def __init__(self, key: _Optional[_Union[KVKey, _Mapping]] = ..., data: _Optional[bytes] = ..., cap_bytes: _Optional[int] = ...) -> None: ...

class StoreReply(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedScalarFieldContainer[KVOutcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[KVOutcome, str]]] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("fingerprint", "keys")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    keys: _containers.RepeatedCompositeFieldContainer[KVKey]
    def __init__(self, fingerprint: _Optional[str] = ..., keys: _Optional[_Iterable[_Union[KVKey, _Mapping]]] = ...) -> None: ...

class LoadReply(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[LoadedBlock]
    def __init__(self, blocks: _Optional[_Iterable[_Union[LoadedBlock, _Mapping]]] = ...) -> None: ...

class LoadedBlock(_message.Message):
    __slots__ = ("outcome", "data")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    outcome: KVOutcome
    data: bytes
    def __init__(self, outcome: _Optional[_Union[KVOutcome, str]] = ..., data: _Optional[bytes] = ...) -> None: ...

class DropRequest(_message.Message):
    __slots__ = ("fingerprint", "stream", "all", "keys")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    stream: str
    all: bool
    keys: _containers.RepeatedCompositeFieldContainer[KVKey]
    def __init__(self, fingerprint: _Optional[str] = ..., stream: _Optional[str] = ..., all: _Optional[bool] = ..., keys: _Optional[_Iterable[_Union[KVKey, _Mapping]]] = ...) -> None: ...

class DropReply(_message.Message):
    __slots__ = ("dropped", "done")
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    dropped: int
    done: bool
    def __init__(self, dropped: _Optional[int] = ..., done: _Optional[bool] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("fingerprint", "stream")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    stream: str
    def __init__(self, fingerprint: _Optional[str] = ..., stream: _Optional[str] = ...) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[KVKey]
    def __init__(self, keys: _Optional[_Iterable[_Union[KVKey, _Mapping]]] = ...) -> None: ...

class PutManifestRequest(_message.Message):
    __slots__ = ("fingerprint", "stream", "bytes", "cap_bytes", "piece")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    stream: str
    bytes: int
    cap_bytes: int
    piece: bytes
    def __init__(self, fingerprint: _Optional[str] = ..., stream: _Optional[str] = ..., bytes: _Optional[int] = ..., cap_bytes: _Optional[int] = ..., piece: _Optional[bytes] = ...) -> None: ...

class PutManifestReply(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: KVOutcome
    def __init__(self, outcome: _Optional[_Union[KVOutcome, str]] = ...) -> None: ...

class GetManifestRequest(_message.Message):
    __slots__ = ("fingerprint", "stream")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    stream: str
    def __init__(self, fingerprint: _Optional[str] = ..., stream: _Optional[str] = ...) -> None: ...

class GetManifestReply(_message.Message):
    __slots__ = ("outcome", "piece")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    outcome: KVOutcome
    piece: bytes
    def __init__(self, outcome: _Optional[_Union[KVOutcome, str]] = ..., piece: _Optional[bytes] = ...) -> None: ...

class UsageRequest(_message.Message):
    __slots__ = ("fingerprint", "stream")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    stream: str
    def __init__(self, fingerprint: _Optional[str] = ..., stream: _Optional[str] = ...) -> None: ...

class UsageReply(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...
