"""Video file source: played once or looped, unpaced or in real time."""

import contextlib
import errno
import io
import logging
import math
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import av
from av.container import InputContainer

from cluster.codec.demux import CONTAINERS, PROBING, Demuxer
from cluster.codec.nal import typed_units
from cluster.codec.source import StreamHeader
from cluster.codec.timeline import LONGEST_STEP, REPEAT
from cluster.errors import SourceError
from cluster.hosts import is_below
from cluster.redaction import SourceAddress
from cluster.types import MICROSECONDS, EncodedPacket

log = logging.getLogger(__name__)

# Without a frame count in the container, its duration may exceed the last timestamp by the last frame's duration; a
# larger difference is missing video.
_LAST_FRAME_S = 1.0
_LAST_FRAME_SHARE = 0.1

_OPTIONS = PROBING | {"protocol_whitelist": "file", "format_whitelist": CONTAINERS}

_MP4_PROBING = {"skip_frame": "all", "analyzeduration": "1"}
"""For MP4, whose header states what FFmpeg otherwise learns by decoding the first pictures. Not for fragmented MP4:
until FFmpeg has read a fragment, it reports the audio's duration in place of the video's."""

_REFUSALS: dict[type[Exception], str] = {
    FileNotFoundError: "does not exist",
    IsADirectoryError: "is a directory, not a video",
    PermissionError: "may not be read by this user",
    av.InvalidDataError: "is not a video, or is damaged or truncated beyond reading",
    av.ArgumentError: "is not a video, or is damaged or truncated beyond reading",
}

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of this machine, not of the file."""

# Duration of a video of a single picture; microseconds.
_ONE_PICTURE = 40_000
_HEVC_BLA, _HEVC_CRA = 16, 21


class FileSource:
    """Packets of a file.

    ``loop``: restart at the end with continuing timestamps and sequence numbers; the seam is a scene cut at a keyframe.
    ``realtime``: pace packets by their timestamps, at ``speed`` times real time. ``roots``: allowed folders, checked
    with links resolved; None allows any.
    """

    live = False
    pushed = False

    def __init__(
        self,
        path: str | Path,
        *,
        loop: bool = False,
        realtime: bool = False,
        speed: float = 1.0,
        roots: Sequence[Path] | None = None,
    ) -> None:
        self.path = Path(path)
        self.name = str(SourceAddress(str(path)))
        self.loop = loop
        self.realtime = realtime
        self.speed = speed
        self.roots = roots
        self.rounds = 0
        self.behind_s = 0.0
        """Lag of a paced file's consumer, in seconds: how late the newest packet was read."""
        self._closed = threading.Event()
        self.ended = False
        self._container: InputContainer | None = None
        self._demuxer: Demuxer | None = None

    def open(self) -> StreamHeader:
        self.ended = False
        self.rounds = 0
        # Opened again after a failure, it starts over.
        again = self._demuxer is not None
        self._demuxer = self._open(first_sequence=0)
        self._warn_of_rotation()
        return replace(self._demuxer.header, new_clock=again)

    def close(self) -> None:
        self._closed.set()

    def packets(self) -> Iterator[EncodedPacket]:
        if self._demuxer is None:
            raise RuntimeError("call open() before packets()")
        try:
            packets = self._play_rounds(self._demuxer)
            yield from self._paced(packets) if self.realtime else packets
        finally:
            self._release()

    def _play_rounds(self, demuxer: Demuxer) -> Iterator[EncodedPacket]:
        offset = 0
        while not self._closed.is_set():
            times = _Span()
            started = False
            for packet in self._read(demuxer):
                # Later rounds start at a keyframe: other packets would refer to the previous round's pictures.
                if self.rounds and not started:
                    if not packet.keyframe:
                        continue
                    if packet.codec == "hevc":
                        packet = replace(packet, data=_spliceable(packet.data))
                started = True
                if not packet.discard:
                    times.add(packet.pts if packet.pts is not None else packet.dts)
                yield _shifted(packet, offset) if offset else packet
                if self._closed.is_set():
                    return
            if not self.loop:
                self.ended = True
                return
            if not started:
                raise SourceError(f"{self.name} has no keyframe to start decoding at", retryable=False)
            self.rounds += 1
            offset += times.length
            self._release()
            demuxer = self._open(demuxer.sequence)

    def _read(self, demuxer: Demuxer) -> Iterator[EncodedPacket]:
        start, end = math.inf, -math.inf
        begun = demuxer.sequence
        try:
            for packet in demuxer.packets():
                if packet.pts is not None:
                    start, end = min(start, packet.pts), max(end, packet.pts)
                yield packet
        except av.FFmpegError as error:
            raise SourceError(f"{self.name} cannot be read to its end: {_reason(error)}", retryable=False) from None
        read = demuxer.sequence - begun
        if demuxer.frames:
            if read < demuxer.frames:
                raise SourceError(
                    f"{self.name} is truncated: it ends after {read} of {demuxer.frames} frames", retryable=False
                )
        elif demuxer.duration and end >= start:
            stated, found = demuxer.duration / MICROSECONDS, (end - start) / MICROSECONDS
            if stated - found > max(_LAST_FRAME_S, _LAST_FRAME_SHARE * stated):
                raise SourceError(
                    f"{self.name} is truncated: it ends after {found:.1f} of {stated:.1f} s", retryable=False
                )

    def _paced(self, packets: Iterator[EncodedPacket]) -> Iterator[EncodedPacket]:
        start, last = (0.0, 0), None
        for packet in packets:
            # Decoding times never go backwards; presentation times do with B-frames.
            due = packet.decoding_time
            if due is not None and not packet.discard:
                if last is None or not -REPEAT <= due - last <= LONGEST_STEP:
                    # The clock jumped, as between joined recordings: do not wait out the gap.
                    start = (time.monotonic(), due)
                last = due
                wait = start[0] + (due - start[1]) / MICROSECONDS / self.speed - time.monotonic()
                self.behind_s = max(0.0, -wait)
                if wait > 0 and self._closed.wait(wait):
                    return
            yield packet

    def _open(self, first_sequence: int) -> Demuxer:
        if self.roots is not None and not is_below(self.path, self.roots):
            raise SourceError(f"{self.name} is outside the folders of video files that are allowed", retryable=False)
        try:
            if self.path.stat().st_size == 0:
                raise SourceError(f"{self.name} is empty (0 bytes)", retryable=False)
            with self.path.open("rb") as file:
                head = file.read(2**16)
            options = _OPTIONS | (_MP4_PROBING if head[4:8] == b"ftyp" and b"mvex" not in head else {})
            self._container = av.open(str(self.path.absolute()), options=options)
        except (av.FFmpegError, OSError) as error:
            refusals = (refusal for kind, refusal in _REFUSALS.items() if isinstance(error, kind))
            refusal = next(refusals, f"cannot be opened: {_reason(error)}")
            raise SourceError(f"{self.name} {refusal}", retryable=error.errno in _EXHAUSTED) from None
        try:
            return Demuxer(self._container, self.name, first_sequence)
        except SourceError:
            self._release()
            raise

    def _warn_of_rotation(self) -> None:
        """Warn if an MP4 or MOV file asks players to rotate its pictures: they are decoded as stored."""
        if self._container is None or "mp4" not in self._container.format.name:
            return
        # PyAV exposes the rotation only on decoded pictures, but copies it to a muxer: write this track's header alone.
        header, stream, options = io.BytesIO(), self._container.streams.video[0], {"movflags": "empty_moov"}
        # The codecs that FFmpeg cannot write to MOV.
        form = "mp4" if stream.codec_context.codec.canonical_name in ("av1", "vp9") else "mov"
        with contextlib.suppress(av.FFmpegError, ValueError), av.open(header, "w", form, options=options) as written:
            written.add_stream_from_template(stream, opaque=True)
            written.start_encoding()
            data = header.getvalue()
            # ISO/IEC 14496-12 §8.3.2: the matrix starts 40 bytes into the track header.
            across, down = struct.unpack_from(">ii", data, data.index(b"tkhd") + 44)
            if degrees := -round(math.degrees(math.atan2(down, across))):
                log.warning(
                    "%s has a rotation of %d degrees in its metadata, which is not applied: the model sees pictures as "
                    "encoded; apply it with ffmpeg -i in.mp4 out.mp4",
                    self.name,
                    degrees,
                )

    def _release(self) -> None:
        if self._container is not None:
            self._container.close()
            self._container = None


