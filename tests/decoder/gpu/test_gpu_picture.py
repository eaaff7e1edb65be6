"""Scaling, colours and change on a GPU's code, run on the CPU, against libswscale and numpy."""

import av
import numpy as np
import pytest
import torch
from av.video.reformatter import Interpolation, VideoReformatter

from cluster.codec.picture import LumaDifference, PictureScaler
from cluster.codec.privacy import covered, fill
from cluster.decoder.gpu.picture import (
    Planes,
    cell_means,
    colour_factors,
    luma_difference,
    masked_quantile,
    scale_planes,
    to_rgb,
)
from cluster.types import PatchGeometry, PatchGrid, pictures

QWEN = PatchGeometry(patch=14, merge=2, temporal=2)
GRID = PatchGrid(rows=8, cols=12, patch=14, merge=2, temporal=2)
SIZES = [(1920, 1080), (1280, 720), (768, 432), (640, 480), (352, 288), (320, 180), (64, 48)]


def picture(width: int, height: int, seed: int = 0, *, colorspace: int = 1, color_range: int = 1) -> av.VideoFrame:
    """Noise over a gradient: every frequency, and areas that a scaler must average."""
    random = np.random.default_rng(seed)
    slope = np.linspace(20, 200, width)[None] + np.linspace(0, 30, height)[:, None]
    pixels = np.full((height * 3 // 2, width), 128.0)
    pixels[:height] = slope + random.normal(0, 25, (height, width))
    pixels[height:] = random.normal(128, 30, (height // 2, width))
    frame = av.VideoFrame.from_ndarray(pixels.clip(0, 255).astype(np.uint8), "yuv420p")
    frame.colorspace, frame.color_range = colorspace, color_range
    return frame


def planes(frame: av.VideoFrame) -> Planes:
    return Planes.of(frame.reformat(format="nv12"), "mjpeg")


def colours(*pictures: Planes) -> torch.Tensor:
    return torch.tensor([each.colour for each in pictures])


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_scaled_picture_is_libswscales_within_a_grey_level(size):
    frame, grid = picture(*size), QWEN.grid(*size)
    rgb, luma = PictureScaler(grid)(frame)
    ours = planes(frame)
    scaled, chroma = scale_planes([ours], grid)
    difference = np.abs(scaled[0].numpy().astype(int) - luma)
    assert difference.max() <= 1
    assert np.count_nonzero(difference) < 0.02 * difference.size
    # A level of luma and one of chroma, which is two of blue, and what rounding adds.
    colour = np.abs(to_rgb(scaled, chroma, colours(ours))[0].numpy().astype(int) - rgb)
    assert colour.max() <= 5
    assert np.count_nonzero(colour) < 0.03 * colour.size


@pytest.mark.parametrize("color_range", [1, 2])
@pytest.mark.parametrize("colorspace", [1, 2, 4, 5, 6, 7, 9])
def test_colours_are_libswscales(colorspace, color_range):
    random = np.random.default_rng(colorspace)
    height, width = GRID.height, GRID.width
    pixels = random.integers(0, 256, (height * 3 // 2, width), dtype=np.uint8)
    frame = av.VideoFrame.from_ndarray(pixels, "yuv420p")
    frame.colorspace, frame.color_range = colorspace, color_range
    wanted = VideoReformatter().reformat(frame, format="rgb24", interpolation=Interpolation.FAST_BILINEAR, threads=1)
    luma, chroma = torch.from_numpy(pixels[:height])[None], torch.from_numpy(pixels[height:])
    ours = to_rgb(luma, chroma.reshape(1, 2, height // 2, -1), torch.tensor([colour_factors(colorspace, color_range)]))
    assert np.abs(ours[0].numpy().astype(int) - wanted.to_ndarray()).max() <= 1


def test_pictures_of_many_sizes_are_scaled_in_one_call_as_alone():
    several = [planes(picture(*size, seed)) for seed, size in enumerate([*SIZES, *SIZES[:3]])]
    luma, chroma = scale_planes(several, GRID)
    for place, one in enumerate(several):
        alone = scale_planes([one], GRID)
        assert torch.equal(luma[place], alone[0][0])
        assert torch.equal(chroma[place], alone[1][0])


def test_pictures_of_ten_bits_have_the_grey_levels_of_eight():
    frame = picture(640, 360)
    deep = Planes.of(frame.reformat(format="p010le"), "mjpeg")
    assert deep.luma.dtype == torch.float32
    for eight, ten in zip(scale_planes([planes(frame)], GRID), scale_planes([deep], GRID), strict=True):
        assert (eight.int() - ten.int()).abs().max() <= 1


def test_other_formats_are_refused():
    with pytest.raises(NotImplementedError, match="yuv444p"):
        Planes.of(picture(64, 48).reformat(format="yuv444p"), "h264")


def test_masks_are_black_before_scaling():
    ours = planes(picture(640, 360))
    luma, chroma = torch.zeros(360, 640, dtype=torch.bool), torch.zeros(180, 320, dtype=torch.bool)
    luma[:, :320], chroma[:, :160] = True, True
    painted = ours.painted(luma, chroma)
    assert (painted.luma[:, :320] == 16).all()
    assert (painted.chroma[:, :160] == 128).all()
    assert torch.equal(painted.luma[:, 320:], ours.luma[:, 320:])
    assert not (ours.luma[:, :320] == 16).all(), "the decoder's own picture must stay as it is"


def test_means_of_cells_are_numpys_to_the_bit():
    plane = np.random.default_rng(0).integers(0, 256, (GRID.height, GRID.width), dtype=np.uint8)
    assert np.array_equal(cell_means(torch.from_numpy(plane)[None], GRID)[0].numpy(), pictures.cell_means(plane, GRID))


@pytest.mark.parametrize("masked", [False, True])
def test_luma_difference_is_numpys_to_the_bit(masked):
    random = np.random.default_rng(1)
    raster = fill(((0.1, 0.1), (0.6, 0.1), (0.5, 0.7)), 640, 360) if masked else None
    black = None if raster is None else torch.from_numpy(covered(raster, GRID.height, GRID.width))
    wanted = LumaDifference(GRID, raster)
    shape = GRID.height, GRID.width
    last = random.integers(0, 256, shape, dtype=np.uint8)
    wanted(last)
    for step in range(4):
        now = (last.astype(int) + 7 * step + random.normal(0, 6, shape)).clip(0, 255).astype(np.uint8)
        ours = luma_difference(
            torch.from_numpy(now)[None],
            torch.from_numpy(last)[None],
            None if black is None else black[None],
            torch.tensor([True]),
            GRID,
        )
        assert np.array_equal(ours[0].numpy(), wanted(now))
        last = now


def test_nothing_is_known_to_differ_from_a_picture_of_another_scene():
    luma = torch.full((2, GRID.height, GRID.width), 200, dtype=torch.uint8)
    luma[:, :14, :14] = 0
    last = torch.zeros_like(luma)
    found = luma_difference(luma, last, None, torch.tensor([True, False]), GRID)
    assert found[0].max() > 0
    assert found[1].max() == 0


@pytest.mark.parametrize(("share", "of"), [(1, 2), (3, 4)])
def test_quantiles_count_what_is_seen_alone(share, of):
    random = np.random.default_rng(2)
    values = random.normal(size=(5, 40)).astype(np.float32)
    seen = random.random((5, 40)) < np.array([1.0, 0.7, 0.3, 0.1, 0.0])[:, None]
    found = masked_quantile(torch.from_numpy(values), torch.from_numpy(seen), share, of)
    for row, mask, one in zip(values, seen, found.tolist(), strict=True):
        those = np.sort(row[mask])
        assert one == (those[those.size * share // of] if those.size else 0.0)
