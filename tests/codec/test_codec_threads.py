"""Threads within a codec: the same pictures, a few packets later."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from codec_clips import encode, process, read, walk

from cluster.codec import decoder, processor
from cluster.codec.decoder import Decoder
from cluster.types import EncodedPacket

CLIPS = {
    "hevc": ("libx265", "mp4", {}),
    "hevc_b": ("libx265", "mp4", {"b_frames": 3}),
    "av1": ("libsvtav1", "mkv", {}),
    "vp9": ("libvpx-vp9", "webm", {}),
}


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three cores, and small pictures that count as large."""
    monkeypatch.setattr(decoder, "_THREADED_PIXELS", 1)
    monkeypatch.setattr(decoder, "usable_cores", lambda: 3)


def decoded(header_codec: str, extradata: bytes, size: tuple[int, int], packets: list[EncodedPacket]) -> tuple:
    made = Decoder(header_codec, extradata, size=size)
    frames, late = [], 0
    for index, packet in enumerate(packets):
        frames += made.decode(packet.data, packet.pts, packet.dts)
        late = max(late, index + 1 - len(frames))
    frames += made.drain()
    return made.threads, late, [(frame.pts, frame.to_ndarray()) for frame in frames]


@pytest.mark.parametrize("name", list(CLIPS))
def test_threads_decode_the_same_pictures(tmp_path: Path, name: str, request: pytest.FixtureRequest) -> None:
    encoder, suffix, options = CLIPS[name]
    header, packets = read(encode(tmp_path / f"clip.{suffix}", walk(30), encoder, **options))
    given = header.codec, header.extradata, (header.width, header.height), packets
    threads, late, alone = decoded(*given)
    assert threads == 1
    request.getfixturevalue("cores")
    for _ in range(3):
        threads, later, together = decoded(*given)
        assert threads == 3
        # AV1's threads share a picture, the others' each have their own.
        assert late <= later <= late + (0 if name == "av1" else 2)
        assert [pts for pts, _ in together] == [pts for pts, _ in alone]
        for (_, one), (_, other) in zip(together, alone, strict=True):
            np.testing.assert_array_equal(one, other)


def test_h264_has_one_thread_whatever_its_size(tmp_path: Path, cores: None) -> None:
    header, packets = read(encode(tmp_path / "clip.mp4", walk(5)))
    made = Decoder(header.codec, header.extradata, size=(7680, 4320))
    made.decode(packets[0].data, 0, 0)
    assert made.threads == 1


def test_threads_are_as_many_as_the_budget_has_room_for(tmp_path: Path, cores: None) -> None:
    header, packets = read(
        encode(tmp_path / "clip.mp4", walk(5), "libx265", options={"x265-params": "log-level=error:ref=3:bframes=0"})
    )
    # 3 references, one in decoding, one shown: 5 pictures of 2.25 bytes a pixel, and one more for each further thread.
    picture = header.width * header.height * 9 // 4
    for pictures, threads in ((5, 1), (6, 2), (7, 3), (20, 3)):
        made = Decoder(header.codec, b"", pictures * picture)
        frames = [frame for packet in packets for frame in made.decode(packet.data, packet.pts, packet.dts)]
        assert made.threads == threads
        assert len(frames + made.drain()) == 5


@pytest.mark.parametrize("damaged", [7, 18, 19, 20])
def test_damage_costs_the_rest_of_its_gop_and_no_more(tmp_path: Path, cores: None, damaged: int) -> None:
    header, packets = read(encode(tmp_path / "clip.mp4", walk(60), "libx265"))
    _, clean = process(header, packets)
    data = packets[damaged].data
    packets[damaged] = replace(packets[damaged], data=data[: len(data) // 2])
    made, samples = process(header, packets)
    assert made.stats.resyncs["corrupt"] >= 1
    pictures = {sample.pts: sample.luma for sample in clean}
    for sample in samples:
        np.testing.assert_array_equal(sample.luma, pictures[sample.pts])
    # Keyframes stand at 0, 20 and 40.
    lost = range(damaged, 20 if damaged < 20 else 40)
    assert [sample.pts for sample in samples] == [s.pts for index, s in enumerate(clean) if index not in lost]


@pytest.mark.parametrize("damaged", [(19, 21), (20, 21), (20, 24)])
def test_damage_found_when_packets_are_decoded_again_costs_the_rest_of_the_gop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: tuple[int, int]
) -> None:
    """The first damage is reported two packets late. By then the process has one core, and the decoder that begins
    anew at the keyframe, 20, reports the second at once."""
    header, packets = read(encode(tmp_path / "clip.mp4", walk(60), "libx265"))
    _, clean = process(header, packets)
    cores = iter([3])
    monkeypatch.setattr(decoder, "_THREADED_PIXELS", 1)
    monkeypatch.setattr(decoder, "usable_cores", lambda: next(cores, 1))
    for index in damaged:
        data = packets[index].data
        packets[index] = replace(packets[index], data=data[: len(data) // 2])
    made, samples = process(header, packets)
    assert made.stats.decode_errors == 2
    pictures = {sample.pts: sample.luma for sample in clean}
    for sample in samples:
        np.testing.assert_array_equal(sample.luma, pictures[sample.pts])
    assert [sample.pts for sample in samples] == [
        sample.pts for index, sample in enumerate(clean) if not damaged[0] <= index < 40
    ]


def test_decoders_whose_threads_still_work_are_let_go(tmp_path: Path, cores: None) -> None:
    header, packets = read(encode(tmp_path / "clip.webm", walk(30), "libvpx-vp9"))
    for count in range(1, 30):
        made = processor.Decoder(header.codec, header.extradata, size=(header.width, header.height))
        for packet in packets[:count]:
            made.decode(packet.data, packet.pts, packet.dts)
        assert made.threads == 3
