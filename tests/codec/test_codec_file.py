import itertools
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from codec_clips import FPS, encode, process, read, seconds, walk

from cluster.codec import FileSource, NetworkSource, PushSource, open_source
from cluster.errors import ConfigError, SourceError
from cluster.types import MICROSECONDS

FRAME = MICROSECONDS // FPS


def remux(source: Path, target: Path, **options: str) -> Path:
    with av.open(str(source)) as given, av.open(str(target), "w", options=options) as made:
        stream = made.add_stream_from_template(given.streams.video[0])
        for packet in given.demux(video=0):
            if packet.size:
                packet.stream = stream
                made.mux(packet)
    return target


def test_a_file_gives_every_packet_once(clips: dict[str, Path]) -> None:
    source = FileSource(clips["b_frames"])
    header = source.open()
    packets = list(source.packets())
    assert (header.codec, header.width, header.height) == ("h264", 192, 128)
    assert [packet.sequence for packet in packets] == list(range(80))
    assert sorted(packet.pts for packet in packets) == [index * FRAME for index in range(80)]
    assert source.ended
    assert not source.live


@pytest.mark.parametrize("suffix", ["mkv", "ts", "flv"])
def test_other_containers_give_the_same_pictures(clips: dict[str, Path], tmp_path: Path, suffix: str) -> None:
    _, wanted = process(*read(clips["plain"]), fps=5)
    _, got = process(*read(remux(clips["plain"], tmp_path / f"clip.{suffix}")), fps=5)
    assert [sample.luma.tobytes() for sample in got] == [sample.luma.tobytes() for sample in wanted]
    start = got[0].pts
    assert [sample.pts - start for sample in got] == [sample.pts for sample in wanted]


@pytest.mark.parametrize("name", ["plain", "b_frames", "open_gop", "hevc_b"])
def test_a_loop_goes_on_in_time_and_starts_each_round_at_a_keyframe(clips: dict[str, Path], name: str) -> None:
    source = FileSource(clips[name], loop=True)
    header = source.open()
    packets = list(itertools.islice(source.packets(), 200))
    assert [packet.sequence for packet in packets] == list(range(200))
    for start in (0, 80, 160):
        assert packets[start].keyframe
    assert [packets[i].pts - packets[i - 80].pts for i in range(80, 200)] == [80 * FRAME] * 120
    processor, samples = process(header, packets[:160], fps=5)
    assert [sample.pts for sample in samples] == [index * MICROSECONDS // 5 for index in range(40)]
    assert [sample.index for sample in samples if sample.fresh] == [0]
    # The same pictures again, and the seam is nothing but a scene cut.
    assert all(samples[i].luma.tobytes() == samples[i - 20].luma.tobytes() for i in range(20, 40))
    assert not processor.stats.resyncs


def test_closing_ends_a_paced_source_that_waits(tmp_path: Path) -> None:
    path = encode(tmp_path / "slow.mp4", walk(2), fps=1, options={"tune": "zerolatency"})
    source = FileSource(path, realtime=True, speed=0.001)
    source.open()
    packets = source.packets()
    next(packets)
    timer = threading.Timer(0.1, source.close)
    timer.start()
    # The second packet is due in 1,000 s.
    assert list(packets) == []
    assert not source.ended


@pytest.mark.parametrize("jump_s", [3600, -3600])
def test_a_paced_file_whose_clock_jumps_neither_stops_nor_hurries(tmp_path: Path, jump_s: int) -> None:
    path = tmp_path / "joined.ts"
    header, packets = read(encode(tmp_path / "clip.mp4", walk(20), fps=20))
    for first, start_s in (0, 4000), (10, 4000 + jump_s):
        with av.open(str(tmp_path / "part.ts"), "w", format="mpegts") as out:
            stream = out.add_mux_stream("h264", width=header.width, height=header.height)
            for index, each in enumerate(packets[first : first + 10]):
                packet = av.Packet(each.data)
                packet.stream, packet.time_base, packet.is_keyframe = stream, Fraction(1, 1000), each.keyframe
                packet.pts = packet.dts = start_s * 1000 + index * 50
                out.mux(packet)
        with path.open("ab") as whole:
            whole.write((tmp_path / "part.ts").read_bytes())
    source = FileSource(path, realtime=True, speed=2.0)
    source.open()
    began_s = time.monotonic()
    timer = threading.Timer(20.0, source.close)
    timer.start()
    # The last packet before the seam may be cut, and the one before it is told to be.
    assert len(list(source.packets())) == 18
    timer.cancel()
    assert source.ended
    # Seven steps of 50 ms and nine, twice as fast.
    assert time.monotonic() - began_s >= 0.395


def test_a_paced_file_tells_how_late_its_packets_are_taken(clips: dict[str, Path]) -> None:
    source = FileSource(clips["plain"], realtime=True, speed=100.0)
    source.open()
    for index, _ in enumerate(source.packets()):
        if index == 0:
            time.sleep(0.1)
        if index == 1:
            # It was due half a millisecond after the first.
            assert source.behind_s > 0.09
    assert source.behind_s < 0.1


def test_a_round_of_a_file_that_begins_in_an_open_gop_loses_no_more_than_the_first(tmp_path: Path) -> None:
    options = {"x265-params": "open-gop=1:keyint=20:min-keyint=20:scenecut=0:log-level=error", "preset": "medium"}
    whole = encode(tmp_path / "whole.mp4", walk(60), "libx265", b_frames=3, options=options)
    path = tmp_path / "cut.mp4"
    with av.open(str(whole)) as given, av.open(str(path), "w") as made:
        stream = made.add_stream_from_template(given.streams.video[0])
        packets = [packet for packet in given.demux(video=0) if packet.size]
        second = [index for index, packet in enumerate(packets) if packet.is_keyframe][1]
        for packet in packets[second:]:
            packet.stream = stream
            made.mux(packet)
    once, _ = process(*read(path), fps=5)
    assert once.stats.frames_decoded < len(packets) - second, "pictures before its keyframe refer to what was cut off"
    source = FileSource(path, loop=True)
    looped, _ = process(source.open(), itertools.islice(source.packets(), 3 * (len(packets) - second)), fps=5)
    assert looped.stats.frames_decoded == 3 * once.stats.frames_decoded
    assert not looped.stats.resyncs


def test_pacing_loses_nothing(clips: dict[str, Path]) -> None:
    source = FileSource(clips["b_frames"], realtime=True, speed=1000.0)
    source.open()
    assert list(source.packets()) == read(clips["b_frames"])[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"", r"is empty \(0 bytes\)"),
        (b"this is not a video at all\n" * 100, "is not a video"),
    ],
)
def test_files_that_are_no_video_fail_for_good(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "camera.mp4"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SourceError, match=message) as failure:
        FileSource(path).open()
    assert not failure.value.retryable
    assert str(path) in str(failure.value)


