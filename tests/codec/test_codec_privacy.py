"""Privacy masks: what they cover, and that nothing behind them reaches anything that is made of the picture."""

import av
import numpy as np
import pytest
from codec_clips import GEOMETRY, HEIGHT, WIDTH, encode, read, walk
from hypothesis import given, settings
from hypothesis import strategies as st
from pasting import paste_patches

from cluster.codec.file import FileSource
from cluster.codec.privacy import PrivacyMasks, covered, covered_cells, covered_pixels, fill, shrink
from cluster.codec.processor import CodecOptions, CodecProcessor
from cluster.registry import pruners
from cluster.types import PatchGeometry
from cluster.vision import make_pruner
from cluster.vision.sampler import PatchSampler

BAND = ((0.0, 0.2), (1.0, 0.2), (1.0, 0.7), (0.0, 0.7))
"""Of :func:`walk`: the rows 32 to 80 in which the square moves, and some around them."""

share = st.floats(0, 1).map(lambda value: round(value, 3))
polygons = st.lists(st.tuples(share, share), min_size=3, max_size=7).map(tuple)


def winds(polygon, x, y):
    """How often the polygon winds around the point, by the angles its corners are seen at."""
    corners = np.array(polygon) - (x, y)
    angles = np.arctan2(corners[:, 1], corners[:, 0])
    turns = np.diff(np.append(angles, angles[0]))
    return round(((turns + np.pi) % (2 * np.pi) - np.pi).sum() / (2 * np.pi))


@settings(max_examples=60, deadline=None)
@given(polygons, st.integers(1, 9), st.integers(1, 9))
def test_every_pixel_of_which_a_point_is_inside_is_covered(polygon, width, height):
    filled = fill(polygon, width, height)
    random = np.random.default_rng(0)
    for x, y in random.uniform(0, 1, (150, 2)):
        if winds(polygon, x, y):
            assert filled[int(y * height), int(x * width)], (x, y)
    for x, y in polygon:
        assert filled[min(int(y * height), height - 1), min(int(x * width), width - 1)]


def test_no_more_is_covered_than_what_is_touched():
    square = ((0.25, 0.25), (0.74, 0.25), (0.74, 0.74), (0.25, 0.74))
    assert fill(square, 4, 4).tolist() == [[0, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    triangle = ((0, 0), (0.99, 0), (0, 0.99))
    assert fill(triangle, 4, 4).tolist() == [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]


def test_a_grid_that_shows_its_middle_twice_hides_what_is_masked_there():
    """Seven patches in eight rows and columns, whose fourth and fifth are one: a mask of the fifth patch's row."""
    grid = PatchGeometry(14, 2, 1, square=98).grid(98, 98)
    raster = np.zeros((98, 98), np.bool_)
    raster[56:70] = True
    assert covered_cells(raster, grid)[:, 0].tolist() == [False] * 5 + [True] + [False] * 2
    assert np.flatnonzero(covered_pixels(raster, grid)[:, 0]).tolist() == list(range(70, 84))
    raster[42:56] = True
    assert covered_cells(raster, grid)[:, 0].tolist() == [False] * 3 + [True] * 3 + [False] * 2
    assert np.flatnonzero(covered_pixels(raster, grid)[:, 0]).tolist() == list(range(42, 84))


def test_crossing_edges_leave_no_hole():
    star = tuple((0.5 + 0.5 * np.sin(4 * np.pi * i / 5), 0.5 - 0.5 * np.cos(4 * np.pi * i / 5)) for i in range(5))
    assert fill(star, 40, 40)[20, 20]
    bow = ((0, 0), (1, 1), (1, 0), (0, 1))
    filled = fill(bow, 40, 40)
    assert filled[20, 2]
    assert filled[20, 37]
    assert not filled[2, 20]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**16), st.integers(1, 12), st.integers(1, 12), st.integers(1, 15), st.integers(1, 15))
def test_cells_that_lie_inside_as_a_whole(seed, height, width, rows, cols):
    raster = np.random.default_rng(seed).random((height, width)) < 0.8
    found = covered(raster, rows, cols)
    for row in range(rows):
        for col in range(cols):
            part = raster[
                row * height // rows : -(-(row + 1) * height // rows),
                col * width // cols : -(-(col + 1) * width // cols),
            ]
            assert found[row, col] == part.all()


