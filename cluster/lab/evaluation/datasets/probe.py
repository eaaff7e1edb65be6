"""Whether a video file can be read, and how long it is, without decoding it as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import av
from av.container import InputContainer
from av.video.stream import VideoStream

VIDEO_SUFFIXES = frozenset({".mp4", ".avi", ".mkv", ".mov", ".webm", ".m4v", ".ts"})

# A container's stated length and the end of its last packet differ by rounding and by lost last frames; more than
# this is missing video.
_END_SLACK_S = 1.0


class UnreadableVideoError(Exception):
    """The file is no video that can be played to its end; the message says why."""


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """``fps`` is the mean frame rate; ``seconds`` the length of the video."""

    width: int
    height: int
    fps: float
    seconds: float


def probe_video(path: Path) -> VideoFacts:
    """Open the file, decode its first picture and find its end.

    Raises:
        UnreadableVideoError: missing, empty, not a video, no decodable picture, or cut off before its stated end.
    """
    try:
        if path.stat().st_size == 0:
            raise UnreadableVideoError("empty file (0 bytes)")
        with av.open(str(path)) as container:
            return _probe(container)
    except (av.FFmpegError, OSError) as error:
        raise UnreadableVideoError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _probe(container: InputContainer) -> VideoFacts:
    if not container.streams.video:
        raise UnreadableVideoError("holds no video stream")
    stream = container.streams.video[0]
    first = next(container.decode(stream), None)
    if first is None:
        raise UnreadableVideoError("holds no picture")
    fps = float(stream.average_rate or stream.guessed_rate or 0)
    if fps <= 0:
        raise UnreadableVideoError("states no frame rate")
    start = first.time or 0.0
    stated = _stated_seconds(container, stream)
    end = _last_packet_s(container, stream, start + stated if stated is not None else None) + 1 / fps
    if stated is not None and start + stated - end > _END_SLACK_S:
        raise UnreadableVideoError(f"truncated: ends after {end - start:.1f} of {stated:.1f} s")
    return VideoFacts(stream.width, stream.height, fps, end - start)


def _stated_seconds(container: InputContainer, stream: VideoStream) -> float | None:
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    return container.duration / av.time_base if container.duration is not None else None


def _last_packet_s(container: InputContainer, stream: VideoStream, near_s: float | None) -> float:
    """Presentation time of the last packet, seconds. Reads from the last keyframe on where the end is known."""
    if near_s is not None:
        container.seek(int(near_s * av.time_base))
    else:
        container.seek(0)
    last = 0.0
    for packet in container.demux(stream):
        # AVI knows no presentation times.
        stamp = packet.pts if packet.pts is not None else packet.dts
        if stamp is not None and packet.time_base is not None:
            last = max(last, float(stamp * packet.time_base))
    return last
