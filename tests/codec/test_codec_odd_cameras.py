"""What real cameras and recorders send that no example of a standard shows, against plain decoding of the same."""

import struct
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
from codec_clips import FPS, encode, process, read, renumber, walk

from cluster.codec import StreamHeader
from cluster.codec.nal import PARAMETER_SETS, START_CODE, unit_end, unit_kind, unit_starts
from cluster.types import EncodedPacket, SampledPicture

CODECS = {"h264": "plain", "hevc": "hevc"}


def units(packet: EncodedPacket) -> list[bytes]:
    return [packet.data[start : unit_end(packet.data, start)].rstrip(b"\0") for start in unit_starts(packet.data)]


def joined(parts: Iterable[bytes]) -> bytes:
    return b"".join(START_CODE + part for part in parts)


def pictures(samples: Iterable[SampledPicture]) -> list[tuple[int, bytes]]:
    return [(sample.pts, sample.luma.tobytes()) for sample in samples]


def sei(codec: str, payload: bytes) -> bytes:
    """H.264 §7.3.2.3, H.265 §7.3.2.4: type 6, and 39 in a header of two bytes."""
    return (b"\x06" if codec == "h264" else bytes([39 << 1, 1])) + payload


SEI = {
    "private": b"VENDOR\x01\x02\x03\x04",
    "longer than its unit": b"\x05\x40abcd\x80",
    "of a user without an identifier": b"\x05\x04abcd\x80",
    "cut short": b"\x05\xff\xff\xff\x10abcd\x80",
    "empty": b"",
}


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("name", SEI)
@pytest.mark.parametrize("codec", CODECS)
def test_sei_that_cannot_be_read_costs_no_picture(clips: dict[str, Path], codec: str, name: str, behind: bool) -> None:
    header, packets = read(clips[CODECS[codec]])
    _, wanted = process(header, packets[:30])
    unit = START_CODE + sei(codec, SEI[name])
    sent = [replace(each, data=each.data + unit if behind else unit + each.data) for each in packets[:30]]
    processor, samples = process(header, sent)
    assert pictures(samples) == pictures(wanted)
    assert processor.stats.decode_errors == 0


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("codec", CODECS)
def test_parameter_sets_and_sei_may_come_in_packets_of_their_own(
    clips: dict[str, Path], codec: str, apart: bool, told: bool
) -> None:
    """Of a sender that makes a packet of every NAL unit before a picture, or of all of them; without a header."""
    header, packets = read(clips[CODECS[codec]])
    _, wanted = process(header, packets[:50])
    sent = []
    for each in packets[:50]:
        before = [unit for unit in units(each) if unit_kind(codec, unit[0]) in PARAMETER_SETS[codec]]
        before += [sei(codec, b"\x05\x14" + bytes(range(20)) + b"\x80")]
        for part in [[unit] for unit in before] if apart else [before]:
            sent.append(replace(each, data=joined(part), keyframe=told and each.keyframe))
        rest = [unit for unit in units(each) if unit_kind(codec, unit[0]) not in PARAMETER_SETS[codec]]
        sent.append(replace(each, data=joined(rest)))
    processor, samples = process(StreamHeader(codec, 0, 0, b""), renumber(sent))
    assert pictures(samples) == pictures(wanted)
    assert processor.stats.decode_errors == 0
    assert not processor.stats.resyncs


def test_parameter_sets_without_a_picture_are_not_piled_up(clips: dict[str, Path]) -> None:
    header, packets = read(clips["plain"])
    random = np.random.default_rng(0)
    sent = [replace(packets[0], data=joined([b"\x67" + random.bytes(5000)])) for _ in range(100)]
    processor, _ = process(header, renumber(sent))
    assert len(processor._ahead) <= 2**16
    samples = [
        sample
        for each in renumber(packets[:5])
        for sample in processor.feed(replace(each, sequence=each.sequence + 100))
    ]
    assert len(samples) == 5


