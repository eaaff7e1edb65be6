import itertools
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
from codec_clips import FPS, GEOMETRY, encode, process, read, seconds, texture, walk

from cluster.codec.nal import START_CODE, unit_starts
from cluster.codec.picture import LumaDifference, PictureScaler
from cluster.codec.processor import CodecOptions, CodecProcessor
from cluster.types import MICROSECONDS, PatchGeometry, PatchGrid

CODECS = [
    ("libx264", "mp4", "h264", "vectors+luma"),
    ("libx265", "mp4", "hevc", "luma"),
    ("mpeg4", "mp4", "mpeg4", "vectors+luma"),
    ("mjpeg", "avi", "mjpeg", "luma"),
    ("libvpx-vp9", "webm", "vp9", "luma"),
    ("libsvtav1", "mkv", "av1", "luma"),
]


@pytest.mark.parametrize(("encoder", "suffix", "codec", "cue"), CODECS)
def test_every_codec_is_sampled_and_says_its_cue(
    tmp_path: Path, encoder: str, suffix: str, codec: str, cue: str
) -> None:
    format = "yuvj420p" if encoder == "mjpeg" else "yuv420p"
    path = encode(tmp_path / f"clip.{suffix}", walk(30), encoder, format=format)
    header, packets = read(path)
    processor, samples = process(header, packets, fps=5)
    assert (header.codec, processor.stats.codec, processor.stats.cue) == (codec, codec, cue)
    assert [round(seconds(sample) - seconds(samples[0]), 2) for sample in samples] == [0.2 * i for i in range(8)] or (
        len(samples) == 8
    )
    assert processor.stats.frames_decoded == 30
    assert processor.stats.decode_errors == 0
    assert not processor.stats.resyncs
    assert {sample.change.cue for sample in samples[1:]} == {cue}
    assert samples[0].fresh
    assert samples[0].anchor
    moving = samples[4].change
    assert (moving.net_motion.max() > 3) == (cue == "vectors+luma")
    assert moving.luma.max() > 10
    assert np.median(moving.luma) < 4


def test_samples_and_grids_have_the_promised_shapes(clips: dict[str, Path]) -> None:
    for geometry in (PatchGeometry(14, 2, 2), PatchGeometry(14, 2, 1, square=448), PatchGeometry(16, 2, 2, 64 * 64)):
        _, samples = process(*read(clips["b_frames"]), fps=5, geometry=geometry)
        grid = geometry.grid(192, 128)
        for index, sample in enumerate(samples):
            assert sample.index == index
            assert sample.grid == grid
            assert (sample.rgb.shape, sample.rgb.dtype) == ((grid.height, grid.width, 3), np.uint8)
            assert (sample.luma.shape, sample.luma.dtype) == ((grid.height, grid.width), np.uint8)
            change = sample.change
            for plane in (change.max_motion, change.net_motion, change.intra, change.luma):
                assert (plane.shape, plane.dtype) == ((grid.rows, grid.cols), np.float32)
            assert change.intra.min() >= 0
            assert change.intra.max() <= 1.0001


@pytest.mark.parametrize(("aspect", "width"), [("2", 384), ("1/2", 96), ("16/11", 279), ("8", 192)])
def test_the_model_sees_pictures_in_their_shape(tmp_path: Path, aspect: str, width: int) -> None:
    """Pixels that are no squares, as of analogue cameras and of recorders that keep half the width, were taken for
    such. An aspect that no camera has is not believed."""
    path = encode(tmp_path / "clip.mp4", walk(10), options={"aspect": aspect})
    processor, samples = process(*read(path), fps=5)
    assert {sample.grid for sample in samples} == {GEOMETRY.grid(width, 128)}
    assert (processor.stats.width, processor.stats.height) == (192, 128)


def test_every_decoded_picture_is_folded_once(clips: dict[str, Path]) -> None:
    for name in clips:
        processor, samples = process(*read(clips[name]), fps=3)
        assert processor.stats.frames_decoded == 80
        last = [index for index in range(80) if index / FPS == pytest.approx(seconds(samples[-1]))]
        assert sum(sample.change.frames for sample in samples) == last[0]


