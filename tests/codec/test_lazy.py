"""Lazy decoding against full decoding of the same real streams."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from codec_clips import encode, read, texture, visit

from cluster.codec import lazy
from cluster.codec.lazy import LazyDecode
from cluster.codec.lazy_processor import LazyProcessor
from cluster.codec.nal import START_CODE, CodedPicture
from cluster.codec.processor import CodecProcessor, FramedPacket
from cluster.codec.source import StreamHeader
from cluster.types import MICROSECONDS, EncodedPacket, FrameSample, PatchGeometry
from cluster.vision import make_pruner
from cluster.vision.sampler import PatchSampler

GEOMETRY = PatchGeometry(patch=8, merge=2, temporal=1)
FPS, GOP, SECONDS = 10, 40, 44
ARRIVES, LEAVES = 33.4, 37.0
"""Seconds at which somebody comes and goes: in the middle of a GOP of 4 s."""

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "h264": ("libx264", {}),
    "h264-b": ("libx264", {"b_frames": 3, "options": {"preset": "medium"}}),
    "h264-open": ("libx264", {"b_frames": 2, "options": {"preset": "medium", "x264-params": "open-gop=1"}}),
    "hevc": ("libx265", {}),
    "hevc-b": ("libx265", {"b_frames": 2}),
    "hevc-open": ("libx265", {"b_frames": 2, "options": {"x265-params": "log-level=error:open-gop=1"}}),
}
RATE = {"b": "60000", "maxrate": "60000", "bufsize": "60000"}
CONSTANT: dict[str, tuple[str, dict[str, Any]]] = {
    "h264-cbr": ("libx264", {"options": {"preset": "veryfast", "x264-params": "scenecut=0"} | RATE}),
    "hevc-cbr": (
        "libx265",
        {"options": {"preset": "ultrafast", "x265-params": "log-level=error:pools=none:frame-threads=1"} | RATE},
    ),
}
"""Constant bit rate, with a GOP twice as long: each picture costs what is left, and keyframes are far apart."""


@pytest.fixture(scope="module")
def footage(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder, scene = tmp_path_factory.mktemp("lazy"), visit(SECONDS * FPS, ARRIVES * FPS, LEAVES * FPS)

    def make(name: str) -> Path:
        path = folder / f"{name}.mp4"
        encoder, kind = (KINDS | CONSTANT)[name]
        gop = 2 * GOP if name in CONSTANT else GOP
        return path if path.exists() else encode(path, scene, encoder, gop=gop, fps=FPS, **kind)

    return make


class Camera:
    """A camera's front end up to its kept patches, as its pipeline runs it."""

    def __init__(self, header: StreamHeader, *, on: bool, wait_s: float = 0.0) -> None:
        self.sampler = PatchSampler("camera", make_pruner("replenish"), 2.0)
        self.lazy: LazyDecode | None = None
        self.processor = CodecProcessor(GEOMETRY)
        if on:
            self.processor = lazily = LazyProcessor(GEOMETRY, self.sampler.shows_change)
            self.lazy = lazily.lazy
            self.lazy.wait_s = wait_s
        self.processor.open(header)
        self.frames: list[FrameSample] = []
        self.repeated: list[int] = []

    def feed(self, packet: EncodedPacket | None) -> None:
        samples = self.processor.drain() if packet is None else self.processor.feed(packet)
        for sample in samples:
            if sample.repeated:
                self.repeated.append(sample.pts)
            frame = self.sampler.feed(sample)
            if self.lazy is not None and not sample.repeated:
                self.lazy.label(self.sampler.activity > 0)
            assert frame is not None
            self.frames.append(frame)

    def run(self, packets: list[EncodedPacket]) -> Camera:
        for packet in packets:
            self.feed(packet)
        self.feed(None)
        return self


def both(path: Path) -> tuple[Camera, Camera, list[EncodedPacket]]:
    header, packets = read(path)
    return Camera(header, on=False).run(packets), Camera(header, on=True).run(packets), packets


def masks(frames: list[FrameSample]) -> list[tuple[int, bytes]]:
    """Times and kept cells."""
    return [(frame.pts, frame.mask.tobytes()) for frame in frames]


def kept(frames: list[FrameSample], begin: float, end: float) -> np.ndarray:
    """Cells kept in some frame that is no anchor, of these seconds."""
    masks = [frame.mask for frame in frames if begin <= frame.pts / MICROSECONDS < end and not frame.anchor]
    return np.logical_or.reduce(masks)


