"""FFmpeg decoder of one stream, with motion vectors where the codec exports them, and bounded picture memory.

Picture memory is checked before decoding, against three bounds, as none of them alone covers every case: the demand
declared by H.264 and HEVC parameter sets; the pictures alive in FFmpeg, counted before every packet, since slices and
reordering can hold more than the parameter sets declare; and FFmpeg's ``max_pixels``, for codecs whose headers are not
parsed here.
"""

import ctypes
import errno
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar
from weakref import WeakSet

import av
from av.codec.context import CodecContext
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame

from cluster.codec.nal import FRAMED_CODECS, Sequence, sequences, without_hevc_sei
from cluster.errors import SourceError
from cluster.hosts import usable_cores

MIB = 2**20

DECODED_BYTES = 192 * MIB
"""Enough for 4K with 8 references, or 1080p with 16 in any pixel format."""

_SIDE, _OTHER_SIDE = 0.75, 0.25
"""Bytes per pixel on top of its samples: H.264 and HEVC store motion for later pictures. Measured: 0.5 to 0.7."""

_PICTURES = {"av1": 10, "vp9": 10, "vp8": 5, "mpeg4": 5, "mjpeg": 8}
"""Pictures a decoder may hold, whatever the stream declares: reference slots, the current and the output picture. The
coefficients of a progressive JPEG count as several."""
_OTHER_PICTURES = 10

# FFmpeg's native "av1" decoder needs hardware.
_PREFERRED = {"av1": "libdav1d"}

# FFmpeg's H.264 decoder conceals and flags damaged pictures; with "explode" it hides some of them instead. HEVC and
# JPEG flag nothing: only "explode" turns missing references, damaged slices and incomplete pictures into errors.
_ERROR_DETECTION = {"hevc": "crccheck+explode", "mjpeg": "explode"}

# Frame threading corrupts motion vectors of B-frames, and not reproducibly; these codecs export none.
_THREADED = frozenset({"hevc", "av1", "vp9"})
_THREADED_PIXELS = 3840 * 2160 * 3 // 4
"""Below this, one core decodes several cameras, and one thread per camera is parallel enough."""
MOST_THREADS = 4

_MOST_ASPECT = 4
"""Largest pixel aspect ratio accepted; 704 x 288 fields and half-width recordings have 2."""

# Errors these codecs raise for a picture above max_pixels; damage nearly always raises AVERROR_INVALIDDATA.
_OVERSIZE = {"av1": {errno.ERANGE, errno.EINVAL}, "vp9": {errno.EINVAL}, "mjpeg": {errno.EINVAL}}


class PicturesTooLargeError(SourceError):
    """The stream's decoded pictures need more memory than the camera's limit."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)


def trim_heap() -> None:
    """Return freed heap memory to the system; malloc would keep picture-sized blocks."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@dataclass(eq=False)
class _Picture:
    """Marker attached to a packet, which FFmpeg passes on to its pictures and keeps alive with them. ``discard``: as of
    the packet."""

    discard: bool


class PictureMemory:
    """Picture memory accounting of one decoder; ``budget``: bytes."""

    def __init__(self, codec: str, budget: int) -> None:
        self.codec = codec
        self.budget = budget
        self._side = _SIDE if codec in FRAMED_CODECS else _OTHER_SIDE
        self._least = 2 if codec in FRAMED_CODECS else _PICTURES.get(codec, _OTHER_PICTURES)
        # One marker for each packet whose picture is alive.
        self.live: WeakSet[_Picture] = WeakSet()

    @property
    def max_pixels(self) -> int:
        """Largest picture size, such that the budget holds as many pictures as this codec's decoder needs."""
        return int(self.budget / (self._least * (1.5 + self._side)))

    def track_picture(self, discard: bool = False) -> _Picture:
        """Marker for the next packet, counted until its pictures are freed."""
        picture = _Picture(discard)
        self.live.add(picture)
        return picture

    def check_parameter_sets(self, data: bytes) -> Sequence | None:
        """Check the sequence parameter sets of an Annex-B packet; returns the last one, if any. Raises
        PicturesTooLargeError if one exceeds the budget."""
        sequence = None
        for sequence in sequences(self.codec, data):
            need = int(sequence.pictures * self._picture(sequence))
            if need > self.budget:
                self._refuse(sequence.width, sequence.height, f"{sequence.references} references", need)
        return sequence

    def spare_pictures(self, width: int, height: int, sequence: Sequence | None) -> int:
        """Number of pictures that fit the budget beyond those the stream needs."""
        if sequence is not None:
            return int(self.budget / self._picture(sequence)) - sequence.pictures
        return int(self.budget / (width * height * (1.5 + self._side))) - self._least

    def _picture(self, sequence: Sequence) -> float:
        samples = sequence.samples_per_pixel * (2 if sequence.depth > 8 else 1)
        return sequence.width * sequence.height * (samples + self._side)

    def check_budget(self, context: VideoCodecContext) -> None:
        """Raise PicturesTooLargeError unless one more picture of the decoder's current size and format fits."""
        width, height, form = context.coded_width, context.coded_height, context.format
        if not width or not height or form is None:
            return
        pictures = max(len(self.live) + 1, self._least)
        need = int(width * height * (form.padded_bits_per_pixel / 8 + self._side) * pictures)
        if need > self.budget:
            self._refuse(width, height, f"{pictures} pictures at a time", need)

    def too_large(self) -> str:
        """Error message for a picture above ``max_pixels``; FFmpeg does not report its size."""
        return f"its {self.codec} pictures have more than {self.max_pixels / 1e6:.1f} megapixels, {self._limit}"

    def _refuse(self, width: int, height: int, what: str, need: int) -> None:
        raise PicturesTooLargeError(
            f"its {self.codec} video of {width} x {height} with {what} takes {need // MIB} MiB to decode, {self._limit}"
        )

    @property
    def _limit(self) -> str:
        return f"more than source_options.decoded_bytes allows ({self.budget // MIB} MiB)"


