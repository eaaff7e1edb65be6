"""What a source that was tested sends, and cameras that were found on a network."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceTest:
    """What a source sends, pictures as JPEG (JSON: base64); see ``TestReply`` in protos/sightline/v1/pictures.proto."""

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


@dataclass(frozen=True, slots=True)
class DiscoveredStream:
    """See protos/sightline/v1/pictures.proto, also the next two."""

    profile: str
    codec: str
    width: int
    height: int
    fps: float
    source: str


@dataclass(frozen=True, slots=True)
class DiscoveredCamera:
    """A device that answered, its streams, or why none is known."""

    address: str
    name: str = ""
    model: str = ""
    streams: tuple[DiscoveredStream, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Discovery:
    """Progress, with the camera that is done, if any."""

    probed: int
    total: int
    answered: int = 0
    asked: int = 0
    camera: DiscoveredCamera | None = None
