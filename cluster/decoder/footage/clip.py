"""Writes packets into fragmented MP4 that browsers play: remuxed, or decoded, masked and re-encoded."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import av
from av.video.frame import PictureType, VideoFrame
from av.video.reformatter import ColorRange, VideoReformatter

from cluster.codec.decoder import DECODED_BYTES, DecodeError, Decoder, PicturesTooLargeError
from cluster.codec.timeline import DecodingClock
from cluster.decoder.footage.segments import Segment, SegmentPacket
from cluster.errors import SourceError
from cluster.types import MICROSECONDS

PLAYED = frozenset({"h264"})
"""Codecs that every browser plays."""
LIVE = PLAYED | {"hevc"}
"""Codecs of live views: a browser reports itself whether it plays HEVC."""

_FRAGMENTED = {
    # Append-only, so that every part is final; a new fragment at each keyframe, or every 2 s.
    "movflags": "frag_keyframe+empty_moov+default_base_moof",
    "frag_duration": "2000000",
    "flush_packets": "1",
}
_EVERY_FRAME = {
    # For live views: one fragment per packet, written when the next one arrives.
    "movflags": "frag_every_frame+empty_moov+default_base_moof",
    "flush_packets": "1",
}
_TIME_BASE = Fraction(1, MICROSECONDS)
_CLOCK = Fraction(1, 90_000)
_TICK = 23
"""Smallest distance between packets, in microseconds: at least two ticks of 90 kHz, as equal ones would be refused."""
_STEP = 1000
"""Smallest distance between re-encoded pictures, in microseconds: their clock counts milliseconds."""
_KEYFRAMES = 50

Painter = Callable[[VideoFrame], VideoFrame]
"""Paints privacy masks on a decoded picture; applied to each before it is shown."""


def clip_writer(
    segment: Segment, start: int, *, painter: Painter | None, height: int, decoded_bytes: int = DECODED_BYTES
) -> "Remuxer | Transcoder":
    """Create the cheapest sufficient writer. The clip begins at the picture at ``start``, or at the keyframe before it.

    ``painter``: masks, which force re-encoding; ``height``: largest picture height if re-encoded. ``decoded_bytes``:
    memory limit for decoded pictures.
    """
    if painter is None and segment.codec in PLAYED:
        return Remuxer(segment, decoded_bytes=decoded_bytes)
    return Transcoder(segment, start, painter, height, decoded_bytes)


class _Parts:
    """File object for FFmpeg; :meth:`take` returns what was written since the last call."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


@contextlib.contextmanager
def _as_source_error(done: str) -> Iterator[None]:
    """Convert FFmpeg's errors to ``SourceError``; ``done``: participle completing "its video cannot be"."""
    try:
        yield
    except (av.FFmpegError, ValueError) as error:
        raise SourceError(f"its video cannot be {done} ({error})", retryable=False) from None


class _Writer:
    """Fragmented MP4 of one segment. ``span``: its first and last time so far, in camera microseconds; (0, 0) while
    empty. Usable from any thread, one at a time."""

    done: ClassVar[str]
    """Completes the error message "its video cannot be"."""

    def __init__(self, segment: Segment, decoded_bytes: int) -> None:
        self._segment = segment
        self._decoded_bytes = decoded_bytes
        self._parts = _Parts()
        self._container: Any = None
        self._stream: Any = None
        self._zero = self._last = 0
        self.span = (0, 0)

    def close(self) -> bytes:
        """Finish the file; returns the remaining bytes. Raises like ``feed``."""
        if self._container is not None:
            with _as_source_error(self.done):
                self._container.close()
        return self._parts.take()


class Remuxer(_Writer):
    """Remuxes H.264 or HEVC unchanged; the first packet is a keyframe. ``live``: one fragment per packet."""

    done = "put into a clip"

    def __init__(self, segment: Segment, *, live: bool = False, decoded_bytes: int = DECODED_BYTES) -> None:
        super().__init__(segment, decoded_bytes)
        self._options = _EVERY_FRAME if live else _FRAGMENTED
        self._clock = DecodingClock()

    def feed(self, packets: Sequence[SegmentPacket]) -> bytes:
        """Write packets in decoding order; returns the boxes completed, which are final. Raises SourceError: the
        packets cannot be muxed."""
        with _as_source_error(self.done):
            if self._container is None and packets:
                self._open(packets)
            for placed in packets:
                self._mux(placed)
        return self._parts.take()

    def _open(self, packets: Sequence[SegmentPacket]) -> None:
        segment, first = self._segment, packets[0]
        width, height = segment.width, segment.height
        if not width or not height:
            width, height = picture_size(first, self._decoded_bytes)
        self._container = av.open(self._parts, "w", format="mp4", options=self._options)
        # PyAV's stubs lack the attributes set from keywords.
        add: Any = self._container.add_mux_stream
        self._stream = add(segment.codec, width=width, height=height, extradata=segment.extradata)
        self._stream.time_base = _CLOCK
        # The packets so far show the reordering depth, by which the first is decoded before it is shown.
        for placed in packets:
            self._clock.advance(placed.time)
        times = [placed.time for placed in packets]
        step = (max(times) - min(times)) // max(1, len(times) - 1)
        self._zero = first.time - self._clock.depth * step
        self._clock.restart()
        for time in range(self._zero, first.time, max(1, step)):
            self._clock.advance(time)
        self._last = self._zero - _TICK
        self.span = first.time, first.time

    def _mux(self, placed: SegmentPacket) -> None:
        data = placed.packet.data
        packet = av.Packet(len(data))
        packet.update(data)
        packet.stream, packet.time_base = self._stream, _TIME_BASE
        dts = max(self._clock.advance(placed.time), self._last + _TICK)
        packet.dts, packet.pts = dts - self._zero, max(placed.time, dts) - self._zero
        packet.is_keyframe = placed.starts
        self._last = dts
        self.span = self.span[0], max(self.span[1], placed.time)
        self._container.mux(packet)


