"""FFmpeg decoder of one stream: motion vectors where exported, threads only elsewhere, bounded picture memory.

The memory of decoded pictures is checked before decoding. Three bounds, since no single one sees everything: what H.264
and HEVC parameter sets ask for; pictures that live in FFmpeg, counted before every packet, since slices and reordering
can hold more than parameter sets say; and FFmpeg's own limit on the size of a picture, for codecs whose headers are not
read here.
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
"""4K with 8 references, or 1080p with 16 in any format."""

_SIDE, _OTHER_SIDE = 0.75, 0.25
"""Bytes per pixel beside its samples: in H.264 and HEVC stored motion for later pictures. Measured: 0.5 to 0.7."""

_PICTURES = {"av1": 10, "vp9": 10, "vp8": 5, "mpeg4": 5, "mjpeg": 8}
"""Pictures that a decoder may hold whatever the stream says: its slots, the one in decoding and the one shown. A
progressive JPEG's coefficients are worth several."""
_OTHER_PICTURES = 10

# FFmpeg's own "av1" only drives hardware.
_PREFERRED = {"av1": "libdav1d"}

# H.264 conceals and flags damaged pictures by itself; told to explode it hides some of them instead. HEVC and JPEG flag
# nothing: only exploding turns missing references, damaged slices and pieces of a picture into errors.
_ERROR_DETECTION = {"hevc": "crccheck+explode", "mjpeg": "explode"}

# Frame threading returns wrong, changing vectors on B-frames; these codecs export none.
_THREADED = frozenset({"hevc", "av1", "vp9"})
_THREADED_PIXELS = 3840 * 2160 * 3 // 4
"""One core decodes several cameras of fewer pixels, and threads across cameras cost nothing."""
MOST_THREADS = 4

_MOST_ASPECT = 4
"""Of a pixel; fields of 704 x 288 and half-width recordings have 2."""

# What these raise for a picture above max_pixels; damage is nearly always invalid data.
_OVERSIZE = {"av1": {errno.ERANGE, errno.EINVAL}, "vp9": {errno.EINVAL}, "mjpeg": {errno.EINVAL}}


class PicturesTooLargeError(SourceError):
    """The stream needs more memory for decoded pictures than its camera may have."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)


def trim_heap() -> None:
    """Return freed memory to the system; malloc keeps blocks of a picture's size otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@dataclass(eq=False)
class _Picture:
    """Marker attached to a packet and, by FFmpeg, to its pictures as long as they live; ``discard``: the packet's."""

    discard: bool


class PictureMemory:
    """Picture memory accounting of one decoder; ``budget``: bytes."""

    def __init__(self, codec: str, budget: int) -> None:
        self.codec = codec
        self.budget = budget
        self._side = _SIDE if codec in FRAMED_CODECS else _OTHER_SIDE
        self._least = 2 if codec in FRAMED_CODECS else _PICTURES.get(codec, _OTHER_PICTURES)
        # One of each packet with a living picture.
        self.live: WeakSet[_Picture] = WeakSet()

    @property
    def max_pixels(self) -> int:
        """Largest picture that fits the budget in the number this codec's decoder needs."""
        return int(self.budget / (self._least * (1.5 + self._side)))

    def track_picture(self, discard: bool = False) -> _Picture:
        """Marker for the next packet, to count its pictures."""
        picture = _Picture(discard)
        self.live.add(picture)
        return picture

    def check_parameter_sets(self, data: bytes) -> Sequence | None:
        """Check an Annex-B packet's parameter sets; returns the last, None without any. Raises PicturesTooLargeError:
        one exceeds the budget."""
        sequence = None
        for sequence in sequences(self.codec, data):
            need = int(sequence.pictures * self._picture(sequence))
            if need > self.budget:
                self._refuse(sequence.width, sequence.height, f"{sequence.references} references", need)
        return sequence

    def spare_pictures(self, width: int, height: int, sequence: Sequence | None) -> int:
        """Pictures that fit the budget beyond the stream's own need."""
        if sequence is not None:
            return int(self.budget / self._picture(sequence)) - sequence.pictures
        return int(self.budget / (width * height * (1.5 + self._side))) - self._least

    def _picture(self, sequence: Sequence) -> float:
        samples = sequence.samples_per_pixel * (2 if sequence.depth > 8 else 1)
        return sequence.width * sequence.height * (samples + self._side)

    def check_budget(self, context: VideoCodecContext) -> None:
        """Check that one more picture of the decoder's current size and format fits. Raises PicturesTooLargeError: it
        does not."""
        width, height, form = context.coded_width, context.coded_height, context.format
        if not width or not height or form is None:
            return
        pictures = max(len(self.live) + 1, self._least)
        need = int(width * height * (form.padded_bits_per_pixel / 8 + self._side) * pictures)
        if need > self.budget:
            self._refuse(width, height, f"{pictures} pictures at a time", need)

    def too_large(self) -> str:
        """Error message for a picture that FFmpeg refused by its size, which it does not report."""
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
    """Feeds packets to FFmpeg. ``flush`` drops all pictures but keeps parameter sets.

    Codecs in :data:`_THREADED` return pictures, and report damage, up to ``threads - 1`` packets later.
    """

    device: ClassVar[str] = "cpu"
    options: ClassVar[dict[str, str]] = {"flags2": "+export_mvs"}

    def __init__(
        self, codec: str, extradata: bytes, decoded_bytes: int = DECODED_BYTES, size: tuple[int, int] = (0, 0)
    ) -> None:
        """``decoded_bytes``: see PictureMemory. ``size``: width and height as the source tells them, 0 where unknown.
        Raises SourceError: this FFmpeg cannot decode ``codec``."""
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

    @property
    def pixel_aspect(self) -> Fraction:
        """Width of a pixel over its height, as the stream tells; 1 where it tells nothing that a camera has."""
        aspect = self._context.sample_aspect_ratio
        return aspect if aspect and 1 / _MOST_ASPECT <= aspect <= _MOST_ASPECT else Fraction(1)

    def decode(self, data: bytes, pts: int | None, dts: int | None, *, discard: bool = False) -> list[VideoFrame]:
        """Pictures that became ready, in display order; ``opaque`` is True where they are not to be shown, as their
        packet was decoded with ``discard``, else None. ``data`` must not be empty. Raises ``DecodeError``: the packet
        is damaged or cannot be decoded here; ``PicturesTooLargeError``: nothing was decoded; the decoder is of no more
        use."""
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
        # Packet(bytes) would lend FFmpeg memory without the zero padding that its bit readers run into.
        packet = av.Packet(len(data))
        packet.update(data)
        packet.pts, packet.dts = pts, dts
        packet.opaque = self._memory.track_picture(discard)
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
        self.threads = max(1, min(usable_cores(), MOST_THREADS, 1 + spare))
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
            frame.opaque = getattr(frame.opaque, "discard", False) or None
        return frames
