"""Never a crash, and never a sample of a picture that was not decoded whole."""

import functools
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from codec_clips import FPS, GEOMETRY, H264_CLIPS, encode, process, read, renumber, seconds, walk
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.codec import StreamHeader
from cluster.codec.nal import H264_PPS, H264_SPS, START_CODE, unit_end, unit_starts
from cluster.codec.processor import CodecOptions, CodecProcessor
from cluster.errors import SourceError
from cluster.types import MICROSECONDS, EncodedPacket, SampledPicture

FRAME = MICROSECONDS // FPS
NAMES = [*H264_CLIPS, "hevc", "hevc_b"]


@functools.cache
def clip(name: str) -> tuple[StreamHeader, list[EncodedPacket], dict[int, SampledPicture]]:
    """Three seconds of the walk, GOP 20, with every picture as a clean decoding samples it, by time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        if name.startswith("hevc"):
            encode(path, walk(60), "libx265", b_frames=3 if name == "hevc_b" else 0)
        else:
            encode(path, walk(60), **H264_CLIPS[name])
        header, packets = read(path)
    _, samples = process(header, packets)
    assert len(samples) == 60
    return header, packets, {sample.pts: sample for sample in samples}


def check(name: str, samples: list[SampledPicture], *, tolerance: int = 0) -> None:
    """Every sample shows the picture of its time, and a break in time is told."""
    _, _, clean = clip(name)
    if name == "gradual":
        # Refreshed column by column, such a stream converges on the encoder's pictures without ever equalling them.
        tolerance = max(tolerance, 2)
    for sample in samples:
        difference = sample.luma.astype(int) - clean[sample.pts].luma
        assert np.abs(difference).max() <= tolerance, f"garbage at {seconds(sample)} s"
        assert sample.anchor or not sample.random_access


# -- holes that the transport tells -------------------------------------------------------------
@settings(deadline=None, max_examples=60)
@given(name=st.sampled_from(NAMES), dropped=st.sets(st.integers(0, 59), max_size=12), late=st.booleans())
@example(name="b_frames", dropped={0, 59}, late=False)
def test_no_sample_between_a_gap_and_the_next_keyframe(name: str, dropped: set[int], late: bool) -> None:
    header, packets, _ = clip(name)
    kept = [packet for packet in packets if packet.sequence not in dropped]
    if late:
        # What was missing comes after all, too late to be of use.
        kept += [packet for packet in packets if packet.sequence in dropped]
    _processor, samples = process(header, kept)
    check(name, samples)
    if name == "gradual":
        return
    trusted, waiting = set(), True
    expected = -1
    for packet in kept:
        if packet.sequence < expected:
            continue
        waiting = (waiting or packet.sequence != expected) and not packet.keyframe
        expected = packet.sequence + 1
        if not waiting:
            trusted.add(packet.pts)
    assert {sample.pts for sample in samples} <= trusted
    if name in ("plain", "slices", "hevc"):
        # Nothing waits for reordering, so nothing more than that is given up.
        assert {sample.pts for sample in samples} == trusted
    # A hole is told by the number after it: what is missing at the very end nobody can know of.
    untold = {packet.pts for packet in packets if packet.sequence > max((k.sequence for k in kept), default=-1)}
    shown = {sample.pts for sample in samples} | untold
    for sample in samples:
        assert sample.random_access or sample.pts - FRAME in shown


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(NAMES),
    moves=st.lists(st.tuples(st.integers(0, 59), st.integers(0, 59)), max_size=8),
    repeats=st.lists(st.integers(0, 59), max_size=5),
)
def test_shuffled_and_repeated_packets(name: str, moves: list[tuple[int, int]], repeats: list[int]) -> None:
    header, packets, _ = clip(name)
    shuffled = list(packets)
    for one, other in moves:
        shuffled[one], shuffled[other] = shuffled[other], shuffled[one]
    for index in repeats:
        shuffled.insert(index, packets[index])
    _, samples = process(header, shuffled)
    check(name, samples)
    assert len({sample.pts for sample in samples}) == len(samples)


def test_after_a_gap_the_next_keyframe_is_an_anchor_of_the_same_scene_and_counted() -> None:
    header, packets, _ = clip("plain")
    processor, samples = process(header, [packet for packet in packets if packet.sequence not in (5, 6)])
    assert [round(seconds(sample) * FPS) for sample in samples] == [*range(5), *range(20, 60)]
    assert [index for index, sample in enumerate(samples) if sample.random_access] == [0, 5]
    assert (samples[0].fresh, samples[0].gap) == (True, False)
    assert (samples[5].fresh, samples[5].gap, samples[5].anchor) == (False, True, True)
    assert not samples[5].change.luma.any()
    assert samples[5].change.frames == 0
    assert samples[6].change.frames == 1
    stats = processor.stats
    assert (stats.gaps, dict(stats.resyncs)) == (1, {"gap": 1})
    assert stats.decode_errors == 0


def test_a_caller_may_distrust_too() -> None:
    header, packets, _ = clip("plain")
    processor = CodecProcessor(GEOMETRY, CodecOptions(fps=FPS))
    processor.open(header)
    samples = []
    for packet in packets:
        if packet.sequence == 10:
            processor.resync("sensor covered")
        samples += processor.feed(packet)
    assert [round(seconds(sample) * FPS) for sample in samples] == [*range(10), *range(20, 60)]
    assert samples[10].gap
    assert processor.stats.resyncs == {"sensor covered": 1}


# -- holes that nobody tells --------------------------------------------------------------------
@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(["plain", "b_frames", "open_gop", "slices", "hevc", "hevc_b"]),
    dropped=st.sets(st.integers(0, 59), max_size=6),
)
def test_silent_loss_is_found_in_the_bitstream(name: str, dropped: set[int]) -> None:
    header, packets, _ = clip(name)
    _, samples = process(header, renumber(packet for packet in packets if packet.sequence not in dropped))
    check(name, samples)


def test_a_silently_lost_reference_is_counted_as_a_gap() -> None:
    header, packets, _ = clip("plain")
    processor, samples = process(header, renumber(packet for packet in packets if packet.sequence != 7))
    assert [round(seconds(sample) * FPS) for sample in samples] == [*range(7), *range(20, 60)]
    assert processor.stats.gaps == 1
    assert processor.stats.resyncs == {"lost_reference": 1}


# -- joins --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("in_band_only", [False, True])
def test_a_join_in_mid_gop_waits_for_a_keyframe(name: str, in_band_only: bool) -> None:
    header, packets, clean = clip(name)
    if in_band_only:
        header = StreamHeader(header.codec, 0, 0, b"")
    processor, samples = process(header, renumber(packets[7:]))
    check(name, samples)
    assert samples[0].fresh
    assert samples[0].anchor
    keyframe = next(packet for packet in packets[7:] if packet.keyframe)
    assert samples[0].pts >= keyframe.pts
    if name != "gradual":
        assert {sample.pts for sample in samples} == {pts for pts in clean if pts >= keyframe.pts}
    assert len(samples) > 15
    assert processor.stats.decode_errors == 0


def test_a_keyframe_flag_that_lies_yields_nothing_wrong() -> None:
    header, packets, _ = clip("plain")
    lying = [replace(packet, keyframe=True) for packet in packets[5:]]
    _, samples = process(header, renumber(lying))
    check("plain", samples)
    assert samples[0].pts == 20 * FRAME


def test_keyframes_are_found_without_their_flag() -> None:
    for name in ("plain", "open_gop", "hevc_b"):
        header, packets, _ = clip(name)
        _, samples = process(header, [replace(packet, keyframe=False) for packet in packets])
        check(name, samples)
        assert len(samples) == 60


# -- damage -------------------------------------------------------------------------------------
@settings(deadline=None, max_examples=80)
@given(
    name=st.sampled_from(NAMES),
    damage=st.lists(
        st.tuples(st.integers(0, 59), st.floats(0, 1), st.integers(0, 255), st.sampled_from(["flip", "cut", "noise"])),
        max_size=8,
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_damaged_packets_never_crash(name: str, damage: list[tuple[int, float, int, str]], seed: int) -> None:
    header, packets, clean = clip(name)
    random = np.random.default_rng(seed)
    damaged = list(packets)
    for index, place, value, kind in damage:
        data = bytearray(damaged[index].data)
        at = min(int(place * len(data)), len(data) - 1) if data else 0
        if kind == "flip" and data:
            data[at] ^= value
        elif kind == "cut":
            data = data[:at]
        elif kind == "noise":
            data = bytearray(random.bytes(len(data)))
        damaged[index] = replace(damaged[index], data=bytes(data))
    processor, samples = process(header, damaged)
    # Damage that a decoder cannot see does exist; before the first damaged packet all must be right.
    first = min((index for index, *_ in damage), default=60)
    untouched = {packet.pts for packet in packets[:first]} - {packet.pts for packet in packets[first:]}
    check(name, [sample for sample in samples if sample.pts in untouched and sample.pts in clean])
    assert processor.stats.frames_sampled == len(samples)


@pytest.mark.parametrize("kind", ["flip", "cut", "empty"])
def test_damage_to_h264_pictures_is_seen_and_recovered_from(kind: str) -> None:
    header, packets, _ = clip("plain")
    damaged = list(packets)
    data = bytearray(packets[7].data)
    if kind == "flip":
        for at in range(len(data) // 2, len(data), 5):
            data[at] ^= 0x55
    damaged[7] = replace(
        packets[7], data=b"" if kind == "empty" else bytes(data[: len(data) // 2 if kind == "cut" else None])
    )
    processor, samples = process(header, damaged)
    check("plain", samples)
    assert [round(seconds(sample) * FPS) for sample in samples] == [*range(7), *range(20, 60)]
    assert [sample.index for sample in samples if sample.random_access] == [0, 7]
    assert processor.stats.resyncs == {"corrupt": 1}


@settings(deadline=None, max_examples=30)
@given(
    codec=st.sampled_from(["h264", "hevc", "mjpeg", "vp9", "av1", "mpeg4"]),
    datas=st.lists(st.binary(max_size=300), max_size=10),
    keyframe=st.booleans(),
)
def test_pure_noise_yields_nothing(codec: str, datas: list[bytes], keyframe: bool) -> None:
    noise = [EncodedPacket(codec, data, index * FRAME, None, keyframe, index) for index, data in enumerate(datas)]
    _, samples = process(StreamHeader(codec, 64, 64, b""), noise)
    assert samples == []


# -- changes in mid-stream ----------------------------------------------------------------------
def test_a_resolution_change_brings_a_new_grid_and_a_fresh_anchor(tmp_path: Path) -> None:
    header, small = read(encode(tmp_path / "small.mp4", walk(20, 128, 96)))
    _, large = read(encode(tmp_path / "large.mp4", walk(20, 256, 160, seed=3)))
    later = [replace(packet, pts=packet.pts + 20 * FRAME, dts=packet.dts + 20 * FRAME) for packet in large]
    processor, samples = process(header, renumber(small + later))
    assert len(samples) == 40
    assert [sample.index for sample in samples if sample.fresh] == [0, 20]
    assert samples[20].anchor
    assert samples[19].luma.shape == (96, 128)
    assert samples[20].luma.shape == (160, 256)
    assert samples[20].grid == GEOMETRY.grid(256, 160)
    assert samples[20].change.luma.shape == (20, 32)
    assert processor.stats.resyncs == {"resolution": 1}
    assert (processor.stats.width, processor.stats.height) == (256, 160)


def test_parameter_sets_that_a_camera_sent_only_once_are_given_to_its_later_keyframes(tmp_path: Path) -> None:
    small = encode(tmp_path / "small.h264", walk(20, 128, 96)).read_bytes()
    large = encode(tmp_path / "large.h264", walk(40, 256, 160)).read_bytes()
    units = [large[start : unit_end(large, start)] for start in unit_starts(large)]
    sets = [place for place, unit in enumerate(units) if unit[0] & 0x1F in (H264_SPS, H264_PPS)]
    assert len(sets) == 4
    once = [unit for place, unit in enumerate(units) if place not in sets[2:]]
    (tmp_path / "both.h264").write_bytes(small + b"".join(START_CODE + unit for unit in once))
    processor, samples = process(*read(tmp_path / "both.h264"))
    assert (processor.stats.frames_decoded, processor.stats.resyncs["corrupt"]) == (60, 0)
    assert samples[-1].grid == GEOMETRY.grid(256, 160)


def test_a_codec_change_starts_anew_at_its_keyframe() -> None:
    header, packets, _ = clip("plain")
    _, others, _ = clip("hevc")
    mixed = renumber(packets[:10] + [replace(p, pts=p.pts + 10 * FRAME) for p in others[5:]])
    processor, samples = process(header, mixed)
    assert [round(seconds(sample) * FPS) for sample in samples] == [*range(10), *range(30, 70)]
    assert [sample.index for sample in samples if sample.random_access] == [0, 10]
    assert samples[10].gap, "the picture is the same"
    assert [sample.change.cue for sample in samples[8:12]] == ["vectors+luma"] * 2 + ["luma"] * 2
    assert processor.stats.resyncs == {"codec": 1}
    assert processor.stats.codec == "hevc"


def test_a_camera_may_change_codec_and_size_again_and_again(tmp_path: Path) -> None:
    kinds = [
        ("libx264", "mp4", (128, 96)),
        ("libx265", "mp4", (256, 160)),
        ("mjpeg", "avi", (192, 128)),
        ("libsvtav1", "mkv", (256, 144)),
        ("libvpx-vp9", "webm", (128, 96)),
        ("libx264", "mp4", (320, 192)),
    ]
    header, mixed, codecs = None, [], []
    for index, (encoder, suffix, size) in enumerate(kinds):
        form = "yuvj420p" if encoder == "mjpeg" else "yuv420p"
        path = encode(tmp_path / f"{index}.{suffix}", walk(10, *size, seed=index), encoder, format=form)
        opened, packets = read(path)
        header = header or opened
        codecs.append(opened.codec)
        mixed += [replace(packet, pts=(10 * index + shown) * FRAME, dts=None) for shown, packet in enumerate(packets)]
    assert header is not None
    processor, samples = process(header, renumber(mixed))
    sizes = [(sample.grid.width, sample.grid.height) for sample in samples]
    expected = [GEOMETRY.grid(*size) for _, _, size in kinds]
    assert sizes == [(grid.width, grid.height) for grid in expected for _ in range(10)]
    assert [sample.index for sample in samples if sample.fresh] == [0, 10, 20, 30, 40, 50]
    assert all(sample.anchor for sample in samples if sample.fresh)
    assert {sample.change.cue for sample in samples[12:50]} == {"luma"}
    assert {sample.change.cue for sample in [*samples[1:10], *samples[51:]]} == {"vectors+luma"}
    assert processor.stats.resyncs == {"codec": 5}
    assert processor.stats.decode_errors == 0
    assert (processor.stats.codec, processor.stats.width, processor.stats.height) == ("h264", 320, 192)


def test_packets_of_an_unknown_codec_are_passed_over() -> None:
    header, packets, _ = clip("plain")
    mixed = renumber([*packets[:10], replace(packets[10], codec="tomorrow"), *packets[11:]])
    processor, samples = process(header, mixed)
    check("plain", samples)
    assert [sample.index for sample in samples if sample.random_access] == [0, 10]
    assert processor.stats.resyncs["codec"] == 2


def test_opening_an_unknown_codec_is_told() -> None:
    processor = CodecProcessor(GEOMETRY)
    for codec in ("tomorrow", "", "mp3"):
        with pytest.raises(SourceError, match="codec") as failure:
            processor.open(StreamHeader(codec, 64, 64, b""))
        assert not failure.value.retryable
    assert processor.feed(EncodedPacket("tomorrow", b"x", 0, 0, True, 0)) == []


# -- the camera's clock -------------------------------------------------------------------------
def shifted(packets: list[EncodedPacket], start: int, by_s: float) -> list[EncodedPacket]:
    by = int(by_s * MICROSECONDS)
    return [packet if packet.sequence < start else replace(packet, pts=packet.pts + by) for packet in packets]


@pytest.mark.parametrize("by_s", [3600.0, -3600.0])
@pytest.mark.parametrize("first", [10, 20])
def test_a_jump_of_the_clock_loses_nothing(by_s: float, first: int) -> None:
    """Within a GOP, whose references are there, as at its keyframe."""
    header, packets, _ = clip("plain")
    processor, samples = process(header, shifted(packets, first, by_s))
    shown = [round((seconds(sample) - (by_s if index >= first else 0)) * FPS) for index, sample in enumerate(samples)]
    assert shown == [*range(60)]
    assert [sample.index for sample in samples if sample.fresh] == [0, first]
    assert processor.stats.resyncs == {"timestamps": 1}


def test_a_session_whose_first_packet_has_no_time_is_not_placed_on_the_last_ones_clock() -> None:
    """As where an agent pushes an RTSP camera, which is away for a while and counts from zero then."""
    header, packets, _ = clip("plain")
    again = [replace(packet, sequence=packet.sequence + 61) for packet in packets]
    again[0] = replace(again[0], pts=None, dts=None)
    _, samples = process(header, packets + again)
    assert [sample.pts for sample in samples[60:]] == [packet.pts for packet in packets[1:]]
    assert [index for index, sample in enumerate(samples) if sample.random_access] == [0, 60]
    assert samples[60].fresh


def test_missing_times_are_filled_in() -> None:
    header, packets, clean = clip("plain")
    holes = [replace(packet, pts=None, dts=None) if packet.sequence % 5 in (3, 4) else packet for packet in packets]
    _, samples = process(header, holes)
    assert [sample.pts for sample in samples] == list(clean)


def test_a_stream_without_times_is_sampled_at_the_nominal_rate() -> None:
    header, packets, _ = clip("plain")
    _, samples = process(header, [replace(packet, pts=None, dts=None) for packet in packets], fps=5)
    assert len(samples) == 7
    assert samples[0].fresh


def test_repeated_times_are_decoded_but_not_sampled() -> None:
    header, packets, _ = clip("plain")
    stuck = [replace(packet, pts=4 * FRAME) if 5 <= packet.sequence < 8 else packet for packet in packets]
    processor, samples = process(header, stuck)
    assert [round(seconds(sample) * FPS) for sample in samples] == [*range(5), *range(8, 60)]
    assert samples[5].change.frames == 4
    assert processor.stats.resyncs == {}


@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(["plain", "b_frames", "hevc"]), data=st.data())
def test_any_timestamps_are_survived(name: str, data: st.DataObject) -> None:
    header, packets, _ = clip(name)
    times = st.none() | st.integers(-(2**62), 2**62) | st.integers(0, 60 * FRAME)
    odd = data.draw(st.dictionaries(st.integers(0, 59), st.tuples(times, times), max_size=20))
    strange = [
        replace(packet, pts=odd[packet.sequence][0], dts=odd[packet.sequence][1]) if packet.sequence in odd else packet
        for packet in packets
    ]
    _, samples = process(header, strange)
    for before, after in itertools.pairwise(samples):
        assert after.random_access or after.pts > before.pts
        assert after.index == before.index + 1
