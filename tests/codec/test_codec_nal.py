import contextlib
import itertools
from pathlib import Path

import av
import pytest
from codec_clips import read
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.codec.nal import (
    START_CODE,
    H264FrameNumbers,
    configuration,
    parameter_sets,
    starts_decoding,
    to_annexb,
    unit_starts,
)

H264 = ["plain", "b_frames", "open_gop", "gradual", "slices"]


def units(data: bytes) -> list[bytes]:
    starts = [*unit_starts(data), len(data) + 4]
    return [data[a : b - 3].rstrip(b"\0") for a, b in itertools.pairwise(starts)]


@pytest.mark.parametrize(("name", "filter_name"), [("b_frames", "h264_mp4toannexb"), ("hevc_b", "hevc_mp4toannexb")])
def test_packets_hold_the_nal_units_of_ffmpegs_own_filter(clips: dict[str, Path], name: str, filter_name: str) -> None:
    _, packets = read(clips[name])
    with av.open(str(clips[name])) as container:
        stream = container.streams.video[0]
        ours = iter(packets)
        context = av.bitstream.BitStreamFilterContext(filter_name, stream)
        for packet in container.demux(stream):
            if packet.size:
                keyframe = packet.is_keyframe
                (theirs,) = context.filter(packet)
                mine = units(next(ours).data)
                # The filter repeats parameter sets in front of IDR pictures only, we do at every keyframe.
                assert mine[-len(units(bytes(theirs))) :] == units(bytes(theirs)) or keyframe
                assert [unit for unit in units(bytes(theirs)) if unit not in mine] == []


@pytest.mark.parametrize("name", [*H264, "hevc", "hevc_b"])
def test_every_keyframe_carries_parameter_sets_and_starts_decoding(clips: dict[str, Path], name: str) -> None:
    header, packets = read(clips[name])
    for packet in packets:
        assert bool(parameter_sets(header.codec, packet.data)[1]) == packet.keyframe
        assert starts_decoding(header.codec, packet.data) == packet.keyframe
    assert sum(packet.keyframe for packet in packets) >= 3


@pytest.mark.parametrize("name", H264)
def test_a_whole_stream_has_no_lost_reference(clips: dict[str, Path], name: str) -> None:
    header, packets = read(clips[name])
    numbers = H264FrameNumbers(header.extradata)
    assert not any(numbers.inspect(packet.data).lost for packet in packets)


@pytest.mark.parametrize("name", ["plain", "b_frames", "open_gop", "slices"])
def test_each_lost_reference_shows_in_the_next_picture_and_no_other_loss_does(
    clips: dict[str, Path], name: str
) -> None:
    header, packets = read(clips[name])
    numbers = H264FrameNumbers(header.extradata)
    references = [numbers.inspect(packet.data).reference for packet in packets]
    assert all(references) == (name in ("plain", "slices"))
    for missing in range(1, len(packets) - 1):
        if packets[missing].keyframe or packets[missing + 1].keyframe:
            continue
        numbers = H264FrameNumbers(header.extradata)
        lost = [numbers.inspect(packet.data).lost for packet in packets[:missing] + packets[missing + 1 :]]
        assert lost[missing] == references[missing]
        assert sum(lost) == lost[missing]


def test_configuration_cut_short_is_refused() -> None:
    record = bytes([1, 100, 0, 31, 255, 225, 0, 9, 103])
    with pytest.raises(ValueError, match="is truncated"):
        configuration("h264", record)


def test_annexb_configuration_passes_unchanged() -> None:
    sets = START_CODE + b"\x67\x42\x00"
    assert configuration("h264", sets) == configuration("vp9", sets)
    assert configuration("h264", sets).parameter_sets == sets


def test_length_prefixes_become_start_codes() -> None:
    assert to_annexb(b"\0\2ab\0\1c", 2) == START_CODE + b"ab" + START_CODE + b"c"
    with pytest.raises(ValueError, match="longer than its packet"):
        to_annexb(b"\0\5ab", 2)


@settings(deadline=None, max_examples=200)
@given(data=st.binary(max_size=200), codec=st.sampled_from(["h264", "hevc"]), noise=st.binary(max_size=60))
def test_no_bytes_confuse_the_parsers(data: bytes, codec: str, noise: bytes) -> None:
    numbers = H264FrameNumbers()
    for packet in (data, START_CODE + b"\x67" + data, START_CODE + b"\x06" + data, START_CODE + b"\x41" + noise):
        numbers.inspect(packet)
        starts_decoding(codec, packet)
        parameter_sets(codec, packet)
    for attempt in (lambda: configuration(codec, data), lambda: to_annexb(data, 4)):
        with contextlib.suppress(ValueError):
            attempt()
