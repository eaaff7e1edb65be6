"""JPEGs of a camera's newest picture, and stills decoded from packets."""

import contextlib
import io
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from av.video.frame import VideoFrame

from cluster.codec.decoder import DECODED_BYTES, DecodeError, Decoder
from cluster.decoder.footage.clip import Painter
from cluster.decoder.footage.segments import SegmentPacket
from cluster.errors import NotReadyError, SourceError
from cluster.types import BoolGrid, ShownPicture, UInt8Array
from cluster.vision.sampler import overlay

JPEG = "image/jpeg"
QUALITY = 82
TALLEST_STILL = 1080
NARROWEST = 16
_CACHED = 4
"""Renderings cached per picture: plain and with kept patches, at two sizes."""
_MOST_DECODED = 512


@dataclass(frozen=True, slots=True)
class Picture:
    """One rendered picture.

    * ``etag``: unique for every picture and rendering
    * ``pts``: microseconds on the camera's clock; ``age_s``: seconds since it was sampled
    """

    jpeg: bytes
    etag: str
    pts: int
    age_s: float
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class _Shown:
    frame: ShownPicture
    mask: BoolGrid
    at_s: float
    rendered: dict[tuple[bool, int], tuple[bytes, int, int]] = field(default_factory=dict)


class LatestPicture:
    """The newest sample of one camera and its kept patches, held by reference until rendered."""

    def __init__(self) -> None:
        self._shown: _Shown | None = None
        self._lock = threading.Lock()

    def show(self, frame: ShownPicture, mask: BoolGrid, at_s: float) -> None:
        """Set the newest sample, decoded at ``at_s`` (monotonic seconds); called in the camera's thread."""
        self._shown = _Shown(frame, mask, at_s)

    def clear(self) -> None:
        self._shown = None

    def render(self, *, kept: bool = False, width: int = 0) -> Picture:
        """Render as JPEG; renderings are cached. ``kept``: pruned patches are dark and grey; ``width``: in pixels, the
        sample's own if 0 or larger. Takes milliseconds: do not call on an event loop. Raises ``NotReadyError``: no
        picture yet."""
        shown = self._shown
        if shown is None:
            raise NotReadyError("there is no picture of this camera yet")
        grid = shown.frame.grid
        width = min(max(width, NARROWEST), grid.width) if width else grid.width
        with self._lock:
            rendered = shown.rendered.get((kept, width))
            if rendered is None:
                # Resize first: drawing the kept patches dominates.
                pixels = resized(shown.frame.host_rgb(), width)
                high, wide = pixels.shape[:2]
                rendered = to_jpeg(overlay(pixels, shown.mask) if kept else pixels), wide, high
                if len(shown.rendered) >= _CACHED:
                    shown.rendered.pop(next(iter(shown.rendered)))
                shown.rendered[kept, width] = rendered
        jpeg, wide, high = rendered
        # The checksum, since a replayed video, perhaps with new privacy masks, repeats times and indices.
        etag = f"{shown.frame.pts:x}-{shown.frame.index:x}-{'k' if kept else 'p'}{wide}-{zlib.crc32(jpeg):x}"
        return Picture(jpeg, etag, shown.frame.pts, max(0.0, time.monotonic() - shown.at_s), wide, high)


def resized(pixels: UInt8Array, width: int) -> UInt8Array:
    """Resize RGB ``[height, width, 3]`` to ``width`` pixels, keeping the aspect ratio; the same array if unchanged."""
    height, own = pixels.shape[:2]
    if width == own:
        return pixels
    # Imported on first use: most decoder processes never render.
    from PIL import Image

    small = Image.fromarray(pixels).resize((width, max(1, round(height * width / own))), Image.Resampling.BILINEAR)
    return np.asarray(small)


def to_jpeg(pixels: UInt8Array) -> bytes:
    """Encode RGB ``[height, width, 3]`` as JPEG."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def still(
    packets: Sequence[SegmentPacket], moment: int, painter: Painter | None, decoded_bytes: int = DECODED_BYTES
) -> bytes:
    """The picture at ``moment`` as JPEG, at the camera's resolution (at most 1080 lines) and display aspect ratio.

    ``packets``: one GOP, from its keyframe on, of which the last picture up to ``moment`` (camera microseconds) is
    used. ``painter``: privacy masks. ``decoded_bytes``: memory limit for decoded pictures. Raises ``SourceError``:
    nothing decodable, or not within ``decoded_bytes`` or 512 pictures.
    """
    if not packets:
        raise SourceError("the camera sent no decodable picture", retryable=False)
    if len(packets) > _MOST_DECODED and packets[_MOST_DECODED].order <= moment:
        raise SourceError("the last keyframe before it is too far back", retryable=False)
    segment = packets[0].segment
    decoder = Decoder(segment.codec, segment.extradata, decoded_bytes)
    found: VideoFrame | None = None
    # Pictures decoded before a damaged packet are valid.
    with contextlib.suppress(DecodeError):
        for placed in packets:
            if found is not None and placed.order > moment:
                break
            found = _last_until(found, decoder.decode(placed.packet.data, placed.time, placed.order), moment)
        found = _last_until(found, decoder.drain(), moment)
    if found is None:
        raise SourceError("the camera's picture cannot be decoded", retryable=False)
    if painter is not None:
        try:
            found = painter(found)
        except ValueError as error:
            raise SourceError(f"its privacy masks cannot be applied ({error})", retryable=False) from None
    scale = min(1.0, TALLEST_STILL / found.height)
    width, height = round(found.width * scale * decoder.pixel_aspect), round(found.height * scale)
    small = found.reformat(max(2, width), max(2, height), "rgb24", threads=1)
    # Typed as a union over all formats.
    pixels: Any = small.to_ndarray()
    return to_jpeg(pixels)


def _last_until(found: VideoFrame | None, frames: Sequence[VideoFrame], moment: int) -> VideoFrame | None:
    """The last picture up to ``moment``, or the first if all are later."""
    for frame in frames:
        if found is None or (frame.pts or 0) <= moment:
            found = frame
    return found
