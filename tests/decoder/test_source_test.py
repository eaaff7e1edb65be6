"""Testing a source: what it says is what FFmpeg's own tools and the clip's making say; what fails says why."""

import asyncio
import io

import av
import pytest
from PIL import Image
from rtsp_server import RtspServer

from cluster.codec import CLIPS
from cluster.config import camera_settings, load_config, parse_camera
from cluster.decoder.source_test import USUAL_GEOMETRY, PacketTimes, SourceTester, watch_source
from cluster.errors import CapacityError, ConfigError, NotReadyError
from cluster.lab.scenes.street_clips import make_clip
from cluster.types import EncodedPacket

QUESTIONS = [{"id": "q", "text": "Is anyone there?"}]


def camera(source: str, **settings):
    return parse_camera("test", source, QUESTIONS, settings)


def run(config, source: str, **settings):
    return watch_source(camera_settings(config, camera(source, **settings)), config, USUAL_GEOMETRY)


def test_a_clip_is_told_as_ffmpeg_tells_it() -> None:
    found = run(load_config(None, {}), "demo://gate")
    with av.open(str(CLIPS["gate"])) as clip:
        stream = clip.streams.video[0]
        assert (found.codec, found.width, found.height) == (stream.codec_context.name, stream.width, stream.height)
        assert found.fps == pytest.approx(float(stream.average_rate), rel=0.01)
        packets = [packet for packet in clip.demux(stream) if packet.dts is not None]
    keys = [number for number, packet in enumerate(packets) if packet.is_keyframe]
    assert found.gop_pictures == keys[1] - keys[0]
    assert found.gop_s == pytest.approx((keys[1] - keys[0]) / float(stream.average_rate), rel=0.02)
    assert 0 < found.kept < 1
    plain, kept = (Image.open(io.BytesIO(data)).convert("L") for data in (found.jpeg, found.kept_jpeg))
    assert plain.size == kept.size
    # What is not kept is dark.
    assert sum(kept.tobytes()) < sum(plain.tobytes())


def test_a_camera_in_the_network_is_told_by_what_it_sends(tmp_path) -> None:
    make_clip("street", tmp_path / "street.mp4", seconds=3, fps=10, size=(160, 96))
    with RtspServer({"/street": tmp_path / "street.mp4"}) as server:
        found = run(load_config(None, {}), server.url("/street"))
    assert (found.codec, found.width, found.height, found.decode) == ("h264", 160, 96, "cpu")
    assert found.fps == pytest.approx(10, rel=0.02)
    assert found.cue == "vectors+luma"
    assert 0 < found.first_picture_s < 10


def test_masks_are_black_in_it() -> None:
    found = run(load_config(None, {}), "demo://gate", privacy_masks=[{"x": 0, "y": 0, "width": 0.5, "height": 1}])
    picture = Image.open(io.BytesIO(found.jpeg)).convert("L")
    left = picture.crop((0, 0, picture.width // 2 - 16, picture.height))
    assert max(left.tobytes()) < 24


def test_what_cannot_be_read_says_why(tmp_path) -> None:
    config = load_config(None, {"source": {"connect_timeout_s": 1.0}})
    with pytest.raises(NotReadyError, match="refuses the connection"):
        run(config, "rtsp://operator:hunter2horse@127.0.0.1:9/stream")
    (tmp_path / "noise.mp4").write_bytes(b"no video at all" * 99)
    config = load_config(None, {"security": {"file_roots": [str(tmp_path)]}})
    with pytest.raises(NotReadyError, match="gives no picture") as caught:
        run(config, str(tmp_path / "noise.mp4"))
    assert "hunter2horse" not in str(caught.value)
    with pytest.raises(NotReadyError, match="outside the folders"):
        run(config, "/etc/hostname")
    with pytest.raises(ConfigError, match="an agent pushes"):
        run(config, "")


def test_no_more_than_two_at_once() -> None:
    async def three() -> list[object]:
        tester = SourceTester(load_config(None, {}))
        tests = [tester.test("test", "demo://gate", {"questions": QUESTIONS}) for _ in range(3)]
        return await asyncio.gather(*tests, return_exceptions=True)

    found = asyncio.run(three())
    assert sum(isinstance(each, CapacityError) for each in found) == 1
    assert not any(isinstance(each, BaseException) for each in found if not isinstance(each, CapacityError))


def test_times_of_reordered_packets() -> None:
    # I P B B P B B I, decoded in that order; 25 pictures a second, a GOP of seven.
    order = [0, 3, 1, 2, 6, 4, 5, 7]
    times = PacketTimes()
    for number, shown in enumerate(order):
        times.add(EncodedPacket("h264", b"x" * 1000, 40_000 * shown, None, number in (0, 7), number))
    assert (times.fps, times.gop) == (25.0, (7, 0.28))
    assert times.kbit_s == pytest.approx(8 * 8 / 0.28)