def test_a_folder_and_an_audio_file_fail_for_good(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="is a directory"):
        FileSource(tmp_path).open()
    path = tmp_path / "sound.wav"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame(format="s16", layout="mono", samples=800)
        frame.sample_rate = 8000
        frame.planes[0].update(bytes(1600))
        container.mux(stream.encode(frame))
    with pytest.raises(SourceError, match="is not a video"):
        FileSource(path).open()


def test_an_unknown_codec_fails_for_good(clips: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "future.mp4"
    path.write_bytes(clips["plain"].read_bytes().replace(b"avc1", b"zzz1"))
    with pytest.raises(SourceError, match="unknown codec") as failure:
        FileSource(path).open()
    assert not failure.value.retryable


def test_a_file_cut_before_its_index_is_no_video(clips: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "cut.mp4"
    path.write_bytes(clips["plain"].read_bytes()[:-1000])
    with pytest.raises(SourceError, match="truncated"):
        FileSource(path).open()


@pytest.mark.parametrize(("suffix", "options"), [("mp4", {"movflags": "faststart"}), ("mkv", {})])
def test_a_file_cut_in_its_middle_gives_what_is_there_and_then_says_so(
    clips: dict[str, Path], tmp_path: Path, suffix: str, options: dict[str, str]
) -> None:
    whole = remux(clips["plain"], tmp_path / f"whole.{suffix}", **options)
    path = tmp_path / f"cut.{suffix}"
    path.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    source = FileSource(path)
    source.open()
    packets = []
    with pytest.raises(SourceError, match="is truncated: it ends after") as failure:
        packets.extend(source.packets())
    assert not failure.value.retryable
    assert 10 < len(packets) < 70


@pytest.mark.parametrize("first", ["pictures", "sound"])
@pytest.mark.parametrize(
    ("suffix", "options"),
    [("mkv", {}), ("ts", {}), ("mp4", {}), ("mp4", {"movflags": "frag_keyframe+empty_moov"})],
    ids=["mkv", "ts", "mp4", "fragments"],
)
def test_sound_that_is_longer_than_the_pictures_does_not_make_them_truncated(
    clips: dict[str, Path], tmp_path: Path, suffix: str, options: dict[str, str], first: str
) -> None:
    path = tmp_path / f"long.{suffix}"
    with av.open(str(clips["b_frames"])) as given, av.open(str(path), "w", options=options) as made:
        if first == "sound":
            sound = made.add_stream("aac", rate=8000)
        pictures = made.add_stream_from_template(given.streams.video[0])
        if first == "pictures":
            sound = made.add_stream("aac", rate=8000)
        for packet in given.demux(video=0):
            if packet.size:
                packet.stream = pictures
                made.mux(packet)
        for start in range(0, 30 * 8000, 1024):
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            silence.sample_rate, silence.pts = 8000, start
            made.mux(sound.encode(silence))
        made.mux(sound.encode(None))
    source = FileSource(path)
    source.open()
    assert len(list(source.packets())) == 80
    assert source.ended


def test_times_go_on_where_those_of_a_transport_stream_wrap(tmp_path: Path) -> None:
    """After 26.5 hours: a picture every nine seconds, then video with B-pictures over the wrap."""
    path, ticks = tmp_path / "day.ts", 90_000
    video = read(encode(tmp_path / "clip.mp4", walk(60), b_frames=3, options={"preset": "medium"}))[1]
    seam = 2**33 - ticks
    times = [(index * 9 * ticks, index * 9 * ticks, video[0]) for index in range(seam // (9 * ticks))]
    times += [(seam + each.pts * 9 // 100, seam + each.dts * 9 // 100, each) for each in video]
    with av.open(str(path), "w", format="mpegts") as out:
        stream = out.add_mux_stream("h264", width=192, height=128)
        for pts, dts, each in times:
            packet = av.Packet(each.data)
            packet.stream, packet.time_base, packet.is_keyframe = stream, Fraction(1, ticks), each.keyframe
            packet.pts, packet.dts = pts, dts
            out.mux(packet)
    _, packets = read(path)
    assert [packet.pts for packet in packets] == [pts * 100 // 9 for pts, _, _ in times]


def test_a_picture_every_two_seconds_is_not_truncated(tmp_path: Path) -> None:
    path = encode(tmp_path / "slow.mkv", walk(4), times=[0, 2000, 4000, 6000])
    assert len(read(path)[1]) == 4


def test_an_avi_of_a_variable_frame_rate_is_not_truncated(tmp_path: Path) -> None:
    times = [40 * index + 300 * (index // 5) for index in range(20)]
    path = encode(tmp_path / "uneven.avi", walk(20), "mjpeg", format="yuvj420p", times=times)
    packets = read(path)[1]
    assert [round((packet.pts or 0) / 1000) for packet in packets] == times


def test_addresses_choose_sources(tmp_path: Path) -> None:
    assert isinstance(open_source("rtsp://camera/1"), NetworkSource)
    assert isinstance(open_source("RTSPS://camera/1"), NetworkSource)
    assert isinstance(open_source(""), PushSource)
    assert isinstance(open_source("push", max_packets=3), PushSource)
    by_uri = open_source(f"file://{tmp_path}/a%20b.mp4", loop=True)
    assert isinstance(by_uri, FileSource)
    assert by_uri.path == tmp_path / "a b.mp4"
    assert isinstance(open_source("clips/a.mp4"), FileSource)
    with pytest.raises(ConfigError, match="unknown scheme 'ftp'"):
        open_source("ftp://camera/1")
    with pytest.raises(ConfigError, match="does not take these options"):
        open_source("clips/a.mp4", frozen_timeout_s=3)


def test_decoder_processes_stay_free_of_torch() -> None:
    code = "import cluster.codec.processor, sys; sys.exit(any(name in sys.modules for name in ('torch', 'ray')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_samples_are_at_the_pictures_own_times(clips: dict[str, Path]) -> None:
    _, samples = process(*read(clips["plain"]), fps=2)
    assert [seconds(sample) for sample in samples] == [0.5 * index for index in range(8)]


@pytest.mark.parametrize("degrees", [0, 90])
@pytest.mark.parametrize(
    ("codec", "suffix"),
    [
        ("libx264", "mp4"),
        ("libx265", "mov"),
        ("libsvtav1", "mp4"),
        ("libvpx-vp9", "mp4"),
        ("mjpeg", "mp4"),
        ("qtrle", "mov"),
    ],
)
def test_a_file_whose_pictures_are_to_be_turned_is_told_of_once(
    tmp_path: Path, caplog, codec: str, suffix: str, degrees: int
) -> None:
    """They lay on their side, and nobody was told."""
    form = {"mjpeg": "yuvj420p", "qtrle": "rgb24"}.get(codec, "yuv420p")
    upright = encode(tmp_path / f"upright.{suffix}", walk(10), codec, format=form)
    clip = tmp_path / f"clip.{suffix}"
    with av.open(str(upright)) as read, av.open(str(clip), "w") as written:
        stream = written.add_stream_from_template(read.streams.video[0], opaque=True)
        if degrees:
            stream.set_display_rotation(degrees)
        for packet in read.demux(video=0):
            if packet.size:
                packet.stream = stream
                written.mux(packet)
    source = FileSource(clip)
    source.open()
    assert list(source.packets())
    assert caplog.text.count("has a rotation of 90 degrees") == bool(degrees)


def test_an_open_file_holds_no_decoder(tmp_path: Path) -> None:
    """Looking for its rotation left one open for as long as the file was read: its pictures, of any size, and threads
    as many as there are cores."""
    source = FileSource(encode(tmp_path / "clip.mp4", walk(10)))
    before = set(Path("/proc/self/task").iterdir())
    source.open()
    assert set(Path("/proc/self/task").iterdir()) <= before
    assert len(list(source.packets())) == 10


def test_a_file_that_was_begun_and_has_no_pictures_gives_none(clips: dict[str, Path], tmp_path: Path) -> None:
    """FFmpeg cannot seek in it; a recorder that died before its first fragment leaves one."""
    begun = remux(clips["plain"], tmp_path / "whole.mp4", movflags="frag_keyframe+empty_moov").read_bytes()
    (tmp_path / "begun.mp4").write_bytes(begun[: begun.index(b"moof") - 4])
    source = FileSource(tmp_path / "begun.mp4")
    source.open()
    assert list(source.packets()) == []
    assert source.ended
