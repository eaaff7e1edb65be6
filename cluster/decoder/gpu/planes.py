"""Decoded pictures as tensors on the device they were decoded on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from av.video.frame import VideoFrame
from torch.utils.dlpack import from_dlpack

# Red from V, blue from U, green from U and from V, of limited range, times 65536 (libswscale's ff_yuv2rgb_coeffs).
_COLOURS = {
    "709": (117489, 138438, -13975, -34925),
    "fcc": (104448, 132798, -24759, -53109),
    "601": (104597, 132201, -25675, -53279),
    "240m": (117579, 136230, -16907, -35559),
    "2020": (110013, 140363, -12277, -42626),
}
# By AVColorSpace; all others are taken for BT.601.
_SPACES = {1: "709", 4: "fcc", 7: "240m", 9: "2020", 10: "2020"}
_FULL_RANGE = 2

CENTRE, LEFT = 0.5, 0.25
_LEFT_CODECS = frozenset({"h264", "hevc", "mpeg4"})
"""Unless their headers say otherwise, which hardly any does."""

Colour = tuple[int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Planes:
    """A picture in 4:2:0, on the device that decoded it, in grey levels: uint8, or float32 of more than 8 bits.

    * ``luma`` ``[height, width]``, ``chroma`` ``[height / 2, width / 2, 2]``
    * ``site``: where in its two pixels of luma a sample of chroma lies; a half is their centre
    * ``colour``: black level, and factors times 8192 of luma and of chroma: red, blue, green from U, green from V
    """

    luma: torch.Tensor
    chroma: torch.Tensor
    colour: Colour
    site: float

    @classmethod
    def of(cls, frame: VideoFrame, codec: str) -> Self:
        """The planes of a frame on the GPU, or of one in NV12 or P010 in host memory.

        ``codec`` tells where chroma lies, as PyAV does not. The decoder's surface stays taken as long as they live.

        PyAV lets nobody wait for a stream, and torch asks it to unless it is handed the capsule: FFmpeg maps pictures
        on the default stream, on which torch works too.

        Raises:
            NotImplementedError: pictures of another format than 4:2:0.
        """
        planes: list[Any] = list(frame.planes)
        if len(planes) != 2:
            raise NotImplementedError(f"pictures in {frame.format.name}")
        luma, chroma = (from_dlpack(plane.__dlpack__()) for plane in planes)
        if luma.dtype != torch.uint8:
            # P010 and P016 have their bits on top.
            luma, chroma = (plane.to(torch.float32) / 256.0 for plane in (luma, chroma))
        return cls(
            luma, chroma, colour_factors(frame.colorspace, frame.color_range), LEFT if codec in _LEFT_CODECS else CENTRE
        )

    def painted(self, luma: torch.Tensor, chroma: torch.Tensor) -> Planes:
        """Black where the masks ``[height, width]`` and ``[height / 2, width / 2]`` are set."""
        black = self.colour[0]
        return Planes(
            self.luma.masked_fill(luma, black), self.chroma.masked_fill(chroma[..., None], 128), self.colour, self.site
        )


def colour_factors(colorspace: int, color_range: int) -> Colour:
    """Factors of the conversion to RGB, as libswscale rounds them."""
    factors = _COLOURS[_SPACES.get(int(colorspace), "601")]
    if color_range == _FULL_RANGE:
        chroma = [_rounded(int(each * 224 / 255)) for each in factors]
        return (0, 8192, *chroma)  # type: ignore[return-value]
    return (16, _rounded(65536 * 255 // 219), *map(_rounded, factors))  # type: ignore[return-value]


def _rounded(factor: int) -> int:
    return (factor * 8192 + 32768) >> 16