class Transcoder(_Writer):
    """Decodes, masks, scales down if needed, and encodes as H.264 on one thread."""

    done = "re-encoded"

    def __init__(self, segment: Segment, start: int, painter: Painter | None, height: int, decoded_bytes: int) -> None:
        super().__init__(segment, decoded_bytes)
        self._start = start
        self._painter = painter
        self._height = height
        self._decoder: Decoder | None = None
        self._scale = VideoReformatter()

    def feed(self, packets: Sequence[SegmentPacket]) -> bytes:
        if self._decoder is None:
            self._decoder = Decoder(self._segment.codec, self._segment.extradata, self._decoded_bytes)
        for placed in packets:
            try:
                frames = self._decoder.decode(placed.packet.data, placed.time, placed.order)
            except DecodeError:
                # Skip damaged packets: a damaged picture is worse than none.
                continue
            self._encode(frames)
        return self._parts.take()

    def close(self) -> bytes:
        if self._decoder is not None:
            with contextlib.suppress(DecodeError, PicturesTooLargeError):
                self._encode(self._decoder.drain())
        if self._container is not None:
            with _as_source_error(self.done):
                self._container.mux(self._stream.encode(None))
        return super().close()

    def _encode(self, frames: Sequence[VideoFrame]) -> None:
        for frame in frames:
            time = frame.pts if frame.pts is not None else self._last + MICROSECONDS // 25
            if time < self._start or frame.is_corrupt:
                continue
            if self._container is None:
                self._open(frame, time)
            elif time < self._last + _STEP:
                continue
            with _as_source_error(self.done):
                self._add(frame, time)
            self._last = time
            self.span = self._zero, time

    def _open(self, frame: VideoFrame, time: int) -> None:
        scale = min(1.0, self._height / frame.height)
        self._container = av.open(self._parts, "w", format="mp4", options=_FRAGMENTED)
        self._stream = self._container.add_stream("libx264", options={"preset": "veryfast", "crf": "25"})
        # H.264 needs even sides.
        self._stream.width = max(2, round(frame.width * scale / 2) * 2)
        self._stream.height = max(2, round(frame.height * scale / 2) * 2)
        self._stream.pix_fmt = "yuv420p"
        context = self._stream.codec_context
        context.time_base, context.thread_count, context.max_b_frames = Fraction(1, 1000), 1, 0
        context.gop_size = _KEYFRAMES
        context.sample_aspect_ratio = Fraction(1) if self._decoder is None else self._decoder.pixel_aspect
        # Samples keep the camera's colour matrix; unless tagged, players would guess one by picture size.
        context.color_range, context.colorspace = ColorRange.MPEG, frame.colorspace
        context.color_primaries, context.color_trc = frame.color_primaries, frame.color_trc
        self._zero = self._last = time

    def _add(self, frame: VideoFrame, time: int) -> None:
        if self._painter is not None:
            frame = self._painter(frame)
        small = self._scale.reformat(
            frame, self._stream.width, self._stream.height, "yuv420p", dst_color_range=ColorRange.MPEG, threads=1
        )
        small.pts, small.time_base = (time - self._zero) // 1000, Fraction(1, 1000)
        # Otherwise the encoder repeats the source's picture types, all keyframes for an all-intra codec.
        small.pict_type = PictureType.NONE
        self._container.mux(self._stream.encode(small))


def picture_size(first: SegmentPacket, decoded_bytes: int) -> tuple[int, int]:
    """Width and height of a keyframe, found by decoding it. Raises SourceError if it cannot be decoded."""
    decoder = Decoder(first.segment.codec, first.segment.extradata, decoded_bytes)
    try:
        frames = [*decoder.decode(first.packet.data, 0, 0), *decoder.drain()]
    except DecodeError:
        frames = []
    if not frames:
        raise SourceError("its first picture cannot be decoded", retryable=False)
    return frames[0].width, frames[0].height
