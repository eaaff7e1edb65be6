import itertools
import math
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from codec_clips import encode, walk
from waiting import until

from cluster.codec import Backoff, CameraState, FileSource, PushSource
from cluster.config import SightlineConfig, camera_settings
from cluster.decoder.decode_load import DecodeGate
from cluster.decoder.pipeline import BLIND, SILENT, CameraPipeline, PipelineSettings, pipeline_settings
from cluster.errors import CapacityError, ConfigError
from cluster.types import PatchGeometry
from cluster.types.cameras import name_share

QWEN = PatchGeometry(patch=14, merge=2, temporal=2)
DEADLINE_S = 20.0


class Collector:
    """A sink that keeps what it gets, and can be full."""

    def __init__(self):
        self.samples = []
        self.refuse = set()
        self.calls = 0
        self.arrived = threading.Event()

    def __call__(self, sample, cut):
        self.calls += 1
        if self.calls - 1 in self.refuse:
            raise CapacityError("full")
        self.samples.append(replace(sample, patches=cut()))
        self.arrived.set()


def run_to_end(source, sink, settings=None, name="cam"):
    ended = threading.Event()
    told = []
    pipeline = CameraPipeline(
        name, source, QWEN, settings or PipelineSettings(), sink, lambda status: (told.append(status), ended.set())
    )
    pipeline.start()
    assert ended.wait(DEADLINE_S)
    assert pipeline.stop(DEADLINE_S)
    assert told == [replace(pipeline.status(), last_frame_age_s=told[0].last_frame_age_s)]
    return told[0]


def test_a_file_runs_to_its_end(clips):
    sink = Collector()
    status = run_to_end(FileSource(clips["street"]), sink)
    assert (status.state, status.reason) == (CameraState.ENDED, "")
    assert (status.stats.codec, status.stats.width, status.stats.height, status.stats.cue) == (
        "h264",
        640,
        360,
        "vectors+luma",
    )
    assert status.stats.frames_decoded == 300
    assert status.stats.frames_sampled == 48
    assert len(sink.samples) == 24
    assert status.samples_dropped == 0
    assert all(sample.grid.tokens == 252 for sample in sink.samples)
    assert sum(sample.tokens for sample in sink.samples) < 0.3 * 24 * 252
    assert status.last_frame_age_s >= 0
    first = sink.samples[0]
    assert (first.stream, first.index, first.pts, first.fresh, first.complete) == ("cam", 0, 0, True, True)
    assert [sample.index for sample in sink.samples] == list(range(24))
    # 12.5 frames per second have no frame at every half second.
    assert np.abs(np.diff([sample.pts for sample in sink.samples]) - 1_000_000).max() <= 80_000


def test_broken_cameras_do_not_touch_a_good_one(clips, tmp_path):
    empty, text = tmp_path / "empty.mp4", tmp_path / "text.mp4"
    empty.touch()
    text.write_text("this is no video " * 100)
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(clips["street"].read_bytes()[:40_000])
    sinks = {name: Collector() for name in ("good", "empty", "text", "cut", "missing", "bad sink")}

    def bad_sink(sample, cut):
        raise ZeroDivisionError("sink is broken")

    paths = {"good": clips["street"], "bad sink": clips["noisy"], "empty": empty, "text": text, "cut": cut}
    pipelines = {
        name: CameraPipeline(
            name,
            FileSource(paths.get(name, tmp_path / "nowhere.mp4")),
            QWEN,
            PipelineSettings(),
            bad_sink if name == "bad sink" else sinks[name],
        )
        for name in sinks
    }
    for pipeline in pipelines.values():
        pipeline.start()
    until(lambda: not any(pipeline.running for pipeline in pipelines.values()))
    statuses = {name: pipeline.status() for name, pipeline in pipelines.items()}
    assert statuses["good"].state is CameraState.ENDED
    assert len(sinks["good"].samples) == 24
    for name, reason in {
        "empty": "empty (0 bytes)",
        "text": "is not a video",
        "cut": "not a video, or is damaged or truncated",
        "missing": "does not exist",
        "bad sink": "internal error: ZeroDivisionError: sink is broken",
    }.items():
        assert statuses[name].state is CameraState.ERROR, name
        assert reason in statuses[name].reason
        assert not sinks[name].samples


