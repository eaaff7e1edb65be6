"""Memory budget for decoded pictures of one decoder, enforced before decoding.

Three bounds, since no single one sees everything: what H.264 and HEVC parameter sets ask for; pictures that live in
FFmpeg, counted before every packet, since slices and reordering can hold more than parameter sets say; and FFmpeg's own
limit on the size of a picture, for codecs whose headers are not read here.
"""

import ctypes
from fractions import Fraction
from weakref import WeakSet

from av.video.codeccontext import VideoCodecContext

from cluster.codec.nal import FRAMED_CODECS, Sequence, sequences
from cluster.errors import SourceError

MIB = 2**20

DECODED_BYTES = 192 * MIB
"""4K with 8 references, or 1080p with 16 in any format."""

_SIDE = {"h264": Fraction(3, 4), "hevc": Fraction(3, 4)}
"""Bytes per pixel beside its samples: stored motion for later pictures. Measured: 0.5 to 0.7."""
_OTHER_SIDE = Fraction(1, 4)

_PICTURES = {"av1": 10, "vp9": 10, "vp8": 5, "mpeg4": 5, "mjpeg": 8}
"""Pictures that a decoder may hold whatever the stream says: its slots, the one in decoding and the one shown. A
progressive JPEG's coefficients are worth several."""
_OTHER_PICTURES = 10


class PicturesTooLargeError(SourceError):
    """The stream needs more memory for decoded pictures than its camera may have."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)


def trim_heap() -> None:
    """Return freed memory to the system; malloc keeps blocks of a picture's size otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _Picture:
    """Marker attached to a packet and, by FFmpeg, to its pictures as long as they live."""


class PictureMemory:
    """Picture memory accounting of one decoder; ``budget``: bytes."""

    def __init__(self, codec: str, budget: int) -> None:
        self.codec = codec
        self.budget = budget
        self._side = _SIDE.get(codec, _OTHER_SIDE)
        self._least = 2 if codec in FRAMED_CODECS else _PICTURES.get(codec, _OTHER_PICTURES)
        self._live: WeakSet[_Picture] = WeakSet()

    @property
    def max_pixels(self) -> int:
        """Largest picture that fits the budget in the number this codec's decoder needs."""
        return int(self.budget / (self._least * (Fraction(3, 2) + self._side)))

    @property
    def live(self) -> int:
        """Packets with a living picture."""
        return len(self._live)

    def track_picture(self) -> _Picture:
        """Marker for the next packet, to count its pictures."""
        picture = _Picture()
        self._live.add(picture)
        return picture

    def check_parameter_sets(self, data: bytes) -> Sequence | None:
        """Check an Annex-B packet's parameter sets; returns the last, None without any.

        Raises:
            PicturesTooLargeError: one exceeds the budget.
        """
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
        return int(self.budget / (width * height * (Fraction(3, 2) + self._side))) - self._least

    def _picture(self, sequence: Sequence) -> Fraction:
        samples = sequence.samples_per_pixel * (2 if sequence.depth > 8 else 1)
        return sequence.width * sequence.height * (samples + self._side)

    def check_budget(self, context: VideoCodecContext) -> None:
        """Check that one more picture of the decoder's current size and format fits.

        Raises:
            PicturesTooLargeError: it does not.
        """
        width, height, form = context.coded_width, context.coded_height, context.format
        if not width or not height or form is None:
            return
        pictures = max(self.live + 1, self._least)
        need = int(width * height * (Fraction(form.padded_bits_per_pixel, 8) + self._side) * pictures)
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
