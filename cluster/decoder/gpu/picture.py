"""Decoded pictures of many cameras as tensors on their device: scaling to the patch grid, RGB, and luma difference.

Reproduces what :mod:`cluster.codec.picture` gets from libswscale on x86-64, including its coefficients and truncated
products: fewer than 1 in 100 pixels are one grey level off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from av.video.frame import VideoFrame
from torch.utils.dlpack import from_dlpack

from cluster.types import PatchGrid

# Red from V, blue from U, green from U, green from V; limited range, times 65536 (libswscale's ff_yuv2rgb_coeffs).
_COLOURS = {
    "709": (117489, 138438, -13975, -34925),
    "fcc": (104448, 132798, -24759, -53109),
    "601": (104597, 132201, -25675, -53279),
    "240m": (117579, 136230, -16907, -35559),
    "2020": (110013, 140363, -12277, -42626),
}
# By AVColorSpace; all others are treated as BT.601.
_SPACES = {1: "709", 4: "fcc", 7: "240m", 9: "2020", 10: "2020"}
_FULL_RANGE = 2

CENTRE, LEFT = 0.5, 0.25
_LEFT_CODECS = frozenset({"h264", "hevc", "mpeg4"})
"""Codecs with left-sited chroma by default; streams rarely declare another siting."""

Colour = tuple[int, int, int, int, int, int]

_NEGLIGIBLE = 0.002
_ACROSS, _DOWN = 1 << 14, 1 << 12
"""Fixed-point 1.0 of the horizontal and the vertical coefficients."""


@dataclass(frozen=True, slots=True)
class Planes:
    """A 4:2:0 picture on the device that decoded it, in 8-bit levels: uint8, or float32 for more than 8 bits.

    * ``luma`` ``[height, width]``, ``chroma`` ``[height / 2, width / 2, 2]``
    * ``site``: horizontal position of a chroma sample across its two luma pixels, 0.5 for their centre
    * ``colour``: black level, then factors times 8192: luma, red from V, blue from U, green from U, green from V
    """

    luma: torch.Tensor
    chroma: torch.Tensor
    colour: Colour
    site: float

    @classmethod
    def of(cls, frame: VideoFrame, codec: str) -> Self:
        """The planes of a frame on the GPU, or in NV12 or P010 in host memory; they hold the decoder's surface.

        ``codec`` determines the chroma siting, which PyAV does not expose. Imports the DLPack capsule, as torch would
        otherwise request a stream synchronisation that PyAV does not support; none is needed, since FFmpeg maps
        pictures on the default stream, as torch uses. Raises ``NotImplementedError``: a format other than 4:2:0.
        """
        planes: list[Any] = list(frame.planes)
        if len(planes) != 2:
            raise NotImplementedError(f"pictures in {frame.format.name}")
        luma, chroma = (from_dlpack(plane.__dlpack__()) for plane in planes)
        if luma.dtype != torch.uint8:
            # P010 and P016 are MSB-aligned.
            luma, chroma = (plane.to(torch.float32) / 256.0 for plane in (luma, chroma))
        return cls(
            luma, chroma, colour_factors(frame.colorspace, frame.color_range), LEFT if codec in _LEFT_CODECS else CENTRE
        )

    def painted(self, luma: torch.Tensor, chroma: torch.Tensor) -> Planes:
        """A copy that is black where the masks ``[height, width]`` and ``[height / 2, width / 2]`` are set."""
        black = self.colour[0]
        return Planes(
            self.luma.masked_fill(luma, black), self.chroma.masked_fill(chroma[..., None], 128), self.colour, self.site
        )


def colour_factors(colorspace: int, color_range: int) -> Colour:
    """Factors of the conversion to RGB, rounded as in libswscale."""
    factors = _COLOURS[_SPACES.get(int(colorspace), "601")]
    if color_range == _FULL_RANGE:
        chroma = [_rounded(int(each * 224 / 255)) for each in factors]
        return (0, 8192, *chroma)  # type: ignore[return-value]
    return (16, _rounded(65536 * 255 // 219), *map(_rounded, factors))  # type: ignore[return-value]


def _rounded(factor: int) -> int:
    return (factor * 8192 + 32768) >> 16


@dataclass(frozen=True, slots=True)
class _Scaling:
    """Scaling coefficients. ``across`` ``[width, source width]``; ``taps``: for each vertical tap its source rows
    ``[height]`` and coefficients ``[height, 1]``."""

    across: torch.Tensor
    taps: tuple[tuple[torch.Tensor, torch.Tensor], ...]


@lru_cache(maxsize=256)
def _scaling(source: tuple[int, int], target: tuple[int, int], site: float, device: torch.device) -> _Scaling:
    across = torch.from_numpy(_coefficients(source[1], target[1], site, _ACROSS).astype(np.float32)).to(device)
    down = _coefficients(source[0], target[0], CENTRE, _DOWN)
    # Vertical filters have an even number of taps.
    count = min(-(-int((down > 0).sum(axis=1).max()) // 2) * 2, source[0])
    rows = np.minimum((down > 0).argmax(axis=1), source[0] - count)[:, None] + np.arange(count)
    factors = np.take_along_axis(down, rows, axis=1).astype(np.int32)
    taps = zip(torch.from_numpy(rows).to(device).unbind(1), torch.from_numpy(factors).to(device).unbind(1), strict=True)
    return _Scaling(across, tuple((row, factor[:, None]) for row, factor in taps))


def _coefficients(source: int, target: int, site: float, one: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Weight ``[target, source]`` of each source pixel in a target pixel, as in libswscale's AREA, times ``one``.

    A box as wide as a target pixel when shrinking, else linear interpolation.
    """
    step = ((source << 16) + target // 2) // target / 65536
    centres = (np.arange(target) + site) * step - site
    pixels = np.arange(-4 - round(step), source + 4 + round(step))
    if step >= 1:
        low, high = centres + 0.5 - step / 2, centres + 0.5 + step / 2
        shares = np.minimum(high[:, None], pixels + 1.0) - np.maximum(low[:, None], pixels)
    else:
        shares = 1.0 - np.abs(pixels - centres[:, None])
    shares = np.clip(shares, 0.0, None)
    shares[shares <= _NEGLIGIBLE * shares.sum(axis=1, keepdims=True)] = 0.0
    exact = np.zeros((target, source))
    np.add.at(exact.T, np.clip(pixels, 0, source - 1), shares.T)
    exact *= one / exact.sum(axis=1, keepdims=True)
    # Rounding errors are carried to the next coefficient, so that they sum to one.
    whole = np.floor(np.cumsum(exact, axis=1) + 0.5)
    return np.diff(whole, axis=1, prepend=0.0).astype(np.int64)


def scale_planes(pictures: Sequence[Planes], grid: PatchGrid) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale to the grid's resolution without its overlap: ``luma [n, height, width]`` and ``chroma [n, 2, height / 2,
    width / 2]``, uint8. Pictures of the same size are batched.
    """
    device = pictures[0].luma.device
    height, width = grid.scaled
    half = -(-height // 2), -(-width // 2)
    luma = torch.empty((len(pictures), height, width), dtype=torch.uint8, device=device)
    chroma = torch.empty((len(pictures), 2, *half), dtype=torch.uint8, device=device)
    sizes: dict[tuple[torch.Size, torch.dtype, float], list[int]] = {}
    for place, picture in enumerate(pictures):
        sizes.setdefault((picture.luma.shape, picture.luma.dtype, picture.site), []).append(place)
    for (*_, site), places in sizes.items():
        these = [pictures[place] for place in places]
        luma[places] = _scale(torch.stack([each.luma for each in these]), height, width, CENTRE)
        stacked = torch.stack([each.chroma for each in these]).permute(0, 3, 1, 2)
        chroma[places] = _scale(stacked, *half, site)
    return luma, chroma


def _scale(pixels: torch.Tensor, height: int, width: int, site: float) -> torch.Tensor:
    """Scale to ``[..., height, width]`` uint8.

    The horizontal pass is exact in float32 (not in TF32, which is off by default in torch); the vertical one drops 16
    bits of each product and adds half of the loss back.
    """
    scaling = _scaling((pixels.shape[-2], pixels.shape[-1]), (height, width), site, pixels.device)
    rows = (pixels.to(torch.float32) @ scaling.across.T).to(torch.int32) >> 7
    rows.clamp_max_(32767)
    total = torch.full((1,), (64 + 8 * (len(scaling.taps) - 1)) >> 4, dtype=torch.int32, device=pixels.device)
    for row, factor in scaling.taps:
        total = total + ((rows.index_select(-2, row) * factor) >> 16)
    return (total >> 3).clamp_(0, 255).to(torch.uint8)


def to_rgb(luma: torch.Tensor, chroma: torch.Tensor, colours: torch.Tensor) -> torch.Tensor:
    """Convert scaled planes to RGB ``[n, height, width, 3]`` uint8; ``colours`` ``[n, 6]`` int32 (see :class:`Planes`).

    Each product is truncated by 16 bits, as in libswscale: up to three levels below an exact conversion.
    """
    height, width = luma.shape[1:]
    black, bright, red, blue, green_u, green_v = colours.to(torch.int32)[..., None, None].unbind(1)
    # Four pixels share a chroma sample.
    wide = (8 * (chroma.to(torch.int32) - 128)).repeat_interleave(2, -2).repeat_interleave(2, -1)
    u, v = wide[..., :height, :width].unbind(1)
    level = (8 * (luma.to(torch.int32) - black) * bright) >> 16
    pixels = torch.stack(
        [
            level + ((v * red) >> 16),
            level + ((u * green_u) >> 16) + ((v * green_v) >> 16),
            level + ((u * blue) >> 16),
        ],
        dim=-1,
    )
    return pixels.clamp_(0, 255).to(torch.uint8)


def cell_means(plane: torch.Tensor, grid: PatchGrid) -> torch.Tensor:
    """Per-patch means of integers ``[n, height, width]``: ``[n, rows, cols]`` float32, bit-identical to
    :func:`cluster.types.cell_means`."""
    cells = plane.reshape(-1, grid.rows, grid.patch, grid.cols, grid.patch)
    return cells.sum(dim=(2, 4), dtype=torch.int32).to(torch.float32) / float(grid.patch**2)


def luma_difference(
    luma: torch.Tensor, last: torch.Tensor, black: torch.Tensor | None, known: torch.Tensor, grid: PatchGrid
) -> torch.Tensor:
    """Batched :class:`cluster.codec.picture.LumaDifference`: ``[n, rows, cols]`` grey levels; zeros unless a last
    picture is ``known`` ``[n]``. ``black`` ``[n, height, width]``: pixels under privacy masks."""
    difference = luma.to(torch.int16) - last.to(torch.int16)
    subset = difference[:, ::8, ::8].flatten(1)
    seen = torch.ones_like(subset, dtype=torch.bool)
    if black is not None:
        seen = ~black[:, ::8, ::8].flatten(1)
        seen |= ~seen.any(1, keepdim=True)
    difference = (difference - masked_quantile(subset, seen, 1, 2)[:, None, None]).abs_()
    if black is not None:
        difference = difference.masked_fill_(black, 0)
    return cell_means(difference, grid) * known[:, None, None]


def masked_quantile(values: torch.Tensor, seen: torch.Tensor, share: int, of: int) -> torch.Tensor:
    """The ``share / of`` quantile ``[n]`` of each row's seen values ``[n, m]``, an actual value; 0 if none is seen."""
    largest = torch.inf if values.is_floating_point() else torch.iinfo(values.dtype).max
    ordered = values.masked_fill(~seen, largest).sort(dim=1).values
    count = seen.sum(dim=1, keepdim=True)
    found = ordered.gather(1, count * share // of).squeeze(1)
    return torch.where(count.squeeze(1) > 0, found, torch.zeros_like(found))