def test_a_full_sink_is_counted_and_the_next_frame_follows_a_gap(clips):
    sink = Collector()
    sink.refuse = {3, 4}
    status = run_to_end(FileSource(clips["street"]), sink)
    assert status.samples_dropped == 2
    assert len(sink.samples) == 22
    assert status.state is CameraState.ENDED
    assert [sample.index for sample in sink.samples[:4]] == [0, 1, 2, 5]
    assert [(sample.fresh, sample.gap) for sample in sink.samples[:5]] == [
        (True, False),
        (False, False),
        (False, False),
        (False, True),
        (False, False),
    ]
    assert sink.samples[3].complete


def test_force_anchor_reaches_the_next_frame(clips):
    sink = Collector()
    pipeline = CameraPipeline("cam", FileSource(clips["street"]), QWEN, PipelineSettings(), sink)

    def force_once(sample, cut):
        sink(sample, cut)
        if sample.index == 5:
            pipeline.force_anchor()

    pipeline._sink = force_once
    pipeline.start()
    pipeline._thread.join(DEADLINE_S)
    assert [sample.index for sample in sink.samples if sample.random_access] == [0, 6]
    assert sink.samples[6].complete


def test_an_odd_last_sample_is_completed(tmp_path):
    from cluster.lab.scenes.street_clips import make_clip

    make_clip("street", tmp_path / "odd.mp4", seconds=2.4, size=(320, 180))
    sink = Collector()
    status = run_to_end(FileSource(tmp_path / "odd.mp4"), sink)
    assert status.stats.frames_sampled == 5
    assert len(sink.samples) == 3
    assert np.array_equal(sink.samples[-1].patches[:, 0], sink.samples[-1].patches[:, 1])


def test_a_camera_set_to_another_shape_of_picture_goes_on(tmp_path):
    """Its statistics compare blocks of pictures, whose number depends on the shape."""
    parts = [encode(tmp_path / f"{height}.h264", walk(40, 640, height)).read_bytes() for height in (480, 360)]
    (tmp_path / "both.h264").write_bytes(b"".join(parts))
    sink = Collector()
    status = run_to_end(FileSource(tmp_path / "both.h264"), sink)
    assert (status.state, status.reason) == (CameraState.ENDED, "")
    assert {sample.grid for sample in sink.samples} == {QWEN.grid(640, 480), QWEN.grid(640, 360)}
    assert status.picture is not None
    assert status.picture.strangeness == 0.0


def test_a_file_without_a_decodable_picture_is_an_error(clips):
    """Its container is sound, and every picture in it is garbage."""

    class Garbled(FileSource):
        def packets(self):
            for packet in super().packets():
                yield replace(packet, data=bytes(len(packet.data)))

    sink = Collector()
    status = run_to_end(Garbled(clips["street"]), sink)
    assert status.state is CameraState.ERROR
    assert "without a decodable picture" in status.reason
    assert status.stats.decode_errors > 0
    assert not sink.samples


def test_stopping_a_waiting_and_a_paced_camera_meets_the_deadline(clips):
    waiting = CameraPipeline("push", PushSource(), QWEN, PipelineSettings(), Collector())
    sink = Collector()
    paced = CameraPipeline(
        "paced", FileSource(clips["street"], realtime=True, loop=True), QWEN, PipelineSettings(), sink
    )
    assert waiting.status().state is CameraState.WAITING
    for pipeline in (waiting, paced):
        pipeline.start()
    assert sink.arrived.wait(DEADLINE_S)
    assert paced.status().state is CameraState.RUNNING
    assert waiting.status().state is CameraState.WAITING
    for pipeline in (waiting, paced):
        assert pipeline.stop(timeout_s=5.0)
        assert not pipeline.running
        assert pipeline.status().state is CameraState.ENDED
        assert pipeline.status().reason == "stopped"


def test_stop_says_when_the_sink_holds_the_thread(clips):
    release = threading.Event()
    held = threading.Event()

    def stuck(sample, cut):
        held.set()
        release.wait(DEADLINE_S)

    pipeline = CameraPipeline("cam", FileSource(clips["street"]), QWEN, PipelineSettings(), stuck)
    pipeline.start()
    assert held.wait(DEADLINE_S)
    assert pipeline.stop(timeout_s=0.2) is False
    release.set()
    assert pipeline.stop(DEADLINE_S) is True