def test_lengths_that_look_like_start_codes_are_lengths(tmp_path: Path) -> None:
    """Of 256 to 511 bytes: 0, 0, 1 and another byte."""
    path = encode(tmp_path / "walk.mp4", walk(20, 384, 256))
    header, packets = read(path)
    with av.open(str(path)) as container:
        record = container.streams.video[0].codec_context.extradata
    sent = [
        replace(each, data=b"".join(len(unit).to_bytes(4, "big") + unit for unit in units(each))) for each in packets
    ]
    assert sum(each.data.startswith(b"\0\0\1") for each in sent) > 2
    _, wanted = process(header, packets)
    _, samples = process(replace(header, extradata=record), sent)
    assert pictures(samples) == pictures(wanted)
    # Start codes where lengths were told.
    _, samples = process(replace(header, extradata=record), packets)
    assert pictures(samples) == pictures(wanted)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "half": lambda data: data[: len(data) // 2],
    "nine tenths": lambda data: data[: len(data) * 9 // 10],
    "without a piece": lambda data: data[: len(data) // 2] + data[len(data) // 2 + 1400 :],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_jpeg_of_which_a_piece_is_missing_is_no_picture(tmp_path: Path, name: str) -> None:
    path = encode(tmp_path / "walk.avi", walk(12, 480, 320), "mjpeg", options={"qscale": "3"}, format="yuvj420p")
    header, packets = read(path)
    _, wanted = process(header, packets)
    sent = [replace(each, data=DAMAGE[name](each.data)) if each.sequence == 7 else each for each in packets]
    processor, samples = process(header, sent)
    assert pictures(samples) == [each for index, each in enumerate(pictures(wanted)) if index != 7]
    assert [sample.gap for sample in samples].index(True) == 7
    assert processor.stats.resyncs == {"corrupt": 1}


def test_a_jpeg_that_ends_oddly_is_whole(tmp_path: Path) -> None:
    """Without its end marker, with zeros before it, or with what belongs to the transport behind it."""
    path = encode(tmp_path / "walk.avi", walk(4), "mjpeg", options={"qscale": "3"}, format="yuvj420p")
    header, packets = read(path)
    _, wanted = process(header, packets)
    ends = [
        packets[1].data[:-2],
        packets[2].data[:-2] + bytes(64) + b"\xff\xd9",
        packets[3].data + b"\r\n--boundary\r\n",
    ]
    sent = [packets[0], *(replace(each, data=data) for each, data in zip(packets[1:], ends, strict=True))]
    _, samples = process(header, sent)
    assert pictures(samples) == pictures(wanted)


@pytest.mark.parametrize("begin_s", [0, 1.7])
@pytest.mark.parametrize("b_frames", [0, 3])
def test_of_a_recording_that_was_trimmed_the_rest_is_shown(tmp_path: Path, b_frames: int, begin_s: float) -> None:
    """As players trim without encoding: an edit list names the part to show (ISO/IEC 14496-12 §8.6.6)."""
    path = encode(tmp_path / "whole.mp4", walk(80), b_frames=b_frames, options={"preset": "medium"})
    data = bytearray(path.read_bytes())
    at = data.index(b"elst") + 12
    duration, start = struct.unpack_from(">Ii", data, at)
    with av.open(str(path)) as container:
        start += round(begin_s / container.streams.video[0].time_base)
    struct.pack_into(">Ii", data, at, duration // 2, start)
    path.write_bytes(data)
    with av.open(str(path)) as container:
        shown = [round(frame.time * 1e6) for frame in container.decode(video=0) if frame.time is not None]
    assert len(shown) == 40
    _, samples = process(*read(path))
    assert [sample.pts for sample in samples] == shown


@pytest.mark.parametrize("b_frames", [0, 2])
@pytest.mark.parametrize(("encoder", "params"), [("libx264", "x264-params"), ("libx265", "x265-params")])
def test_another_shape_of_pixels_in_mid_stream_is_another_grid(
    tmp_path: Path, encoder: str, params: str, b_frames: int
) -> None:
    """A camera that is set from 4:3 to 16:9, in as many pixels."""
    clips = []
    # As a fraction, and by its number in H.265 table E.1.
    for aspect, number in (("12/11", 2), ("16/11", 4)):
        told = f"sar={aspect}" if encoder == "libx264" else f"log-level=error:sar={number}"
        path = encode(tmp_path / f"{number}.mp4", walk(20), encoder, b_frames=b_frames, options={params: told})
        clips.append(read(path))
    (header, first), (_, second) = clips
    later = [
        replace(each, pts=each.pts + 1_000_000, dts=each.dts + 1_000_000)
        for each in second
        if each.pts is not None and each.dts is not None
    ]
    _, samples = process(header, renumber(first + later), fps=FPS)
    _, alone = process(*clips[1])
    assert [sample.fresh for sample in samples] == [index in (0, 20) for index in range(40)]
    assert samples[19].grid != samples[20].grid == alone[0].grid
    assert pictures(samples)[20:] == [(pts + 1_000_000, luma) for pts, luma in pictures(alone)]


@pytest.mark.parametrize("b_frames", [0, 2])
@pytest.mark.parametrize("encoder", ["libx264", "libx265"])
def test_a_lost_piece_of_a_transport_stream_shows_no_wrong_picture(tmp_path: Path, encoder: str, b_frames: int) -> None:
    """A keyframe of which one is missing must not be taken for the end of the gap."""
    whole, lossy = encode(tmp_path / "whole.ts", walk(45, 320, 240), encoder, b_frames=b_frames), tmp_path / "lossy.ts"
    wanted = dict(pictures(process(*read(whole))[1]))
    data = whole.read_bytes()
    pieces = [data[at : at + 188] for at in range(0, len(data), 188)]
    # Of the video, and where one of its PES packets begins (ISO/IEC 13818-1 §2.4.3.2).
    video = [number for number, piece in enumerate(pieces) if piece[1] & 0x1F == 1 and piece[2] == 0]
    begins = [number for number in video if pieces[number][1] & 0x40]
    keyframe = max(range(10, 40), key=lambda index: begins[index + 1] - begins[index])
    for lost in [number for number in video if begins[keyframe - 1] <= number <= begins[keyframe + 1]][::4]:
        lossy.write_bytes(b"".join(pieces[:lost] + pieces[lost + 1 :]))
        processor, samples = process(*read(lossy))
        assert processor.stats.gaps > 0
        assert len(samples) > 15
        assert all(wanted[pts] == luma for pts, luma in pictures(samples))