@pytest.mark.parametrize("name", KINDS)
def test_change_in_mid_gop_is_kept_as_by_full_decoding_and_quiet_gops_are_spared(
    footage: Callable[[str], Path], name: str
) -> None:
    full, lazily, packets = both(footage(name))
    stats = lazily.processor.stats
    assert stats.frames_spared > 0.3 * len(packets)
    assert stats.frames_decoded + stats.frames_spared <= len(packets)
    assert full.processor.stats.frames_spared == 0
    # Who has come is kept, from the first sample in which there is anybody, or the next.
    first = next(frame.pts for frame in full.frames if frame.pts >= ARRIVES * MICROSECONDS and frame.mask.any())
    seen = [frame.pts for frame in lazily.frames if frame.pts >= ARRIVES * MICROSECONDS and frame.mask.any()]
    assert min(seen) - first <= 0.5 * MICROSECONDS
    theirs, ours = kept(full.frames, ARRIVES, LEAVES + 1), kept(lazily.frames, ARRIVES, LEAVES + 1)
    assert theirs.any()
    assert (theirs & ~ours).sum() <= 0.02 * theirs.sum()
    # Nothing else is: what was held is no gap, and no picture comes twice.
    assert not kept(lazily.frames, 13, 33).any()
    assert [frame.gap or frame.fresh for frame in lazily.frames] == [True] + [False] * (len(lazily.frames) - 1)
    times = [frame.pts for frame in lazily.frames]
    assert times == sorted(set(times))
    assert abs(len(times) - len(full.frames)) <= 1


def test_samples_of_held_video_come_at_the_same_times(footage: Callable[[str], Path]) -> None:
    full, lazily, _ = both(footage("h264"))
    assert [frame.pts for frame in lazily.frames] == [frame.pts for frame in full.frames]
    assert [frame.anchor for frame in lazily.frames] == [frame.anchor for frame in full.frames]
    assert lazily.repeated


@pytest.mark.parametrize(("name", "filler"), [("h264", b"\x0c"), ("hevc-b", bytes([38 << 1, 1]))])
def test_what_a_camera_fills_its_rate_with_is_no_picture(
    footage: Callable[[str], Path], name: str, filler: bytes
) -> None:
    """Filler data (H.264 §7.3.2.7, H.265 §7.3.2.8) up to a constant size would hide who comes."""
    header, packets = read(footage(name))
    full = max(len(packet.data) for packet in packets if not packet.keyframe) + 16
    filled = []
    for packet in packets:
        unit = START_CODE + filler + b"\xff" * max(0, full - len(packet.data) - 8) + b"\x80"
        filled.append(packet if packet.keyframe else replace(packet, data=packet.data + unit))
    plain, lazily = (Camera(header, on=True).run(sent) for sent in (packets, filled))
    assert lazily.processor.stats.frames_spared == plain.processor.stats.frames_spared > 0.3 * len(packets)
    assert masks(lazily.frames) == masks(plain.frames)


def _guessed(packets: list[EncodedPacket]) -> list[EncodedPacket]:
    """Decoding times as FFmpeg guesses those of RTSP where it takes the reordering for one picture deep."""
    latest, guessed = 0, []
    for packet in packets:
        assert packet.pts is not None
        guessed.append(replace(packet, dts=min(latest, packet.pts)))
        latest = max(latest, packet.pts)
    return guessed


def _untimed(packets: list[EncodedPacket]) -> list[EncodedPacket]:
    return [replace(packet, dts=None) for packet in packets]


@pytest.mark.parametrize("change", [_untimed, _guessed])
@pytest.mark.parametrize("name", ["h264-b", "hevc-b"])
def test_held_b_pictures_without_proper_decoding_times_are_sampled_at_their_times(
    footage: Callable[[str], Path], name: str, change: Callable[[list[EncodedPacket]], list[EncodedPacket]]
) -> None:
    header, packets = read(footage(name))
    full, lazily = Camera(header, on=False).run(packets), Camera(header, on=True).run(change(packets))
    times = [[frame.pts for frame in each.frames] for each in (full, lazily)]
    # Pictures may still be in the decoder when holding begins, and come a little late.
    assert max(abs(a - b) for a, b in zip(*times, strict=True)) <= 2 * MICROSECONDS // FPS
    assert sum(a != b for a, b in zip(*times, strict=True)) <= 2
    assert lazily.processor.stats.frames_spared > 0.3 * len(packets)