def test_stop_before_start():
    pipeline = CameraPipeline("cam", PushSource(), QWEN, PipelineSettings(), Collector())
    assert pipeline.stop() is True


def test_backoff_shows_the_reason_and_the_time_left(tmp_path):
    class Flaky(FileSource):
        def open(self):
            from cluster.errors import SourceError

            raise SourceError("camera refused the connection", retryable=True)

    settings = PipelineSettings(backoff=Backoff(first_s=30.0, jitter=0.0))
    pipeline = CameraPipeline("cam", Flaky(tmp_path / "x.mp4"), QWEN, settings, Collector())
    pipeline.start()
    until(lambda: pipeline.status().state is CameraState.BACKOFF)
    status = pipeline.status()
    assert (status.state, status.reason) == (CameraState.BACKOFF, "camera refused the connection")
    assert 20.0 < status.retry_in_s <= 30.0
    assert pipeline.stop(5.0)


def test_an_unknown_pruner_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="unknown pruner 'replenishh'"):
        CameraPipeline("cam", PushSource(), QWEN, PipelineSettings(pruner="replenishh"), Collector())


def test_a_decoder_process_needs_no_torch():
    code = (
        "import sys, cluster.decoder.pipeline; sys.exit(any(name in sys.modules for name in ('torch', 'ray', 'PIL')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_pushed_packets_give_the_same_frames_as_the_file(clips):
    direct, pushed = Collector(), Collector()
    run_to_end(FileSource(clips["noisy"]), direct)
    source = PushSource(max_packets=1000)
    file = FileSource(clips["noisy"])
    source.begin_session(file.open(), "edge-1")
    for packet in file.packets():
        assert source.offer([packet]) == 0
    source.end_session()
    status = run_to_end(source, pushed)
    assert status.state is CameraState.ENDED
    for a, b in zip(pushed.samples, direct.samples, strict=True):
        assert (a.index, a.pts) == (b.index, b.pts)
        assert np.array_equal(a.mask, b.mask)
        assert np.array_equal(a.patches, b.patches)


def test_the_camera_recovers_from_lost_packets(clips):
    """Forty packets get lost in mid-GOP: nothing until the next keyframe, then a complete frame of the same scene."""
    source = PushSource(max_packets=1000)
    file = FileSource(clips["street"])
    source.begin_session(file.open(), "edge-1")
    for packet in file.packets():
        if not 60 <= packet.sequence < 100:
            source.offer([packet])
    source.end_session()
    sink = Collector()
    status = run_to_end(source, sink)
    assert status.state is CameraState.ENDED
    assert status.stats.gaps == 1
    entries = [sample for sample in sink.samples if sample.random_access]
    assert [(round(sample.pts / 1e6), sample.fresh, sample.gap) for sample in entries] == [
        (0, True, False),
        (8, False, True),
    ]
    assert all(sample.complete and sample.activity == 1 for sample in entries)


class Hiccup(Collector):
    """A sink with a defect that its third frame brings about."""

    def __call__(self, sample, cut):
        if self.calls == 2:
            self.calls += 1
            raise ZeroDivisionError("sink is broken")
        super().__call__(sample, cut)


def test_a_defect_of_a_live_camera_is_a_lost_connection(clips, caplog):
    """Its client neither notices nor connects again: the next keyframe goes on, as after a gap."""
    source = PushSource(max_packets=1000)
    file = FileSource(clips["street"])
    source.begin_session(file.open(), "edge-1")
    for packet in file.packets():
        source.offer([packet])
    source.end_session()
    sink = Hiccup()
    status = run_to_end(source, sink, PipelineSettings(backoff=Backoff(first_s=0.01)))
    assert (status.state, status.reason) == (CameraState.ENDED, "")
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "camera cam failed and reconnects"
    ]
    entries = [sample for sample in sink.samples if sample.random_access]
    assert [(round(sample.pts / 1e6), sample.fresh, sample.gap) for sample in entries] == [
        (0, True, False),
        (4, False, True),
    ]
    assert entries[1].complete