class _Span:
    """Length of a round: first to last timestamp, plus the distance of the last two as the last picture's duration."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._last = self._before_last = 0

    def add(self, time: int | None) -> None:
        if time is None:
            return
        if self._first is None:
            self._first = self._last = self._before_last = time
        self._first = min(self._first, time)
        latest = {self._before_last, self._last, time}
        self._last = max(latest)
        self._before_last = max(latest - {self._last}, default=self._last)

    @property
    def length(self) -> int:
        return 0 if self._first is None else self._last - self._first + (self._last - self._before_last or _ONE_PICTURE)


def _shifted(packet: EncodedPacket, offset: int) -> EncodedPacket:
    return replace(
        packet,
        pts=None if packet.pts is None else packet.pts + offset,
        dts=None if packet.dts is None else packet.dts + offset,
    )


def _spliceable(data: bytes) -> bytes:
    """An HEVC packet for splicing onto another stream: a CRA picture becomes BLA (H.265 §7.4.2.2), so that decoders
    skip its leading pictures, whose references are missing."""
    changed = bytearray(data)
    for kind, start in typed_units("hevc", data):
        if kind == _HEVC_CRA:
            changed[start] = data[start] & 0x81 | _HEVC_BLA << 1
    return bytes(changed)


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower().rstrip(".")
