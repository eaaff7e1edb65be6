"""FFmpeg decoder of one stream: motion vectors where exported, threads only elsewhere, bounded picture memory."""

import errno
import os
from typing import ClassVar

import av
from av.codec.context import CodecContext
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame

from cluster.codec.nal import Sequence
from cluster.codec.picture_memory import DECODED_BYTES, PictureMemory, PicturesTooLargeError
from cluster.errors import SourceError

# FFmpeg's own "av1" only drives hardware.
_PREFERRED = {"av1": "libdav1d"}

# H.264 conceals and flags damaged pictures by itself; told to explode it hides some of them instead. HEVC flags
# nothing: only exploding turns missing references and damaged slices into errors.
_ERROR_DETECTION = {"hevc": "crccheck+explode"}

# Frame threading returns wrong, changing vectors on B-frames; these codecs export none.
_THREADED = frozenset({"hevc", "av1", "vp9"})
_THREADED_PIXELS = 3840 * 2160 * 3 // 4
"""One core decodes several cameras of fewer pixels, and threads across cameras cost nothing."""
MOST_THREADS = 4

# What these raise for a picture above max_pixels; damage is nearly always invalid data.
_OVERSIZE = {"av1": {errno.ERANGE, errno.EINVAL}, "vp9": {errno.EINVAL}, "mjpeg": {errno.EINVAL}}


class DecodeError(Exception):
    """The decoder refused a packet."""


class Decoder:
    """Feeds packets to FFmpeg. ``flush`` drops all pictures but keeps parameter sets.

    Codecs in :data:`_THREADED` return pictures, and report damage, up to ``threads - 1`` packets later.
    """

    device: ClassVar[str] = "cpu"
    options: ClassVar[dict[str, str]] = {"flags2": "+export_mvs"}

    def __init__(
        self, codec: str, extradata: bytes, decoded_bytes: int = DECODED_BYTES, size: tuple[int, int] = (0, 0)
    ) -> None:
        """``decoded_bytes``: see PictureMemory. ``size``: width and height as the source tells them, 0 where unknown.

        Raises:
            SourceError: this FFmpeg cannot decode ``codec``.
        """
        self.codec = codec
        try:
            context = self._create(codec)
        except (av.FFmpegError, ValueError):
            raise SourceError(f"this FFmpeg has no decoder for the codec {codec!r}", retryable=False) from None
        if not isinstance(context, VideoCodecContext):
            raise SourceError(f"{codec!r} is not a video codec", retryable=False)
        self._memory = PictureMemory(codec, decoded_bytes)
        self._refused = ""
        self._sequence: Sequence | None = None
        try:
            self._sequence = self._memory.check_parameter_sets(extradata)
        except PicturesTooLargeError as error:
            # Those in band may be others: the camera was set to another size since.
            self._refused, extradata = str(error), b""
        self._size = size
        self.threads = 1
        context.thread_count = 1
        context.copy_opaque = True
        context.options = {"max_pixels": str(self._memory.max_pixels), **self.options}
        if codec in _ERROR_DETECTION:
            context.options |= {"err_detect": _ERROR_DETECTION[codec]}
        if extradata:
            context.extradata = extradata
        self._context = context

    def __del__(self) -> None:
        # Threads that still decode would wait for Python's lock to give their pictures back, and freeing the context
        # waits for them with the lock held. Flushing waits without.
        if hasattr(self, "_context"):
            self._context.flush_buffers()

    @property
    def reorders(self) -> bool:
        """Whether pictures are shown in another order than decoded (B-frames)."""
        return self._context.has_b_frames

    def decode(self, data: bytes, pts: int | None, dts: int | None) -> list[VideoFrame]:
        """Pictures that became ready, in display order. ``data`` must not be empty.

        Raises:
            DecodeError: the packet is damaged or cannot be decoded here.
            PicturesTooLargeError: nothing was decoded; the decoder is of no more use.
        """
        sequence = self._memory.check_parameter_sets(data)
        if sequence is not None:
            self._sequence, self._refused = sequence, ""
        if self._refused:
            raise PicturesTooLargeError(self._refused)
        if not self._context.is_open:
            self._choose_threads()
        self._memory.check_budget(self._context)
        # Packet(bytes) would lend FFmpeg memory without the zero padding that its bit readers run into.
        packet = av.Packet(len(data))
        packet.update(data)
        packet.pts, packet.dts = pts, dts
        packet.opaque = self._memory.track_picture()
        return self._run(packet)

    def drain(self) -> list[VideoFrame]:
        """Pictures still held back for reordering; the decoder is then ready for a keyframe."""
        try:
            return self._run(None)
        finally:
            self.flush()

    def flush(self) -> None:
        self._context.flush_buffers()

    def _create(self, codec: str) -> CodecContext:
        return CodecContext.create(_PREFERRED.get(codec, codec), "r")

    def _choose_threads(self) -> None:
        """Set the thread count before the first packet, when the size is known."""
        width, height = self._size if self._sequence is None else (self._sequence.width, self._sequence.height)
        if self.codec not in _THREADED or width * height < _THREADED_PIXELS:
            return
        spare = self._memory.spare_pictures(width, height, self._sequence)
        self.threads = max(1, min(len(os.sched_getaffinity(0)), MOST_THREADS, 1 + spare))
        if self.threads == 1:
            return
        self._context.thread_count = self.threads
        if self.codec == "av1":
            # Within a picture: none comes late, and none more is held.
            self._context.options |= {"max_frame_delay": "1"}
        else:
            self._context.thread_type = "FRAME"

    def _run(self, packet: av.Packet | None) -> list[VideoFrame]:  # type: ignore[type-arg]
        try:
            frames = self._context.decode(packet)
        except (av.FFmpegError, ValueError, MemoryError) as error:
            if getattr(error, "errno", None) in _OVERSIZE.get(self.codec, ()):
                raise PicturesTooLargeError(self._memory.too_large()) from error
            raise DecodeError(str(error)) from error
        for frame in frames:
            # From here on they are the caller's, and so are the copies that they would pass it on to.
            frame.opaque = None
        return frames