def test_a_connected_camera_of_which_nothing_can_be_decoded_says_so(clips, monkeypatch):
    monkeypatch.setattr("cluster.decoder.pipeline.SILENT_S", 0.3)
    source = PushSource(max_packets=1000)
    file = FileSource(clips["street"])
    source.begin_session(file.open(), "edge-1")
    pipeline = CameraPipeline("cam", source, QWEN, PipelineSettings(), Collector())
    pipeline.start()
    packets = list(file.packets())
    source.offer([replace(packet, data=bytes(len(packet.data))) for packet in packets[:100]])
    until(lambda: pipeline.status().reason == SILENT)
    assert pipeline.status().state is CameraState.RUNNING
    source.offer(packets[100:])
    until(lambda: pipeline.status().reason == "")
    pipeline.stop()


class LongGroups:
    """A live camera that sends one keyframe per session, at its beginning; each session's packets are ``sessions``'."""

    live, pushed, ended = True, False, False

    def __init__(self, header, sessions):
        self.header, self.sessions, self.opened = header, sessions, 0
        self.closed = threading.Event()

    def open(self):
        self.opened += 1
        return replace(self.header, new_clock=True)

    def packets(self):
        for packet in self.sessions[min(self.opened, len(self.sessions)) - 1]:
            if self.closed.wait(0.02):
                return
            yield packet

    def close(self):
        self.closed.set()