def test_while_learning_nothing_differs_from_full_decoding(footage: Callable[[str], Path]) -> None:
    full, lazily, _ = both(footage("h264-b"))
    for one, other in zip(full.frames[: lazy.LEARN_SAMPLES], lazily.frames, strict=False):
        assert masks([one]) == masks([other])
        assert (one.patches == other.patches).all()


def test_a_stream_without_slice_headers_is_decoded_whole(tmp_path: Path) -> None:
    path = encode(
        tmp_path / "clip.mp4",
        visit(SECONDS * FPS, ARRIVES * FPS, LEAVES * FPS)[: 30 * FPS],
        "mjpeg",
        fps=FPS,
        format="yuvj420p",
    )
    full, lazily, packets = both(path)
    assert lazily.processor.stats.frames_decoded == len(packets)
    assert masks(lazily.frames) == masks(full.frames)


def test_what_pictures_of_another_size_cost_is_forgotten(tmp_path: Path) -> None:
    """Pictures that cost less than quiet ones did before."""
    scene, random = np.kron(visit(1, 0, 0)[0], np.ones((3, 3))), np.random.default_rng(0)
    noisy = [(scene + random.integers(-4, 5, scene.shape)).clip(0, 255).astype(np.uint8) for _ in range(5 * GOP)]
    _, large = read(encode(tmp_path / "large.mp4", noisy, gop=GOP, fps=FPS))
    header, small = read(encode(tmp_path / "small.mp4", visit(5 * GOP, 164, 190), gop=GOP, fps=FPS))
    before = [replace(packet, pts=packet.pts - 20 * MICROSECONDS, dts=None) for packet in large]
    after = [replace(packet, sequence=packet.sequence + len(large)) for packet in small]
    full, lazily = (Camera(header, on=on).run(before + after) for on in (False, True))
    assert 0 < sum(frame.activity > 0 for frame in full.frames if frame.pts > 0) < 8
    assert [frame.activity for frame in lazily.frames] == [frame.activity for frame in full.frames]
    assert lazily.processor.stats.frames_spared > 2 * GOP


def test_without_a_keyframe_to_compare_with_all_is_decoded(tmp_path: Path) -> None:
    """A camera that refreshes its pictures bit by bit, joined after its first one."""
    clip = encode(
        tmp_path / "gradual.mp4",
        visit(250, 154, 190),
        gop=GOP,
        fps=FPS,
        options={"x264-params": "intra-refresh=1"},
    )
    header, packets = read(clip)
    full, lazily = (Camera(header, on=on).run(packets[1:]) for on in (False, True))
    assert [frame.activity for frame in lazily.frames] == [frame.activity for frame in full.frames]


def test_a_hole_in_a_held_gop_is_a_gap(footage: Callable[[str], Path]) -> None:
    header, packets = read(footage("h264"))
    camera = Camera(header, on=True)
    hole = 6 * GOP + 20
    for packet in packets[:hole]:
        camera.feed(packet)
    held = camera.lazy
    assert held is not None
    waiting = held.holding
    assert waiting > 0
    camera.run(packets[hole + 1 :])
    stats = camera.processor.stats
    assert stats.gaps == 1
    gaps = [frame.pts for frame in camera.frames if frame.gap]
    assert gaps == [packets[7 * GOP].pts]


@pytest.mark.parametrize("at", [9 * GOP, 5 * GOP + 5])
def test_a_clock_that_is_set_back_is_followed(footage: Callable[[str], Path], at: int) -> None:
    hour = 3600 * MICROSECONDS
    header, packets = read(footage("h264"))
    later = [replace(each, pts=each.pts + hour, dts=each.dts + hour) for each in packets[:at]]
    full, lazily = (Camera(header, on=on, wait_s=4.0).run(later + packets[at:]) for on in (False, True))
    assert lazily.processor.stats.frames_spared > 0
    theirs, ours = ([frame.pts for frame in camera.frames if frame.pts < hour] for camera in (full, lazily))
    assert theirs
    assert ours == theirs