class DecodeError(Exception):
    """The decoder refused a packet."""


class Decoder:
    """FFmpeg decoder context of one stream. ``flush`` drops all pictures but keeps parameter sets.

    Codecs in :data:`_THREADED` return pictures, and report damage, up to ``threads - 1`` packets late.
    """

    device: ClassVar[str] = "cpu"
    options: ClassVar[dict[str, str]] = {"flags2": "+export_mvs"}

    def __init__(
        self, codec: str, extradata: bytes, decoded_bytes: int = DECODED_BYTES, size: tuple[int, int] = (0, 0)
    ) -> None:
        """``decoded_bytes``: picture memory budget. ``size``: width and height from the source, 0 when unknown. Raises
        SourceError if this FFmpeg build cannot decode ``codec``."""
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
            # In-band parameter sets may differ: the camera's resolution may have been changed since.
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
        # Freeing the context joins its threads while holding the GIL, which they need to release their pictures: a
        # deadlock. Flushing waits for them without the GIL.
        if hasattr(self, "_context"):
            self._context.flush_buffers()

    @property
    def pixel_aspect(self) -> Fraction:
        """Pixel width over height as the stream declares it; 1 if undeclared or implausible."""
        aspect = self._context.sample_aspect_ratio
        return aspect if aspect and 1 / _MOST_ASPECT <= aspect <= _MOST_ASPECT else Fraction(1)

    def decode(self, data: bytes, pts: int | None, dts: int | None, *, discard: bool = False) -> list[VideoFrame]:
        """Decode one packet; returns the pictures now ready, in display order. ``opaque`` is True on pictures not to
        be shown, whose packet had ``discard`` set, else None. ``data`` must not be empty. Raises ``DecodeError``: the
        packet is damaged or not decodable; ``PicturesTooLargeError``: nothing was decoded, and this decoder must be
        replaced."""
        sequence = self._memory.check_parameter_sets(data)
        if sequence is not None:
            self._sequence, self._refused = sequence, ""
        if self._refused:
            raise PicturesTooLargeError(self._refused)
        if not self._context.is_open:
            self._choose_threads()
        self._memory.check_budget(self._context)
        if self.codec == "hevc":
            data = without_hevc_sei(data) or data
        # Packet(bytes) would hand FFmpeg a buffer without the zero padding that its bit readers overrun into.
        packet = av.Packet(len(data))
        packet.update(data)
        packet.pts, packet.dts = pts, dts
        packet.opaque = self._memory.track_picture(discard)
        return self._run(packet)

    def drain(self) -> list[VideoFrame]:
        """Pictures still held back for reordering; leaves the decoder ready for a keyframe."""
        try:
            return self._run(None)
        finally:
            self.flush()

    def flush(self) -> None:
        self._context.flush_buffers()

    def _create(self, codec: str) -> CodecContext:
        return CodecContext.create(_PREFERRED.get(codec, codec), "r")

    def _choose_threads(self) -> None:
        """Set the thread count; called before the first packet, once the picture size is known."""
        width, height = self._size if self._sequence is None else (self._sequence.width, self._sequence.height)
        if self.codec not in _THREADED or width * height < _THREADED_PIXELS:
            return
        spare = self._memory.spare_pictures(width, height, self._sequence)
        self.threads = max(1, min(usable_cores(), MOST_THREADS, 1 + spare))
        if self.threads == 1:
            return
        self._context.thread_count = self.threads
        if self.codec == "av1":
            # Threads within a picture: no delay, no additional pictures held.
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
            # Drop the marker: from here on the caller owns the picture, and copies of it would inherit the marker.
            frame.opaque = getattr(frame.opaque, "discard", False) or None
        return frames
