"""Demuxes an FFmpeg container (file or network session) into packets that a decoder can join mid-stream."""

from __future__ import annotations

from collections.abc import Iterator

from av.container import InputContainer
from av.packet import Packet
from av.video.stream import VideoStream

from cluster.codec.nal import FRAMED_CODECS, configuration, parameter_sets, to_annexb
from cluster.codec.source import StreamHeader
from cluster.codec.timeline import LONGEST_STEP
from cluster.errors import SourceError
from cluster.types import MICROSECONDS, EncodedPacket

PROBING = {"max_pixels": str(2560 * 1600)}
"""Options for ``av.open``, which decodes the first pictures, of any size, for parameters the container does not state.
Larger pictures are not decoded: only their size is learned."""

CONTAINERS = "mov,mp4,matroska,webm,mpegts,mpeg,avi,flv,asf,ogg,nut,ivf,obu,h264,hevc,mpegvideo,m4v,mjpeg"
"""Self-contained formats; a playlist or SDP would make FFmpeg open further addresses."""

_WRAPS = (2**33, -(2**33), 2**32, -(2**32))
"""Ticks after which timestamps wrap: MPEG-TS after 26.5 hours, FLV after 50 days."""


class Demuxer:
    """Packets of a container's first video stream, numbered from ``first_sequence``.

    H.264 and HEVC become Annex-B with parameter sets before every keyframe, so that decoding can start at any of them,
    also at the far end of a push. Packets marked corrupt are dropped and leave a gap in the sequence numbers.
    """

    def __init__(self, container: InputContainer, name: str, first_sequence: int = 0) -> None:
        """Raises SourceError if there is no video stream or no decoder for it; ``name`` is used in messages."""
        self._container = container
        self._stream = _video_stream(container, name)
        self.sequence = first_sequence
        base = self._stream.time_base
        self._scale, self._divisor = (base.numerator * MICROSECONDS, base.denominator) if base else (1, 1)
        self._newest: int | None = None
        self._wrapped = 0
        context = self._stream.codec_context
        self._codec = context.name if context.codec.canonical_name == "" else context.codec.canonical_name
        extradata = context.extradata or b""
        self._configure(extradata, name)
        self.header = StreamHeader(self._codec, context.width, context.height, self._sets or extradata)

    def _configure(self, extradata: bytes, name: str) -> None:
        try:
            found = configuration(self._codec, extradata)
        except ValueError as error:
            raise SourceError(f"{name}: {error}", retryable=False) from None
        self._length_size = found.length_size
        self._sets = found.parameter_sets if self._codec in FRAMED_CODECS else b""

    @property
    def frames(self) -> int:
        """Packet count from the container's index; 0 without one, and for AVI, whose index also counts skipped
        pictures. For trimmed MP4, only packets within the edit list count."""
        stream, form = self._stream, self._container.format.name
        given = len(stream.index_entries) if "mp4" in form else stream.frames
        return given if stream.frames and form != "avi" else 0

    @property
    def duration(self) -> int | None:
        """Duration of the video stream in microseconds; None if the container only states one that includes audio."""
        stream = self._stream
        if stream.duration is not None and stream.time_base is not None:
            return int(stream.duration * stream.time_base * MICROSECONDS)
        return self._container.duration if len(self._container.streams) == 1 else None

    def packets(self) -> Iterator[EncodedPacket]:
        """Packets in decoding order. Raises av.FFmpegError on a read error."""
        doubted = False
        for packet in self._container.demux(self._stream):
            if packet.size == 0:
                continue
            self.sequence += 1
            # FFmpeg's parsers emit a picture when the next one begins, with the flags of the latter's packet.
            damaged, doubted = doubted or packet.is_corrupt, packet.is_corrupt
            if damaged:
                continue
            if packet.has_sidedata("new_extradata"):
                self._configure(bytes(packet.get_sidedata("new_extradata")), "a new decoder configuration")
            try:
                data = self._annexb(packet)
            except ValueError:
                continue
            dts, pts = self._time(packet.dts), self._time(packet.pts)
            yield EncodedPacket(self._codec, data, pts, dts, packet.is_keyframe, self.sequence - 1, packet.is_discard)

    def _time(self, ticks: int | None) -> int | None:
        """Timestamp in microseconds, with wraps of the container's clock undone."""
        if ticks is None:
            return None
        ticks += self._wrapped
        if self._newest is not None and not self._is_near(ticks):
            wrap = next((wrap for wrap in _WRAPS if self._is_near(ticks + wrap)), 0)
            self._wrapped += wrap
            ticks += wrap
        self._newest = ticks
        return ticks * self._scale // self._divisor

    def _is_near(self, ticks: int) -> bool:
        assert self._newest is not None
        return abs(ticks - self._newest) * self._scale <= LONGEST_STEP * self._divisor

    def _annexb(self, packet: Packet[VideoStream]) -> bytes:
        data = bytes(packet)
        if self._length_size:
            data = to_annexb(data, self._length_size)
        if packet.is_keyframe and self._codec in FRAMED_CODECS:
            sequence, found = parameter_sets(self._codec, data)
            if sequence:
                # The camera's resolution changed; some send new parameter sets once, not before every keyframe.
                self._sets = found
            elif not found:
                return self._sets + data
        return data


def _video_stream(container: InputContainer, name: str) -> VideoStream:
    if not container.streams.video:
        raise SourceError(
            f"{name} has no video stream that FFmpeg can find: it is not a video, or truncated", retryable=False
        )
    stream = container.streams.video[0]
    # Typed as always present, but None if FFmpeg has no decoder for the container's codec.
    if getattr(stream, "codec_context", None) is None:
        raise SourceError(f"{name} holds video of an unknown codec", retryable=False)
    return stream