def test_a_clock_that_jumps_ahead_at_a_keyframe_begins_a_scene(footage: Callable[[str], Path]) -> None:
    hour = 3600 * MICROSECONDS
    header, packets = read(footage("h264"))
    at = 6 * GOP
    later = [replace(each, pts=each.pts + hour, dts=each.dts + hour) for each in packets[at:]]
    full, lazily = (Camera(header, on=on).run(packets[:at] + later) for on in (False, True))
    assert lazily.processor.stats.frames_spared > 0
    for camera in (full, lazily):
        assert [frame.pts for frame in camera.frames if frame.fresh] == [0, later[0].pts]
        assert camera.processor.stats.resyncs["timestamps"] == 1


def test_while_a_clock_stands_still_all_is_decoded(footage: Callable[[str], Path]) -> None:
    header, packets = read(footage("h264"))
    stuck = packets[6 * GOP + 5]
    stays = [replace(each, pts=stuck.pts, dts=stuck.dts) for each in packets[6 * GOP + 5 :]]
    full, lazily = (Camera(header, on=on).run(packets[: 6 * GOP + 5] + stays) for on in (False, True))
    assert lazily.processor.stats.frames_spared > 0
    theirs, ours = (
        [(each.pts, each.mask.sum()) for each in camera.frames if each.pts > stuck.pts] for camera in (full, lazily)
    )
    assert any(kept for _, kept in theirs)
    assert ours == theirs


def test_damage_in_a_held_gop_is_found_when_it_is_decoded(footage: Callable[[str], Path]) -> None:
    header, packets = read(footage("hevc"))
    before = round(ARRIVES * FPS) - 3
    bad = packets[before].data
    packets[before] = replace(packets[before], data=bad[:12] + bytes(len(bad) - 12))
    camera = Camera(header, on=True).run(packets)
    stats = camera.processor.stats
    assert stats.resyncs["corrupt"] >= 1
    assert [frame.pts for frame in camera.frames if frame.gap] == [packets[9 * GOP].pts]
    # The picture that follows the damage is whole: nothing of what came in it is lost.
    assert next(frame for frame in camera.frames if frame.gap).mask.all()


@pytest.mark.parametrize(("bound", "value"), [("HELD_BYTES", 200), ("HELD_PACKETS", 7), ("HELD_S", 1.0)])
def test_what_is_held_is_bounded_and_decoded_beyond(
    footage: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, bound: str, value: float
) -> None:
    monkeypatch.setattr(lazy, bound, value)
    header, packets = read(footage("h264"))
    camera = Camera(header, on=True)
    held = camera.lazy
    assert held is not None
    most = 0
    for packet in packets:
        camera.feed(packet)
        assert held.held_bytes <= lazy.HELD_BYTES
        most = max(most, held.holding)
    assert 0 < most <= lazy.HELD_PACKETS
    assert held.events["overflow"] > 0
    assert kept(camera.frames, ARRIVES, LEAVES).any()


