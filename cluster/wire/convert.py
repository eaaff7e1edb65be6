"""Lossless conversion between ``cluster.types`` and the wire messages of ``protos/sightline/v1``.

Input from the wire is validated here, once; an invalid message raises ``ValueError`` with one sentence, which servers
return as INVALID_ARGUMENT (``cluster.wire.status``).
"""

import json
from dataclasses import asdict
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import ConfigDict, TypeAdapter, ValidationError
from sightline.v1 import cameras_pb2, frames_pb2, ingest_pb2, results_pb2

from cluster.codec.source import StreamHeader
from cluster.errors import CapacityError, ConfigError
from cluster.types import (
    Answer,
    BoolGrid,
    CameraStatus,
    EncodedPacket,
    FrameSample,
    PatchGrid,
    Question,
    StreamSpec,
)
from cluster.wire.mapping import from_message, to_message

CHANNELS = 3
MAX_CELLS = 1 << 20
"""Largest ``rows * cols`` accepted from the wire: 14336 x 14336 pixels at 14-pixel patches."""

CODECS = frozenset({"h264", "hevc", "av1", "vp9", "vp8", "mjpeg", "mpeg4"})
MAX_EXTRADATA_BYTES = 2**16
MAX_SIDE = 16384
MAX_NAME = 128
OPEN_TAG, BATCH_TAG, END_TAG = 0x0A, 0x12, 0x1A
MAX_FIELDS = 2**16 + 2
"""Maximum fields of a message: as many packets as any credit allows."""

_STATE_PREFIX = "CAMERA_STATE_"


def packet_to_proto(packet: EncodedPacket) -> ingest_pb2.Packet:
    """Convert a packet, without its codec, which ``Open`` states once."""
    return ingest_pb2.Packet(
        data=packet.data,
        pts=packet.pts,
        dts=packet.dts,
        keyframe=packet.keyframe,
        sequence=packet.sequence,
        discard=packet.discard,
    )


def packet_from_proto(message: ingest_pb2.Packet, codec: str) -> EncodedPacket:
    """The inverse of :func:`packet_to_proto`."""
    return from_message(EncodedPacket, message, codec=codec)


def opening_of(header: StreamHeader, camera: str, session: str) -> ingest_pb2.PushRequest:
    """The first message of a push."""
    return ingest_pb2.PushRequest(open=to_message(ingest_pb2.Open, header, camera=camera, session=session))