def test_variable_frame_rates_are_sampled_by_time(tmp_path: Path) -> None:
    times = [0, 40, 80, 700, 710, 720, 1490, 1500, 2600, 2640, 3005, 3300, 3500]
    header, packets = read(encode(tmp_path / "vfr.mkv", walk(len(times)), times=times))
    _, samples = process(header, packets, fps=2)
    # A tick without a picture is gone; a picture up to 25 ms early is its tick's.
    assert [sample.pts // 1000 for sample in samples] == [0, 700, 1490, 2600, 3005, 3500]


def test_anchors_come_at_keyframes(clips: dict[str, Path]) -> None:
    _, samples = process(*read(clips["plain"]), fps=4, anchor_interval_s=1.5)
    assert [seconds(sample) for sample in samples if sample.anchor] == [0, 2]
    assert [sample.index for sample in samples if sample.fresh] == [0]


def test_anchors_are_forced_where_keyframes_are_rare(tmp_path: Path) -> None:
    path = encode(tmp_path / "long.mp4", walk(120), gop=1000, options={"x264-params": "scenecut=0"})
    _, samples = process(*read(path), fps=4, anchor_interval_s=1.5)
    taken = [seconds(sample) for sample in samples if sample.anchor]
    assert taken == [0, 1.5, 3, 4.5]


def test_length_prefixed_packets_are_understood(clips: dict[str, Path]) -> None:
    header, packets = read(clips["plain"])
    with av.open(str(clips["plain"])) as container:
        record = container.streams.video[0].codec_context.extradata
    prefixed = []
    for packet in packets:
        starts = [*unit_starts(packet.data), len(packet.data) + 4]
        units = [packet.data[a : b - 3].rstrip(b"\0") for a, b in itertools.pairwise(starts)]
        prefixed.append(replace(packet, data=b"".join(len(unit).to_bytes(4, "big") + unit for unit in units)))
        assert not prefixed[-1].data.startswith(START_CODE)
    _, samples = process(replace(header, extradata=record), prefixed)
    _, wanted = process(header, packets)
    assert [sample.luma.tobytes() for sample in samples] == [sample.luma.tobytes() for sample in wanted]


@pytest.mark.parametrize(("away_s", "fresh"), [(2.0, False), (600.0, False), (-0.2, False), (-3.0, True)])
def test_a_reconnect_is_a_gap_where_the_clock_runs_on(clips: dict[str, Path], away_s: float, fresh: bool) -> None:
    header, packets = read(clips["plain"])
    processor, samples = process(header, packets[:30])
    processor.open(header)
    by = round(away_s * MICROSECONDS)
    later = [replace(packet, pts=packet.pts + by, dts=packet.dts + by) for packet in packets[30:80]]
    again = [sample for packet in later for sample in processor.feed(packet)]
    assert (again[0].fresh, again[0].gap, again[0].anchor) == (fresh, not fresh, True)
    assert not any(sample.random_access for sample in again[1:])
    assert fresh or again[0].pts > samples[-1].pts
    assert processor.stats.resyncs["timestamps"] == int(fresh)


def area_mean(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    def shares(source: int, target: int) -> np.ndarray:
        edges = np.linspace(0, source, target + 1)
        low = np.maximum(edges[:-1, None], np.arange(source)[None])
        high = np.minimum(edges[1:, None], np.arange(source)[None] + 1)
        return np.clip(high - low, 0, None) * target / source

    return shares(picture.shape[0], height) @ picture @ shares(picture.shape[1], width).T


@pytest.mark.parametrize("size", [(192, 128), (640, 360), (1280, 720)])
def test_scaled_pictures_are_area_means_in_the_right_colours(size: tuple[int, int]) -> None:
    width, height = size
    luma = texture(width, height)
    yuv = np.empty((height * 3 // 2, width), np.uint8)
    yuv[:height] = luma
    yuv[height : height * 5 // 4] = 90
    yuv[height * 5 // 4 :] = 170
    grid = PatchGeometry(14, 2, 2, 224 * 224).grid(width, height)
    rgb, small = PictureScaler(grid)(av.VideoFrame.from_ndarray(yuv, "yuv420p"))
    wanted = area_mean(luma, grid.height, grid.width)
    assert np.abs(small - wanted).mean() < 1.0
    # BT.601, limited range.
    scaled = 1.164 * (wanted - 16)
    expected = np.stack([scaled + 1.596 * 42, scaled - 0.392 * -38 - 0.813 * 42, scaled + 2.017 * -38], axis=-1)
    assert np.abs(rgb - expected.clip(0, 255)).mean() < 2.0


def test_a_square_of_an_odd_number_of_patches_shows_its_middle_twice() -> None:
    """Seven patches in four groups: the fourth row and column belong to the groups on both sides."""
    frame = av.VideoFrame.from_ndarray(texture(320, 200), "gray")
    grid = PatchGeometry(14, 2, 1, square=98).grid(320, 200)
    assert (grid.rows, grid.cols, grid.tokens, grid.scaled) == (8, 8, 16, (98, 98))
    whole = PictureScaler(PatchGrid(7, 7, 14, 1, 1))(frame)
    for picture, shown in zip(whole, PictureScaler(grid)(frame), strict=True):
        for row, above in enumerate((0, 1, 2, 3, 3, 4, 5, 6)):
            for column, beside in enumerate((0, 1, 2, 3, 3, 4, 5, 6)):
                patch = picture[above * 14 : above * 14 + 14, beside * 14 : beside * 14 + 14]
                ours = shown[row * 14 : row * 14 + 14, column * 14 : column * 14 + 14]
                np.testing.assert_array_equal(ours, patch)
    assert PatchGeometry(14, 2, 1, square=112).grid(320, 200).overlap == 0


def test_luma_difference_is_the_mean_over_each_patch() -> None:
    grid = PatchGrid(4, 6, 14, 2, 2)
    random = np.random.default_rng(0)
    before = random.integers(0, 256, (grid.height, grid.width), dtype=np.uint8)
    after = before.copy()
    after[14:28, 28:42] = random.integers(0, 256, (14, 14), dtype=np.uint8)
    difference = LumaDifference(grid)
    assert not difference(before).any()
    got = difference(after)
    wanted = np.abs(after.astype(float) - before).reshape(4, 14, 6, 14).mean((1, 3))
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    assert np.count_nonzero(got) == 1
    difference.reset()
    assert not difference(before).any()


@pytest.mark.parametrize("gain", [-40, -3, 0, 5, 60])
def test_a_change_of_exposure_is_no_change(gain: int) -> None:
    grid = PatchGrid(8, 8, 14, 2, 2)
    before = np.random.default_rng(1).integers(60, 190, (grid.height, grid.width), dtype=np.uint8)
    after = (before.astype(int) + gain).astype(np.uint8)
    after[:14, :14] = np.where(before[:14, :14] < 128, 255, 0)
    difference = LumaDifference(grid)
    difference(before)
    got = difference(after)
    assert got[0, 0] > 50
    assert got.ravel()[1:].max() == 0.0


def test_the_largest_patches_do_not_overflow() -> None:
    grid = PatchGrid(2, 2, 64, 1, 1)
    difference = LumaDifference(grid)
    before = np.zeros((128, 128), np.uint8)
    after = before.copy()
    before[:, :64], after[:, 64:] = 255, 255
    difference(before)
    got = difference(after)
    assert got.max() <= 510
    assert got.max() > 250


def test_geometry_is_the_models_alone(clips: dict[str, Path]) -> None:
    _, samples = process(*read(clips["plain"]), fps=1)
    assert samples[0].grid == GEOMETRY.grid(192, 128)


@pytest.mark.parametrize("name", ["plain", "b_frames", "slices", "hevc", "hevc_b"])
def test_glances_show_each_keyframe_by_itself_and_feeding_goes_on_at_the_next(
    clips: dict[str, Path], name: str
) -> None:
    header, packets = read(clips[name])
    keys = [index for index, packet in enumerate(packets) if packet.keyframe]
    assert len(keys) >= 3
    _, all_samples = process(header, packets, fps=5)
    processor = CodecProcessor(GEOMETRY, CodecOptions(fps=5))
    processor.open(header)
    fed = [sample for packet in packets[:10] for sample in processor.feed(packet)]
    keyframes_only = [processor.decode_keyframe_only(packet) for packet in packets[10 : keys[2] - 3]]
    assert [len(samples) for samples in keyframes_only] == [
        int(packet.keyframe) for packet in packets[10 : keys[2] - 3]
    ]
    [seen] = [sample for samples in keyframes_only for sample in samples]
    assert seen.gap
    assert seen.pts == packets[keys[1]].pts
    [same] = [sample for sample in all_samples if abs(sample.pts - seen.pts) < 30_000]
    assert np.array_equal(seen.rgb, same.rgb), "as when all is decoded"
    assert processor.stats.frames_decoded <= 10 + 1
    rest = [sample for packet in packets[keys[2] - 3 :] for sample in processor.feed(packet)] + processor.drain()
    assert [sample.gap for sample in rest] == [True] + [False] * (len(rest) - 1)
    assert rest[0].pts == packets[keys[2]].pts
    assert len(fed) + len(rest) >= 6
    stats = processor.stats
    assert (stats.gaps, stats.decode_errors, dict(stats.resyncs)) == (0, 0, {}), "nobody lost anything"


def test_of_pictures_that_are_all_keyframes_as_many_are_decoded_as_are_sampled(tmp_path: Path) -> None:
    header, packets = read(encode(tmp_path / "all.avi", walk(40), "mjpeg", format="yuvj420p"))
    assert all(packet.keyframe for packet in packets)
    processor = CodecProcessor(GEOMETRY, CodecOptions(fps=5))
    processor.open(header)
    samples = [sample for packet in packets for sample in processor.decode_keyframe_only(packet)]
    assert [sample.pts for sample in samples] == [packet.pts for packet in packets[::4]]
    assert processor.stats.frames_decoded == len(samples)