CORNERS = ((0.1, 0.2), (0.7, 0.1), (0.5, 0.9)), ((0.6, 0.6), (1, 0.6), (1, 1), (0.6, 1))
PLANAR = ["yuv420p", "yuvj420p", "yuv422p", "yuv444p", "yuv411p", "yuvj440p", "gray", "yuv420p10le", "yuv422p10le"]


def planes(frame):
    return [np.frombuffer(plane, np.uint8).reshape(plane.height, plane.line_size).copy() for plane in frame.planes]


def noise(name, width, height, seed, raster):
    """Two pictures of random bytes that are equal wherever a sample has no part in the masked pixels."""
    random = np.random.default_rng(seed)
    pair = [av.VideoFrame(width, height, name) for _ in range(2)]
    for number, component in enumerate(pair[0].format.components):
        depth = 2 if component.bits > 8 else 1
        shape = (component.height, component.width)
        values = random.integers(0, 1 << component.bits, shape)
        other = random.integers(0, 1 << component.bits, shape)
        across, down = 2 ** np.ceil(np.log2(np.array([width, height]) / shape[::-1])).astype(int)
        for y, x in np.argwhere(np.ones(shape)):
            if not raster[y * down : (y + 1) * down, x * across : (x + 1) * across].any():
                other[y, x] = values[y, x]
        for frame, filled in zip(pair, (values, other), strict=True):
            plane = frame.planes[number]
            rows = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)
            rows[: shape[0], : shape[1] * depth] = filled.astype("<u2" if depth == 2 else np.uint8).view(np.uint8)
    return pair


@pytest.mark.parametrize("name", PLANAR)
@pytest.mark.parametrize(("width", "height"), [(64, 48), (33, 21)])
def test_two_pictures_that_differ_behind_the_mask_only_are_the_same(name, width, height):
    masks = PrivacyMasks(CORNERS)
    raster = masks.raster(width, height)
    pair = noise(name, width, height, 1, raster)
    one, other = (masks.apply(frame) for frame in pair)
    for a, b, component in zip(planes(one), planes(other), one.format.components, strict=True):
        assert np.array_equal(a[:, : component.width], b[:, : component.width])
    black = 0 if name.startswith("yuvj") else 16
    assert set(np.unique(planes(one)[0][:, :width][raster])) == {black}
    for plane, component in list(zip(planes(one), one.format.components, strict=True))[1:]:
        covered = shrink(raster, component.width, component.height)
        assert set(np.unique(plane[:, : component.width][covered])) == {128}


@pytest.mark.parametrize("name", ["rgb24", "gbrp", "bgra"])
def test_neither_do_pictures_of_red_green_and_blue(name):
    masks = PrivacyMasks(CORNERS)
    raster = masks.raster(64, 48)
    random = np.random.default_rng(1)
    one = random.integers(0, 256, (48, 64, 3), np.uint8)
    other = one.copy()
    other[raster] = random.integers(0, 256, (int(raster.sum()), 3), np.uint8)
    seen = [masks.apply(av.VideoFrame.from_ndarray(each, "rgb24").reformat(format=name)) for each in (one, other)]
    for a, b in zip(*(planes(frame) for frame in seen), strict=True):
        assert np.array_equal(a[:, :64], b[:, :64])


def test_without_masks_a_picture_is_left_alone():
    picture = av.VideoFrame(16, 16, "yuv420p")
    assert PrivacyMasks([]).apply(picture) is picture


def clip(path, pictures, **more):
    return encode(path, pictures, options={"qp": "0"} | more.pop("options", {}), **more)


