import gc
import itertools
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
from codec_clips import FPS, GEOMETRY, encode, process, read, texture
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.codec import motion
from cluster.codec.motion import VECTOR, MotionField, ReferenceDistance, frame_vectors
from cluster.codec.nal import START_CODE, H264Sequence, sequences
from cluster.types import PatchGeometry, PatchGrid

WIDTH, HEIGHT = 192, 128
CLEAN = {"preset": "medium", "crf": "12", "x264-params": "scenecut=0:me=umh:ref=1:weightp=0"}


def pan(frames: int, dx: int, dy: int) -> list[np.ndarray]:
    world = texture(WIDTH + 400, HEIGHT + 400)
    return [world[200 - dy * i : 200 - dy * i + HEIGHT, 200 - dx * i : 200 - dx * i + WIDTH] for i in range(frames)]


@pytest.mark.parametrize("b_frames", [0, 3])
@pytest.mark.parametrize(("dx", "dy"), [(3, 0), (0, -2), (-4, 3)])
def test_a_pan_is_measured_in_pixels(tmp_path: Path, b_frames: int, dx: int, dy: int) -> None:
    path = encode(tmp_path / "pan.mp4", pan(41, dx, dy), gop=200, b_frames=b_frames, options=CLEAN)
    _, samples = process(*read(path), fps=4)
    # The picture's edge shows new content, which has no motion to measure.
    inside = np.s_[3:-3, 3:-3]
    for sample in samples[2:]:
        assert sample.change.frames == 5
        assert np.median(sample.change.net_motion[inside]) == pytest.approx(5 * np.hypot(dx, dy), rel=0.05)
        assert np.median(sample.change.max_motion[inside]) == pytest.approx(np.hypot(dx, dy), rel=0.15)


