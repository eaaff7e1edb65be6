"""One stream's decoder: one thread, motion vectors exported where the codec has them."""

from __future__ import annotations

import av
from av.codec.context import CodecContext
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame

from cluster.errors import SourceError

# FFmpeg exports block vectors for these; HEVC, AV1, VP9 and MJPEG give none, without a word.
VECTOR_CODECS = frozenset({"h264", "mpeg4"})

# FFmpeg's own "av1" only drives hardware.
_PREFERRED = {"av1": "libdav1d"}

# H.264 conceals and flags damaged pictures by itself; told to explode it hides some of them instead. HEVC flags
# nothing: only exploding turns missing references and damaged slices into errors.
_ERROR_DETECTION = {"hevc": "crccheck+explode"}

# 8K, and some: a forged parameter set must not make the decoder reserve gigabytes.
_MAX_PIXELS = 8192 * 8192


class DecodeError(Exception):
    """The decoder refused a packet."""


class Decoder:
    """Feeds packets to FFmpeg. ``flush`` forgets all pictures but keeps parameter sets."""

    def __init__(self, codec: str, extradata: bytes) -> None:
        """Raises SourceError when this FFmpeg cannot decode ``codec``."""
        self.codec = codec
        try:
            context = CodecContext.create(_PREFERRED.get(codec, codec), "r")
        except (av.FFmpegError, ValueError):
            raise SourceError(f"this FFmpeg has no decoder for the codec {codec!r}", retryable=False) from None
        if not isinstance(context, VideoCodecContext):
            raise SourceError(f"{codec!r} is not a video codec", retryable=False)
        # Frame threading returns wrong, changing vectors on B-frames; streams scale across threads anyway.
        context.thread_count = 1
        context.options = {"max_pixels": str(_MAX_PIXELS)}
        if codec in VECTOR_CODECS:
            context.options |= {"flags2": "+export_mvs"}
        if codec in _ERROR_DETECTION:
            context.options |= {"err_detect": _ERROR_DETECTION[codec]}
        if extradata:
            context.extradata = extradata
        self._context = context

    @property
    def reorders(self) -> bool:
        """Whether pictures are shown in another order than decoded (B-frames)."""
        return self._context.has_b_frames

    def decode(self, data: bytes, pts: int | None, dts: int | None) -> list[VideoFrame]:
        """Pictures that became ready, in display order. ``data`` must not be empty.

        Raises:
            DecodeError: the packet is damaged or cannot be decoded here.
        """
        # Packet(bytes) would lend FFmpeg memory without the zero padding that its bit readers run into.
        packet = av.Packet(len(data))
        packet.update(data)
        packet.pts, packet.dts = pts, dts
        return self._run(packet)

    def drain(self) -> list[VideoFrame]:
        """The pictures still held back for reordering; ready for a keyframe afterwards."""
        try:
            return self._run(None)
        finally:
            self.flush()

    def flush(self) -> None:
        self._context.flush_buffers()

    def _run(self, packet: av.Packet | None) -> list[VideoFrame]:  # type: ignore[type-arg]
        try:
            return self._context.decode(packet)
        except (av.FFmpegError, ValueError, MemoryError) as error:
            raise DecodeError(str(error)) from error