def run(path, masks=(), pruner=None):
    source, processor = FileSource(path), CodecProcessor(GEOMETRY, CodecOptions(fps=4.0, masks=masks))
    processor.open(source.open())
    samples = [sample for packet in source.packets() for sample in processor.feed(packet)] + processor.drain()
    if pruner is None:
        return processor, samples
    sampler = PatchSampler("cam", make_pruner(pruner), 4.0)
    return samples, [frame for sample in samples if (frame := sampler.feed(sample)) is not None]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two lossless clips that differ inside ``BAND`` only: in one a square crosses it, in the other it is noise."""
    folder, random = tmp_path_factory.mktemp("masked"), np.random.default_rng(5)
    pictures = walk(60)
    inside = fill(BAND, WIDTH, HEIGHT)
    others = [picture.copy() for picture in pictures]
    for picture in others:
        picture[inside] = random.integers(0, 256, int(inside.sum()), np.uint8)
    return clip(folder / "one.mp4", pictures, gop=30), clip(folder / "other.mp4", others, gop=30)


def test_samples_do_not_depend_on_what_is_masked(pair):
    (_, one), (_, other) = (run(path, (BAND,)) for path in pair)
    _, plain = run(pair[0])
    assert len(one) == len(other) == len(plain) > 10
    for a, b, unmasked in zip(one, other, plain, strict=True):
        assert np.array_equal(a.rgb, b.rgb)
        assert np.array_equal(a.luma, b.luma)
        assert np.array_equal(a.change.luma, b.change.luma)
        assert not a.change.luma[a.hidden].any()
        assert not a.change.max_motion[a.hidden].any()
        assert not a.change.intra[a.hidden].any()
        assert not a.change.net_motion[a.hidden].any()
        # The decoder goes on from its own pictures, not from painted ones.
        assert np.array_equal(a.luma[: HEIGHT // 5 - 2], unmasked.luma[: HEIGHT // 5 - 2])
        assert a.luma[30:80].max() == a.luma[30:80].min() == 16
    assert max(sample.change.max_motion.max() for sample in plain) > 1


@pytest.mark.parametrize("name", list(pruners))
def test_no_policy_sends_what_is_masked(pair, name):
    for path in pair:
        samples, frames = run(path, (BAND,), name)
        hidden = samples[0].hidden
        assert 0.3 < hidden.mean() < 0.7
        groups = hidden.reshape(hidden.shape[0] // 2, 2, -1, 2).all(axis=(1, 3))
        pixels = hidden.repeat(8, axis=0).repeat(8, axis=1)
        for frame in frames:
            if not frame.complete:
                assert not frame.mask[::2, ::2][groups].any()
            for t in range(frame.grid.temporal):
                picture = np.zeros((frame.grid.height, frame.grid.width, 3), np.uint8)
                paste_patches(frame, t, picture)
                # Black of a video, as RGB.
                assert picture[pixels].max() <= 2
        assert frames[0].complete, "a window must be able to open: black cells are in it once"
        assert any(not frame.complete for frame in frames)


def test_a_moving_object_behind_the_mask_costs_nothing(pair):
    _, frames = run(pair[0], (BAND,), "replenish")
    _, plain = run(pair[0], (), "replenish")
    assert all(frame.activity == 0.0 for frame in frames[1:])
    assert max(frame.activity for frame in plain[1:]) > 0
    assert sum(frame.tokens for frame in frames if not frame.complete) == 0


def test_exposure_is_judged_by_what_is_seen(tmp_path):
    """Most of the picture is masked, and the rest gets brighter: that is no change."""
    most = ((0.0, 0.0), (1.0, 0.0), (1.0, 0.7), (0.0, 0.7))
    still = walk(1)[0].astype(np.float32)
    pictures = [(still * (1.0 + 0.25 * (index > 20))).clip(0, 255).astype(np.uint8) for index in range(60)]
    _, frames = run(clip(tmp_path / "bright.mp4", pictures, gop=60), (most,), "replenish")
    assert [frame.activity for frame in frames[1:]] == [0.0] * (len(frames) - 1)


def test_masks_follow_a_change_of_resolution(tmp_path):
    # Longer than the second by which a clock may be set back without a new scene.
    small = clip(tmp_path / "small.mp4", walk(30))
    large = clip(tmp_path / "large.mp4", walk(30, 320, 256))
    processor = CodecProcessor(GEOMETRY, CodecOptions(fps=4.0, masks=(BAND,)))
    shapes = set()
    for path in (small, large, small):
        header, packets = read(path)
        processor.open(header)
        for sample in [sample for packet in packets for sample in processor.feed(packet)] + processor.drain():
            shapes.add(sample.luma.shape)
            middle = sample.luma[sample.hidden.repeat(8, axis=0).repeat(8, axis=1)]
            assert middle.size > 0.3 * sample.luma.size
            assert set(np.unique(middle)) == {16}
    assert len(shapes) == 2


def test_a_mask_over_everything(tmp_path):
    everything = ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0))
    samples, frames = run(clip(tmp_path / "all.mp4", walk(40)), (everything,), "replenish")
    assert all(sample.hidden.all() and sample.luma.max() == 16 for sample in samples)
    assert sum(frame.tokens for frame in frames if not frame.complete) == 0