@pytest.mark.parametrize("b_frames", [0, 2])
def test_a_moving_square_moves_and_its_background_does_not(tmp_path: Path, b_frames: int) -> None:
    scene, square = texture(WIDTH, HEIGHT, 3), texture(64, 64, 4)
    pictures = []
    for index in range(31):
        picture = scene.copy()
        picture[32:96, 16 + 3 * index : 80 + 3 * index] = square
        pictures.append(picture)
    path = encode(tmp_path / "square.mp4", pictures, gop=200, b_frames=b_frames, options=CLEAN)
    _, samples = process(*read(path), fps=5)
    assert [sample.change.frames for sample in samples] == [0] + [4] * 7
    for sample in samples[2:]:
        index = round(sample.pts * 20 / 1e6)
        left, right = 16 + 3 * (index - 4), 80 + 3 * index
        change = sample.change
        # Cells of 8 pixels that the square covers over all four pictures, a macroblock clear of its edges.
        core = change.net_motion[48 // 8 : 80 // 8, -(-(left + 12 + 16) // 8) : (right - 12 - 16) // 8]
        assert core.size
        assert np.median(core) == pytest.approx(12, rel=0.1)
        away = np.ones(change.net_motion.shape, bool)
        away[(32 - 16) // 8 : (96 + 16) // 8, max(0, (left - 16) // 8) : -(-(right + 16) // 8)] = False
        assert away.any()
        assert change.net_motion[away].max() < 0.5
        assert change.intra[away].max() == 0.0
        assert change.luma[away].max() < 2.0
        assert change.luma[48 // 8 : 80 // 8, left // 8 : right // 8].max() > 10.0


def test_new_content_is_intra_and_only_there(tmp_path: Path) -> None:
    scene = texture(WIDTH, HEIGHT, 3)
    noise = np.random.default_rng(1).integers(0, 255, (32, 32), dtype=np.uint8)
    appeared = scene.copy()
    appeared[48:80, 96:128] = noise
    pictures = [scene] * 6 + [appeared] * 6
    path = encode(tmp_path / "new.mp4", pictures, gop=200, options=CLEAN)
    _, samples = process(*read(path), fps=5)
    change = samples[2].change
    inside = np.zeros(change.intra.shape, bool)
    inside[48 // 8 : 80 // 8, 96 // 8 : 128 // 8] = True
    assert change.intra[inside].mean() > 0.7
    assert change.intra[~inside].max() == 0.0
    assert samples[1].change.intra.max() == 0.0


def test_a_cut_without_a_keyframe_is_all_new(tmp_path: Path) -> None:
    pictures = [texture(WIDTH, HEIGHT, 3)] * 6 + [np.random.default_rng(5).integers(0, 255, (HEIGHT, WIDTH), np.uint8)]
    path = encode(tmp_path / "cut.mp4", pictures + pictures[-1:] * 4, gop=200, options=CLEAN)
    _, samples = process(*read(path), fps=5)
    assert samples[2].change.intra.mean() > 0.9


def test_pictures_are_freed_as_they_go(tmp_path: Path) -> None:
    path = encode(tmp_path / "pan.mp4", pan(9, 3, 0), gop=200, options=CLEAN)
    gc.collect()
    gc.disable()
    before = pictures_alive()
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            stream.codec_context.options = {"flags2": "+export_mvs"}
            for frame in container.decode(stream):
                assert (frame_vectors(frame) is None) == frame.key_frame
        # The loop's own variable and the generator hold the last one or two.
        assert pictures_alive() - before <= 2
    finally:
        gc.enable()


def pictures_alive() -> int:
    return sum(isinstance(thing, av.VideoFrame) for thing in gc.get_objects())


# -- the field itself, against a rasterisation of every pixel -----------------------------------
SHAPES = [[(16, 16, 0, 0)], [(16, 8, 0, 0), (16, 8, 0, 8)], [(8, 16, 0, 0), (8, 16, 8, 0)]]
SHAPES.append([(8, 8, x, y) for y in (0, 8) for x in (0, 8)])


@st.composite
def pictures(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    cols, rows = draw(st.integers(2, 6)), draw(st.integers(2, 6))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    entries = []
    for row in range(rows):
        for col in range(cols):
            if random.random() < 0.2:
                continue
            for w, h, x, y in SHAPES[random.integers(len(SHAPES))]:
                for source in (-1, 1)[: 1 + int(random.random() < 0.3)]:
                    motion = random.integers(-40, 41, 2) * int(random.random() < 0.7)
                    entries.append(
                        (source, w, h, 16 * col + x + w // 2, 16 * row + y + h // 2, motion[0], motion[1], 4)
                    )
    return np.array(entries, dtype=VECTOR), cols * 16, rows * 16


def rasterise(vectors: np.ndarray, width: int, height: int, past: float, future: float) -> tuple[np.ndarray, ...]:
    """Per pixel, of its macroblock: mean displacement in x and y, mean length of its vectors, uncovered."""
    total = np.zeros((height // 16, width // 16, 4))
    for vector in vectors:
        factor = (-past if vector["source"] < 0 else future) / 4
        x, y = vector["motion_x"] * factor, vector["motion_y"] * factor
        area = int(vector["w"]) * int(vector["h"])
        cell = vector["dst_y"] // 16, vector["dst_x"] // 16
        total[cell] += area * x, area * y, area * np.hypot(x, y), area
    covered = total[..., 3] > 0
    weight = np.where(covered, total[..., 3], 1)
    planes = *(total[..., axis] / weight for axis in range(3)), ~covered
    return tuple(plane.repeat(16, 0).repeat(16, 1) for plane in planes)


@settings(deadline=None, max_examples=60)
@given(st.lists(pictures(), min_size=1, max_size=1), st.integers(1, 3), st.sampled_from([(1.0, 1.0), (0.5, 0.25)]))
def test_the_field_equals_a_rasterisation(
    given_pictures: list[tuple[np.ndarray, int, int]], repeats: int, factors: tuple[float, float]
) -> None:
    vectors, width, height = given_pictures[0]
    if not len(vectors):
        return
    # Cells of 8 x 16 pixels and then 32 x 16: smaller and larger than a macroblock.
    for cell_width in (8, 32):
        rows, cols = height // 16, -(-width // cell_width)
        if width % cell_width:
            continue
        field = MotionField(width, height, PatchGrid(rows, cols, 8, 1, 1))
        for _ in range(repeats):
            field.add_vectors(vectors, *factors)
        most, net, intra = field.pop_planes()
        x, y, speed, uncovered = rasterise(vectors, width, height, *factors)

        def cells(plane: np.ndarray, cell_width: int = cell_width, shape: tuple[int, int] = (rows, cols)) -> np.ndarray:
            return plane.reshape(shape[0], 16, shape[1], cell_width).astype(float)

        expected = np.hypot(cells(x).mean((1, 3)), cells(y).mean((1, 3))) * repeats
        np.testing.assert_allclose(net, expected, rtol=1e-4, atol=1e-4)
        # CodecSight, section 3.3.1: the map of blocks, resampled onto the patches of each picture.
        np.testing.assert_allclose(most, cells(speed).mean((1, 3)), rtol=1e-5)
        np.testing.assert_allclose(intra, cells(uncovered).mean((1, 3)), atol=1e-6)
        assert all(not plane.any() for plane in field.pop_planes())


def test_a_grid_that_shows_its_middle_twice_has_its_motion_there_twice() -> None:
    """Seven patches in eight rows and columns, whose fourth and fifth are one."""
    grid = PatchGeometry(14, 2, 1, square=98).grid(112, 112)
    random = np.random.default_rng(0)
    places = [(16 * col + 8, 16 * row + 8) for row in range(7) for col in range(7) if (row, col) != (3, 2)]
    vectors = np.array([(-1, 16, 16, *place, *random.integers(-40, 41, 2), 4) for place in places], dtype=VECTOR)
    shown = np.ix_((0, 1, 2, 3, 3, 4, 5, 6), (0, 1, 2, 3, 3, 4, 5, 6))
    plain, overlapping = MotionField(112, 112, PatchGrid(7, 7, 14, 1, 1)), MotionField(112, 112, grid)
    for field in (plain, overlapping):
        field.add_vectors(vectors, 1.0, 1.0)
    for expected, found in zip(plain.pop_planes(), overlapping.pop_planes(), strict=True):
        assert expected.any()
        np.testing.assert_allclose(found, expected[shown], rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=40)
@given(pictures(), st.booleans())
def test_pictures_that_are_folded_together_are_as_pictures_one_by_one(given_picture, together: bool) -> None:
    """Of different reach and with different holes, and also where they are too many to wait."""
    vectors, width, height = given_picture
    parts = [part for part in (vectors, vectors[::2], vectors[1::3]) if len(part)]
    reach = [(1.0 / (n + 1), 0.5 / (n + 1)) for n in range(len(parts))]
    rows, cols = height // 16, width // 16
    field = MotionField(width, height, PatchGrid(rows, cols, 16, 1, 1))
    with pytest.MonkeyPatch.context() as patch:
        if not together:
            patch.setattr(motion, "_MOST_WAITING", 1)
        for part, factors in zip(parts, reach, strict=True):
            field.add_vectors(part, *factors)
        most, net, intra = field.pop_planes()
    planes = [rasterise(part, width, height, *factors) for part, factors in zip(parts, reach, strict=True)]
    cells = [np.array(each).reshape(-1, rows, 16, cols, 16) for each in planes]
    x, y = (sum(each[axis].mean((1, 3)) for each in cells) for axis in (0, 1)) if cells else (0.0, 0.0)
    np.testing.assert_allclose(net, np.hypot(x, y) + np.zeros((rows, cols)), rtol=1e-4, atol=1e-4)
    for found, axis in ((most, 2), (intra, 3)):
        joined = np.max([each[axis].mean((1, 3)) for each in cells], axis=0) if cells else np.zeros((rows, cols))
        np.testing.assert_allclose(found, joined, rtol=1e-5, atol=1e-6)


def test_a_block_without_a_vector_is_seen_beside_hidden_ones() -> None:
    field = MotionField(16, 24, PatchGrid(3, 2, 8, 1, 1))
    # One block of the picture has a vector, one none; two that cropping hides have one each.
    hidden = np.array([(-1, 16, 16, x, y, 0, 0, 4) for x, y in ((8, 8), (24, 8), (24, 24))], dtype=VECTOR)
    field.add_vectors(hidden, 1.0, 1.0)
    assert field.pop_planes()[2][2].tolist() == [1.0, 1.0]


def test_blocks_hidden_by_cropping_are_ignored() -> None:
    field = MotionField(32, 24, PatchGrid(3, 4, 8, 1, 1))
    hidden = np.array([(-1, 16, 16, 8, 56, 40, 0, 4), (-1, 16, 16, 8, 8, 8, 0, 4)], dtype=VECTOR)
    field.add_vectors(hidden, 1.0, 1.0)
    most, _, intra = field.pop_planes()
    assert most[0, 0] == 2.0
    assert most.max() == 2.0
    assert intra[0, 0] == 0.0
    assert intra[0, 3] == 1.0


def test_vectors_are_shared_out_over_the_pictures_they_span() -> None:
    # Decoded I0 P3 B1 B2 (B1, B2 not references), shown 0 1 2 3.
    order = ReferenceDistance()
    for pts, reference in ((0, True), (3, True), (1, False), (2, False)):
        order.record_decoded(pts, reference)
    assert order.scale_factors(0) == (1.0, 1.0)
    assert order.scale_factors(1) == (1.0, 0.5)
    assert order.scale_factors(2) == (0.5, 1.0)
    assert order.scale_factors(3) == (pytest.approx(1 / 3), 1.0)
    assert order.scale_factors(None) == (1.0, 1.0)
    # The picture before had no time.
    assert order.scale_factors(7) == (1.0, 1.0)


def _exp_golomb(*values: int) -> str:
    """Unsigned Exp-Golomb codes (H.264 §9.1)."""
    return "".join(f"{value + 1:b}".zfill(2 * (value + 1).bit_length() - 1) for value in values)


def _shifted(number: int, reference: bool, dx: int) -> bytes:
    """A P picture of which every block is that of its reference, ``dx`` > 0 pixels further right (H.264 §7.3.3, §7.3.5)
    in CAVLC, with ``frame_num`` of 4 bits, one reference and the deblocking filter off."""
    header = _exp_golomb(0, 0, 0) + f"{number % 16:04b}" + "00" + "0" * reference + _exp_golomb(0, 1)
    # mb_skip_run, mb_type, mvd_l0 (quarter pixels, predicted from the block before), coded_block_pattern.
    blocks = _exp_golomb(0, 0, 2 * 4 * dx, 0, 0) + (WIDTH * HEIGHT // 256 - 1) * _exp_golomb(0, 0, 0, 0, 0)
    bits = header + blocks + "1"
    bits += "0" * (-len(bits) % 8)
    return START_CODE + bytes([0x61 if reference else 0x01]) + int(bits, 2).to_bytes(len(bits) // 8, "big")


def test_a_pan_in_temporal_layers_is_measured_in_pixels(tmp_path: Path) -> None:
    """SVC-T: every other picture is no reference, so that a vector of the others spans two pictures."""
    options = {"x264-params": "cabac=0:ref=1:weightp=0:keyint=16:min-keyint=1"}
    header, packets = read(encode(tmp_path / "still.mp4", [texture(WIDTH, HEIGHT)] * 16, gop=16, options=options))
    sequence = next(iter(sequences("h264", packets[0].data)))
    assert isinstance(sequence, H264Sequence)
    assert (sequence.frame_num_bits, sequence.order_type) == (4, 2)
    for index in range(1, 16):
        upper = index % 2 == 1
        data = _shifted((index + 1) // 2, not upper, 3 if upper else 6)
        packets[index] = replace(packets[index], data=data, keyframe=False)
    processor, samples = process(header, packets, fps=FPS)
    assert (processor.stats.frames_decoded, len(samples), dict(processor.stats.resyncs)) == (16, 16, {})
    for before, after in itertools.pairwise(samples):
        # What was at x is at x + 3, as far as nothing came in from the left.
        assert np.abs(after.luma[:, 64:].astype(int) - before.luma[:, 61:-3]).max() <= 1
        assert after.change.max_motion == pytest.approx(3.0)


def test_geometry_of_the_tests_is_eight_pixel_cells() -> None:
    grid = GEOMETRY.grid(WIDTH, HEIGHT)
    assert (grid.rows, grid.cols, grid.height, grid.width) == (16, 24, HEIGHT, WIDTH)