def push_from_bytes(data: bytes) -> ingest_pb2.PushRequest:
    """Parse a message of a push, after counting its packets: an empty one takes two bytes on the wire, but 80 in
    memory. Raises ``CapacityError``: too many packets; ``DecodeError``: not a message."""
    at = count = 0
    while at < len(data):
        tag, at, size, shift = data[at], at + 1, 0, 0
        while at < len(data):
            size |= (data[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if data[at - 1] < 128:
                break
        if tag not in (OPEN_TAG, BATCH_TAG, END_TAG):
            raise DecodeError
        count += 1
        if count > MAX_FIELDS:
            raise CapacityError(f"a message has more than {MAX_FIELDS - 2} packets; send fewer at a time")
        # Step into a batch: its packets are fields with the same tag as an opening.
        at += 0 if tag == BATCH_TAG else size
    return ingest_pb2.PushRequest.FromString(data)


def opening_from_proto(request: ingest_pb2.PushRequest) -> ingest_pb2.Open:
    """The inverse of :func:`opening_of`. Raises ``ValueError``: not ``open``, or a field is invalid."""
    if request.WhichOneof("message") != "open":
        raise ValueError("the first message of a push must be `open`")
    opened = request.open
    if not opened.camera or len(opened.camera) > MAX_NAME:
        raise ValueError(f"`open` needs the camera's name, at most {MAX_NAME} characters")
    if not opened.session or len(opened.session) > MAX_NAME:
        raise ValueError(f"`open` needs a session id, at most {MAX_NAME} characters")
    if opened.codec not in CODECS:
        raise ValueError(f"unknown codec {opened.codec!r}; there are: {', '.join(sorted(CODECS))}")
    if max(opened.width, opened.height) > MAX_SIDE:
        raise ValueError(f"a picture of {opened.width}x{opened.height} is larger than {MAX_SIDE}x{MAX_SIDE}")
    if len(opened.extradata) > MAX_EXTRADATA_BYTES:
        raise ValueError(f"extradata of {len(opened.extradata)} bytes is larger than {MAX_EXTRADATA_BYTES}")
    return opened


def frame_to_proto(sample: FrameSample) -> frames_pb2.Frame:
    """Convert one sample, with one copy of the kept patches."""
    mask, patches = np.packbits(sample.mask).tobytes(), sample.patches.tobytes()
    return to_message(frames_pb2.Frame, sample, mask=mask, patches=patches)


def frame_from_proto(message: frames_pb2.Frame) -> FrameSample:
    """The inverse of :func:`frame_to_proto`; ``patches`` is a read-only view of the message's bytes. Raises
    ``ValueError``: an impossible grid, a mask of the wrong length or with incomplete merge groups, or patches that do
    not match the mask."""
    what = f"frame {message.index} of camera {message.camera!r}"
    grid = _grid(message, what)
    mask = _mask(message, grid, what)
    shape = (int(mask.sum()), grid.temporal, CHANNELS, grid.patch, grid.patch)
    wanted = int(np.prod(shape))
    # Every access to a field of bytes copies it.
    data = message.patches
    if len(data) != wanted:
        raise ValueError(
            f"{what} has {len(data)} bytes of patches, but its mask keeps {shape[0]} patches, which take {wanted}"
        )
    patches = np.frombuffer(data, dtype=np.uint8).reshape(shape)
    return from_message(FrameSample, message, grid=grid, mask=mask, patches=patches)


def _grid(message: frames_pb2.Frame, what: str) -> PatchGrid:
    grid = from_message(PatchGrid, message.grid)
    sides = min(grid.rows, grid.cols, grid.patch, grid.merge, grid.temporal)
    if sides < 1 or grid.rows * grid.cols > MAX_CELLS or grid.patch > 256 or grid.temporal > 64:
        raise ValueError(f"{what} has an impossible patch grid: {grid}")
    if grid.rows % grid.merge or grid.cols % grid.merge:
        raise ValueError(
            f"{what} has a grid of {grid.rows}x{grid.cols} patches, which merge groups of {grid.merge}x{grid.merge} do "
            "not tile"
        )
    return grid


def _mask(message: frames_pb2.Frame, grid: PatchGrid, what: str) -> BoolGrid:
    cells = grid.rows * grid.cols
    wanted = (cells + 7) // 8
    if len(message.mask) != wanted:
        raise ValueError(
            f"{what} has a mask of {len(message.mask)} bytes, but {grid.rows}x{grid.cols} patches take {wanted}"
        )
    bits = np.unpackbits(np.frombuffer(message.mask, dtype=np.uint8))
    if bits[cells:].any():
        raise ValueError(f"{what} has mask bits set beyond its grid")
    mask = bits[:cells].astype(np.bool_).reshape(grid.rows, grid.cols)
    groups = mask.reshape(grid.group_rows, grid.merge, grid.group_cols, grid.merge)
    if (groups.any(axis=(1, 3)) != groups.all(axis=(1, 3))).any():
        raise ValueError(
            f"{what} keeps part of a merge group; masks must keep whole groups of {grid.merge}x{grid.merge} patches"
        )
    return mask


def answer_to_proto(answer: Answer, missed: int = 0, number: int = 0, waited_s: float = 0.0) -> results_pb2.Answer:
    """Convert the server's ``number``-th answer, which was queued for ``waited_s``; ``missed``: answers lost before."""
    return to_message(results_pb2.Answer, answer, missed=missed, number=number, age_s=answer.age_s + waited_s)


def answer_from_proto(message: results_pb2.Answer) -> Answer:
    """The inverse of :func:`answer_to_proto`, without the connection's fields."""
    return from_message(Answer, message)


def spec_to_json(spec: StreamSpec) -> str:
    """A stream's specification as one JSON object."""
    return json.dumps(asdict(spec), allow_nan=False, separators=(",", ":"))


# A list, since an adapter's configuration does not apply to a bare dataclass.
_SPECS = TypeAdapter(list[StreamSpec], config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))


def spec_from_json(text: str) -> StreamSpec:
    """The inverse of :func:`spec_to_json`. Raises ``ValueError``: not JSON, an unknown or missing key, or a value of
    the wrong type."""
    try:
        return _SPECS.validate_json(f"[{text}]")[0]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"][1:]))
        raise ValueError(f"a stream's specification: {where}{': ' * bool(where)}{first['msg']}") from None


def question_from_proto(message: cameras_pb2.Question) -> Question:
    """Convert a question; a threshold of 0 means the default, 0.5. Raises ``ValueError``: a threshold outside 0..1."""
    if not 0.0 <= message.threshold <= 1.0:
        raise ValueError(f"question {message.id!r} has a threshold of {message.threshold}; it must lie in 0..1")
    return Question(message.id, message.text, message.threshold or 0.5, message.explain)


def status_to_proto(status: CameraStatus) -> cameras_pb2.CameraStatus:
    """A camera's status as a message."""
    return to_message(cameras_pb2.CameraStatus, status, state=_STATE_PREFIX + status.state.upper())


def status_from_proto(message: cameras_pb2.CameraStatus) -> CameraStatus:
    """The inverse of :func:`status_to_proto`; an unknown state becomes ``waiting``."""
    known = message.state in cameras_pb2.CameraState.values() and message.state
    state = cameras_pb2.CameraState.Name(message.state).removeprefix(_STATE_PREFIX).lower() if known else "waiting"
    return from_message(CameraStatus, message, state=state)


def settings_from_json(text: str) -> dict[str, Any]:
    """Parse a request's camera settings; empty text means none. Raises ``ConfigError``: not a JSON object."""
    if not text:
        return {}
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"the camera's settings are not JSON: {error}") from None
    except RecursionError:
        raise ConfigError("the camera's settings are nested too deeply") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"the camera's settings must be a JSON object, not {type(settings).__name__}")
    return settings
