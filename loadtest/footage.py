"""Encoded video shared by a fleet of simulated cameras: made or read once, split into GOPs, restamped when sent."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from cluster.codec import FileSource
from cluster.codec.source import StreamHeader
from cluster.errors import ConfigError, SourceError
from cluster.lab.scenes.street_clips import make_clip
from cluster.types import EncodedPacket

MADE = {"busy": "street", "quiet": "night", "noisy": "noisy"}
"""Kinds of generated footage -> kind of clip (:data:`cluster.lab.scenes.street_clips.CLIP_KINDS`)."""

MADE_SECONDS = 24.0


@dataclass(frozen=True, slots=True)
class Gop:
    """Packets from one keyframe to the next, with timestamps relative to its start; ``duration``: microseconds until
    the next GOP starts."""

    packets: tuple[EncodedPacket, ...]
    duration: int


@dataclass(frozen=True, slots=True)
class Footage:
    """One kind of video. GOPs are independently decodable, so a camera may continue with any of them."""

    name: str
    header: StreamHeader
    gops: tuple[Gop, ...]


def read_footage(path: str | Path, name: str | None = None) -> Footage:
    """Read a video file as footage. Raises ``SourceError``: it cannot be read, or has no decodable GOP."""
    source = FileSource(path)
    header = source.open()
    packets = [packet for packet in source.packets() if packet.pts is not None]
    begin = next((index for index, packet in enumerate(packets) if packet.keyframe), len(packets))
    packets = packets[begin:]
    if len(packets) < 2:
        raise SourceError(f"{path} has fewer than two frames after a keyframe; use a longer video", retryable=False)
    return Footage(name or Path(path).stem, header, _gops(packets))


def _gops(packets: Sequence[EncodedPacket]) -> tuple[Gop, ...]:
    times = sorted(_pts(packet) for packet in packets)
    starts = [index for index, packet in enumerate(packets) if packet.keyframe]
    # The last frame is assumed to last as long as the one before it.
    begins = [*(_pts(packets[index]) for index in starts), times[-1] + times[-1] - times[-2]]
    gops = []
    for (start, stop), (first, until) in zip(pairwise([*starts, len(packets)]), pairwise(begins), strict=True):
        moved = (shifted(packet, -first, packet.sequence) for packet in packets[start:stop])
        gops.append(Gop(tuple(moved), until - first))
    return tuple(gops)


def shifted(packet: EncodedPacket, by: int, sequence: int) -> EncodedPacket:
    """The packet delayed ``by`` microseconds, with a new sequence number."""
    pts = _pts(packet)
    dts = pts if packet.dts is None else packet.dts
    return replace(packet, pts=pts + by, dts=dts + by, sequence=sequence)


def _pts(packet: EncodedPacket) -> int:
    assert packet.pts is not None
    return packet.pts


def make_footage(
    kind: str,
    *,
    fps: float,
    size: tuple[int, int],
    seconds: float = MADE_SECONDS,
    crf: int | None = None,
) -> Footage:
    """Render and encode one of the ``MADE`` kinds; the same arguments give the same footage. ``crf``: see
    :func:`~cluster.lab.scenes.street_clips.make_clip`. Raises ``ConfigError``: invalid rate or size.
    """
    with tempfile.TemporaryDirectory(prefix="sightline-footage-") as folder:
        path = Path(folder) / f"{kind}.mp4"
        make_clip(MADE[kind], path, seconds=seconds, fps=fps, size=size, crf=crf)
        return read_footage(path, kind)


def gather(kinds: Sequence[str], *, fps: float, size: tuple[int, int], crf: int | None = None) -> dict[str, Footage]:
    """Collect footage by the names in a profile: kinds to generate (with ``crf``), or paths of video files. Raises
    ``ConfigError``: unknown name, or footage that one camera could not send in sequence; ``SourceError``: a file cannot
    be read."""
    found: dict[str, Footage] = {}
    for kind in kinds:
        if kind in MADE:
            found[kind] = make_footage(kind, fps=fps, size=size, crf=crf)
        elif Path(kind).is_file():
            found[kind] = read_footage(kind)
        else:
            raise ConfigError(f"unknown footage {kind!r}; use one of {', '.join(MADE)}, or a video file")
    shapes = {(each.header.codec, each.header.width, each.header.height) for each in found.values()}
    if len(shapes) > 1:
        seen = ", ".join(f"{codec} {width}x{height}" for codec, width, height in sorted(shapes))
        raise ConfigError(f"all footage of a profile must have one codec and size, not {seen}")
    return found