@pytest.mark.parametrize("name", CONSTANT)
def test_at_constant_rate_the_mean_over_seconds_tells_and_samples_wait_for_it(
    footage: Callable[[str], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, packets = read(footage(name))
    full, alone = Camera(header, on=False).run(packets), Camera(header, on=True).run(packets)
    waiting, longest = Camera(header, on=True, wait_s=4.0), 0
    for packet in [*packets, None]:
        before = len(waiting.frames)
        waiting.feed(packet)
        latest = packets[-1].pts if packet is None else packet.pts
        longest = max([longest, *((latest or 0) - frame.pts for frame in waiting.frames[before:])])
    monkeypatch.setattr(lazy, "SLOW_AREA", -math.inf)
    without = Camera(header, on=True, wait_s=4.0).run(packets)
    # Pictures alone tell next to nothing, and keyframes less than the mean.
    assert alone.processor.stats.frames_spared < 0.15 * len(packets)
    assert waiting.processor.stats.frames_spared > without.processor.stats.frames_spared + 0.08 * len(packets)
    assert MICROSECONDS <= longest <= 4 * MICROSECONDS
    # Who comes in mid-GOP is seen from the first sample on, though told seconds later.
    arrival = [n for n, frame in enumerate(full.frames) if ARRIVES - 1 <= frame.pts / MICROSECONDS < LEAVES]
    assert [frame.pts for frame in waiting.frames] == [frame.pts for frame in full.frames]
    theirs, ours = ([each.frames[n].mask for n in arrival] for each in (full, waiting))
    assert [mask.any() for mask in ours] == [mask.any() for mask in theirs]
    assert sum((a & ~b).sum() for a, b in zip(theirs, ours, strict=True)) <= 0.05 * sum(map(np.sum, theirs))
    assert not kept(waiting.frames, 13, 33).any()


@pytest.mark.parametrize("encoder", ["libx264", "libx265"])
def test_what_comes_to_stay_far_from_a_keyframe_is_seen_within_a_stride(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoder: str
) -> None:
    """In one picture, whose bits are within what the camera's noise has reached, and the mean over seconds forgets."""
    monkeypatch.setattr(lazy.QuietModel, "spread", lambda _: (1.0, 1.0))
    pictures = visit(SECONDS * FPS, 0, 0)
    for picture in pictures[334:]:
        picture[40:64, 80:104] = texture(24, 24, 5)
    header, packets = read(encode(tmp_path / "stays.mp4", pictures, encoder, gop=SECONDS * FPS, fps=FPS))
    cameras = [Camera(header, on=False).run(packets), Camera(header, on=True, wait_s=1.0).run(packets)]
    assert len(cameras[1].repeated) > SECONDS // 2
    shown, seen = (
        min(frame.pts for frame in each.frames if frame.pts > 33 * MICROSECONDS and frame.activity > 0)
        for each in cameras
    )
    assert shown <= seen <= shown + 2 * MICROSECONDS


@pytest.mark.parametrize("name", ["h264", "h264-b", "hevc-b"])
def test_the_mean_over_seconds_weighs_each_picture_by_its_duration(
    footage: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    weights: list[float] = []
    add = lazy.QuietModel.add

    def record(model: lazy.QuietModel, picture: CodedPicture, size: float, weight: float) -> tuple[float, float, float]:
        weights.append(weight)
        return add(model, picture, size, weight)

    monkeypatch.setattr(lazy.QuietModel, "add", record)
    header, packets = read(footage(name))
    Camera(header, on=True).run(packets[: 3 * GOP])
    assert len(weights) >= 3 * (GOP - 1)
    # A tenth of a second each, of two seconds, in whatever order they come.
    assert np.mean(weights) == pytest.approx(1 / FPS / lazy.SLOW_S, rel=0.05)


@pytest.fixture
def doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packets neither show quiet nor change."""
    monkeypatch.setattr(lazy, "AREA", -math.inf)
    monkeypatch.setattr(lazy, "SLOW_AREA", -math.inf)
    monkeypatch.setattr(lazy.QuietModel, "spread", lambda _: (math.inf, math.inf))


def events(camera: Camera) -> dict[str, int]:
    assert camera.lazy is not None
    return camera.lazy.events


@pytest.mark.usefixtures("doubt")
@pytest.mark.parametrize("name", KINDS)
def test_in_doubt_samples_wait_for_the_keyframe_and_are_those_of_full_decoding(
    footage: Callable[[str], Path], name: str
) -> None:
    header, packets = read(footage(name))
    full, lazily = Camera(header, on=False).run(packets), Camera(header, on=True, wait_s=4.0).run(packets)
    assert lazily.processor.stats.frames_spared > 0.3 * len(packets)
    # Of pictures in another order one may still be in the decoder when holding begins.
    times = [[frame.pts for frame in each.frames] for each in (full, lazily)]
    assert max(abs(a - b) for a, b in zip(*times, strict=True)) <= (MICROSECONDS // FPS if "-" in name else 0)
    assert [frame.gap or frame.fresh for frame in lazily.frames] == [True] + [False] * (len(lazily.frames) - 1)
    # Who came in mid-GOP is in every sample at its own time, though no packet told it. What an encoder leaves behind
    # of who is gone may pass for something that stands.
    gone = (LEAVES + 0.5) * MICROSECONDS
    theirs, ours = (
        [frame.mask for frame in each.frames if frame.mask.any() and frame.pts < gone] for each in (full, lazily)
    )
    assert len(theirs) == len(ours)
    assert sum((a & ~b).sum() for a, b in zip(theirs, ours, strict=True)) <= 0.02 * sum(map(np.sum, theirs))
    arrival = [n for n, frame in enumerate(full.frames) if 33.5 <= frame.pts / MICROSECONDS < 36]
    assert all((lazily.frames[n].patches == full.frames[n].patches).all() for n in arrival)
    assert events(lazily)["waited"] >= 3
    assert events(lazily)["found"] == 1
    assert events(lazily)["missed"] == 0


@pytest.mark.usefixtures("doubt")
def test_no_sample_waits_longer_than_allowed(footage: Callable[[str], Path]) -> None:
    header, packets = read(footage("h264"))
    camera, latest, longest = Camera(header, on=True, wait_s=2.0), 0, 0
    for packet in packets:
        before = len(camera.frames)
        camera.feed(packet)
        latest = max(latest, packet.pts or 0)
        longest = max([longest, *(latest - frame.pts for frame in camera.frames[before:])])
    spared = camera.processor.stats.frames_spared / len(packets)
    assert 1.0 * MICROSECONDS <= longest <= 2.0 * MICROSECONDS
    # The last half of each GOP.
    assert 0.15 < spared < 0.5
    none = Camera(header, on=True).run(packets)
    assert none.processor.stats.frames_spared == 0
    assert events(none)["waited"] == 0


@pytest.mark.usefixtures("doubt")
@pytest.mark.parametrize(("first_s", "then_s"), [(4.0, 2.0), (2.0, 4.0)])
def test_another_longest_wait_applies_from_the_next_packet_on(
    footage: Callable[[str], Path], first_s: float, then_s: float
) -> None:
    """Changed where samples wait, 3 s into a GOP of 4 s."""
    header, packets = read(footage("h264"))
    packets = packets[: 8 * GOP]
    full, camera = Camera(header, on=False).run(packets), Camera(header, on=True, wait_s=first_s)
    change, latest = 5 * GOP + 30, 0
    longest = {first_s: 0, then_s: 0}
    for number, packet in enumerate(packets):
        if number == change:
            held = camera.lazy
            assert held is not None
            assert held.waiting_since is not None
            held.wait_s = then_s
        before = len(camera.frames)
        camera.feed(packet)
        latest = max(latest, packet.pts or 0)
        waited = max([0, *(latest - frame.pts for frame in camera.frames[before:])])
        # What has waited already comes with the first packet.
        now_s = first_s if number <= change else then_s
        longest[now_s] = max(longest[now_s], waited)
    assert all((wait_s - 1) * MICROSECONDS <= waited <= wait_s * MICROSECONDS for wait_s, waited in longest.items())
    camera.feed(None)
    assert [frame.pts for frame in camera.frames] == [frame.pts for frame in full.frames]


@pytest.mark.usefixtures("doubt")
def test_a_keyframe_that_does_not_come_is_not_waited_for(footage: Callable[[str], Path]) -> None:
    header, packets = read(footage("h264"))
    # From the fifth GOP on the camera sends half as many pictures a second, and GOPs are twice as long.
    begin, step = 5 * GOP, MICROSECONDS // FPS
    times = [begin * step + 2 * (n - begin) * step if n > begin else n * step for n in range(6 * GOP)]
    slower = [replace(packet, pts=at, dts=at) for packet, at in zip(packets, times, strict=False)]
    camera = Camera(header, on=True, wait_s=4.0)
    for packet in slower[: begin + GOP // 2]:
        camera.feed(packet)
    held = camera.lazy
    assert held is not None
    assert held.holding == GOP // 2 - 1
    for packet in slower[begin + GOP // 2 : begin + GOP // 2 + 3]:
        camera.feed(packet)
    assert held.holding == 0
    assert camera.frames[-1].pts == times[begin + GOP // 2]


@pytest.mark.usefixtures("doubt")
@pytest.mark.parametrize("name", KINDS)
def test_no_sample_is_told_unchanged_while_it_is_in_doubt(footage: Callable[[str], Path], name: str) -> None:
    """Where the keyframe comes later than expected, what waited for it is decoded; also in another order."""
    header, packets = read(footage(name))
    begin = packets[5 * GOP].dts or 0
    slower = [
        replace(packet, pts=2 * (packet.pts or 0) - begin, dts=2 * (packet.dts or 0) - begin)
        for packet in packets[5 * GOP : 7 * GOP]
    ]
    camera, in_doubt = Camera(header, on=True, wait_s=2.0), set[int]()
    held = camera.lazy
    assert held is not None
    for packet in packets[: 5 * GOP] + slower:
        told = len(camera.frames)
        camera.feed(packet)
        if packet.keyframe or held.waiting_since is None:
            in_doubt.clear()
            continue
        in_doubt.add(packet.pts or 0)
        assert not in_doubt & {frame.pts for frame in camera.frames[told:]}
    assert held.events["waited"] >= 3


@pytest.mark.usefixtures("doubt")
def test_at_the_end_what_waits_is_decoded(footage: Callable[[str], Path]) -> None:
    header, packets = read(footage("hevc-b"))
    end = round((ARRIVES + 1.5) * FPS)
    full, lazily = (Camera(header, on=on, wait_s=4.0).run(packets[:end]) for on in (False, True))
    assert lazily.frames[-1].mask.any()
    assert (lazily.frames[-1].patches == full.frames[-1].patches).all()


@pytest.mark.usefixtures("doubt")
def test_a_damaged_keyframe_is_no_witness_of_quiet(footage: Callable[[str], Path]) -> None:
    header, packets = read(footage("h264"))
    key = 7 * GOP
    bad = packets[key].data
    packets[key] = replace(packets[key], data=bad[:400] + b"U" * (len(bad) - 400))
    camera = Camera(header, on=True, wait_s=4.0)
    for packet in packets[:key]:
        camera.feed(packet)
    decoded = camera.processor.stats.frames_decoded
    camera.feed(packets[key])
    assert events(camera)["found"] == 1
    assert camera.processor.stats.frames_decoded >= decoded + GOP - 2
    camera.run(packets[key + 1 :])
    assert [frame.pts for frame in camera.frames if frame.gap] == [packets[8 * GOP].pts]


def _judge(held: LazyDecode, packets: list[EncodedPacket], *, changed: Callable[[int], bool]) -> list[str]:
    """States after each GOP; ``changed``: what the pruner says of the keyframe of GOP n."""
    states = []
    for number, packet in enumerate(packets):
        framed = FramedPacket(packet, packet.data, True)
        if held.holds(framed):
            continue_at = packet.pts
            assert continue_at is not None
            held.hold(framed)
            continue
        if packet.keyframe:
            held.skip()
        else:
            held.release()
        assert packet.pts is not None
        if number % 5 == 0:
            held.label(packet.keyframe and changed(number // GOP))
        if packet.keyframe:
            states.append(held.state)
    return states


def test_packets_that_miss_change_are_not_believed_any_more_until_later(
    footage: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy, "BACKOFF", 20)
    header, packets = read(footage("h264"))
    packets = packets[: 8 * GOP]
    held = LazyDecode()
    held.open("h264", header.extradata)
    # The same quiet video again and again, with a running clock.
    long = [
        replace(packet, pts=(packet.pts or 0) + turn * 8 * GOP * MICROSECONDS // FPS)
        for turn in range(4)
        for packet in packets
    ]
    states = _judge(held, long, changed=lambda group: 5 <= group < 8)
    first = states.index("suspended")
    assert states[0] == "learning"
    assert "on" in states[:first]
    assert held.events["missed"] == lazy.MOST_MISSED + 1
    assert states[-1] == "on"


def test_a_check_gop_is_decoded_whole_and_judged(
    footage: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy, "CHECK_GOPS", 7)
    header, packets = read(footage("h264"))
    camera = Camera(header, on=True)
    decoded = []
    for packet in packets[: 8 * GOP]:
        camera.feed(packet)
        if packet.keyframe:
            decoded.append(camera.processor.stats.frames_decoded)
    by_gop = np.diff(decoded)
    # The seventh GOP is whole, the one before is not.
    assert by_gop[6] == GOP
    assert by_gop[5] < GOP / 2


@pytest.mark.parametrize("name", ["h264-b", "hevc-open"])
@pytest.mark.parametrize("seed", range(4))
def test_no_damage_stops_a_camera_that_holds(footage: Callable[[str], Path], name: str, seed: int) -> None:
    header, packets = read(footage(name))
    random = np.random.default_rng(seed)
    sent = []
    for number, packet in enumerate(packets):
        chance = random.random() if number > 20 * FPS else 1.0
        if chance < 0.02:
            continue
        if chance < 0.05:
            data = bytearray(packet.data)
            for at in random.integers(0, len(data), 4):
                data[at] = random.integers(256)
            packet = replace(packet, data=bytes(data))
        sent += [packet, packet] if chance > 0.99 and number > 20 * FPS else [packet]
    # The end is whole again.
    sent = [packet for packet in sent if packet.sequence < 10 * GOP] + packets[10 * GOP :]
    camera = Camera(header, on=True).run(sent)
    assert camera.processor.stats.gaps > 0
    times = [frame.pts for frame in camera.frames]
    assert times == sorted(set(times))
    assert times[-1] >= 43 * MICROSECONDS