def test_a_camera_whose_keyframes_are_minutes_apart_is_connected_anew_after_a_loss(tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.decoder.pipeline.SILENT_S", 0.4)
    file = FileSource(encode(tmp_path / "long.mp4", walk(200), gop=1000))
    header = file.open()
    packets = list(file.packets())
    source = LongGroups(header, [packets[:10] + packets[11:], packets[50:]])
    pipeline = CameraPipeline("cam", source, QWEN, PipelineSettings(backoff=Backoff(first_s=0.2)), Collector())
    pipeline.start()
    until(lambda: pipeline.status().reason == BLIND, timeout_s=10)
    # A session that does not begin with a keyframe would be no better the next time.
    until(lambda: pipeline.status().reason == SILENT)
    assert pipeline.status().stats.frames_decoded == 10
    assert source.opened == 2
    pipeline.stop()


def test_an_unknown_codec_is_an_error(clips):
    source = PushSource()
    header = FileSource(clips["street"]).open()
    source.begin_session(replace(header, codec="cinepack"), "edge-1")
    status = run_to_end(source, Collector())
    assert status.state is CameraState.ERROR
    assert "cinepack" in status.reason


def test_quality_changes_in_mid_stream_and_nothing_begins_anew(clips):
    """A third of the clip each at full quality, at half the rate and pruned harder, and at full quality again."""
    told = []

    def sink(sample, cut):
        told.append(sample)
        if len(told) == 8:
            pipeline.set_quality(prune=3.0, fps=0.5)
        if len(told) == 12:
            pipeline.set_quality()

    ended = threading.Event()
    pipeline = CameraPipeline(
        "cam", FileSource(clips["street"]), QWEN, PipelineSettings(), sink, lambda _status: ended.set()
    )
    pipeline.start()
    assert ended.wait(DEADLINE_S)
    assert pipeline.stop(DEADLINE_S)
    status = pipeline.status()
    assert (status.state, status.stats.frames_decoded) == (CameraState.ENDED, 300)
    assert status.samples_dropped == 0
    assert [sample.fresh for sample in told] == [True] + [False] * (len(told) - 1)
    assert [sample.index for sample in told] == list(range(len(told)))
    seconds = [sample.duration / 1e6 for sample in told]
    assert seconds[:8] == [1.0] * 8
    assert seconds[9:11] == [2.0, 2.0]
    assert seconds[14:] == [1.0] * (len(told) - 14)
    # Frames cover the clip without a hole: each ends where the next begins, give or take a picture.
    for before, after in itertools.pairwise(told):
        assert abs(before.pts + before.duration - after.pts) <= 160_000
    assert told[-1].pts + told[-1].duration > 23_000_000


def test_pruning_harder_keeps_less_of_the_same_video(clips):
    kept = {}
    for factor in (1.0, 6.0):
        sink, ended = Collector(), threading.Event()
        pipeline = CameraPipeline(
            "cam", FileSource(clips["street"]), QWEN, PipelineSettings(), sink, lambda _s, ended=ended: ended.set()
        )
        pipeline.set_quality(prune=factor)
        pipeline.start()
        assert ended.wait(DEADLINE_S)
        kept[factor] = sum(sample.tokens for sample in sink.samples)
    assert kept[6.0] < kept[1.0]


class CountedGate(DecodeGate):
    """Remembers how many had a turn at once."""

    def __init__(self, places):
        super().__init__(places)
        self.inside = self.most = 0
        self._counting = threading.Lock()

    def __enter__(self):
        super().__enter__()
        with self._counting:
            self.inside += 1
            self.most = max(self.most, self.inside)

    def __exit__(self, *error):
        with self._counting:
            self.inside -= 1
        super().__exit__(*error)


def test_cameras_of_a_process_take_turns_and_lose_nothing(clips):
    gate, sinks = CountedGate(2), [Collector() for _ in range(5)]
    pipelines = [
        CameraPipeline(f"cam-{number}", FileSource(clips["street"]), QWEN, PipelineSettings(), sink, gate=gate)
        for number, sink in enumerate(sinks)
    ]
    for pipeline in pipelines:
        pipeline.start()
    for pipeline in pipelines:
        pipeline._thread.join(DEADLINE_S)
    assert [len(sink.samples) for sink in sinks] == [24] * 5
    assert gate.most == 2
    assert gate.inside == 0


def test_a_camera_that_waits_for_its_replica_holds_no_turn(clips):
    release, held = threading.Event(), threading.Event()

    def stuck(sample, cut):
        held.set()
        release.wait(DEADLINE_S)

    gate, sink = DecodeGate(1), Collector()
    waiting = CameraPipeline("slow", FileSource(clips["street"]), QWEN, PipelineSettings(), stuck, gate=gate)
    waiting.start()
    assert held.wait(DEADLINE_S)
    other = CameraPipeline("quick", FileSource(clips["street"]), QWEN, PipelineSettings(), sink, gate=gate)
    other.start()
    other._thread.join(DEADLINE_S)
    assert len(sink.samples) == 24
    assert waiting.running
    release.set()
    assert waiting.stop(DEADLINE_S)
    assert other.stop(DEADLINE_S)


def test_a_camera_that_fails_in_its_turn_gives_it_back(clips, monkeypatch):
    gate, sink = DecodeGate(1), Collector()
    broken = CameraPipeline("broken", FileSource(clips["street"]), QWEN, PipelineSettings(), sink, gate=gate)
    monkeypatch.setattr(broken._sampler, "select", lambda frame: 1 / 0)
    broken.start()
    broken._thread.join(DEADLINE_S)
    assert (broken.status().state, sink.samples) == (CameraState.ERROR, [])
    well = CameraPipeline("well", FileSource(clips["street"]), QWEN, PipelineSettings(), sink, gate=gate)
    well.start()
    well._thread.join(DEADLINE_S)
    assert len(sink.samples) == 24


def test_turns_go_to_who_has_waited_longest():
    gate, order, threads = DecodeGate(1), [], []

    def worker(name):
        with gate:
            order.append(name)

    with gate:
        for name in "abc":
            threads.append(threading.Thread(target=worker, args=name))
            threads[-1].start()
            until(lambda: len(gate._waiting) == len(threads))
    with gate:
        order.append("who had it before")
    for thread in threads:
        thread.join(DEADLINE_S)
    assert order == ["a", "b", "c", "who had it before"]


def test_a_process_has_turns_for_its_cores():
    gate = DecodeGate()
    assert 1 <= gate._free <= 8


def test_cameras_that_start_together_move_their_openings_in_turn():
    """Windows of 40 s every 4 s, anchors every 16 s: in each stride about a quarter of the cameras opens anew."""
    names = [f"camera-{number}" for number in range(400)]
    window = {"length_s": 40, "stride_s": 4}
    cameras = [{"name": name, "questions": [{"id": "fire", "text": "Is there a fire?"}]} for name in names]
    config = SightlineConfig.model_validate({"window": window, "cameras": cameras})
    first = Counter(pipeline_settings(camera_settings(config, name)).first_interval_s for name in names)
    assert set(first) == {4.0, 8.0, 12.0, 16.0}
    assert min(first.values()) >= 75


def test_numbered_cameras_spread_like_random_ones():
    """Chi-squared over 8 seconds is 7 on average; a CRC puts five of 24 on each of four, in any series: 10.7."""
    found = []
    for site in range(200):
        counts = Counter(math.floor(8 * name_share(f"site-{site}-cam-{number:03d}")) for number in range(24))
        found.append(sum((counts[second] - 3) ** 2 / 3 for second in range(8)))
    assert 6 < sum(found) / len(found) < 8
