"""Slice headers against FFmpeg's own parser (its trace_headers filter) and against quantisers fixed by construction."""

import re
from pathlib import Path
from typing import Any

import av
import av.logging
import pytest
from codec_clips import encode, read, walk
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.codec.nal import START_CODE, CodedPicture
from cluster.codec.slice_header import SliceHeaders

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "h264": ("libx264", {}),
    "h264-b": ("libx264", {"b_frames": 3, "options": {"preset": "slow", "x264-params": "weightp=2:ref=5"}}),
    "h264-cavlc": ("libx264", {"options": {"preset": "ultrafast"}}),
    "h264-fields": ("libx264", {"options": {"x264-params": "interlaced=1"}}),
    "h264-slices": ("libx264", {"options": {"x264-params": "slices=4:intra-refresh=1"}}),
    "hevc": ("libx265", {}),
    "hevc-b": ("libx265", {"b_frames": 3, "options": {"preset": "slow", "x265-params": "log-level=error:weightb=1"}}),
    "hevc-open": ("libx265", {"b_frames": 2, "options": {"x265-params": "log-level=error:open-gop=1"}}),
}
TYPES = {"h264": "PBIPI", "hevc": "BPI"}


def flash(frames: int) -> list[Any]:
    """The walk while the light goes down and up, which makes encoders weight their predictions."""
    return [
        (picture * (0.5 + 0.5 * abs(index % 20 - 10) / 10)).astype("uint8")
        for index, picture in enumerate(walk(frames))
    ]


def traced(path: Path) -> list[tuple[int, int]]:
    """``slice_type`` and quantiser of every packet's first slice, as FFmpeg reads them."""
    before = av.logging.get_level()
    av.logging.set_level(av.logging.INFO)
    try:
        with av.open(str(path)) as container, av.logging.Capture(True) as logs:
            stream = container.streams.video[0]
            tracer = av.bitstream.BitStreamFilterContext("trace_headers", stream)
            for packet in container.demux(stream):
                if packet.size:
                    logs.append((0, "", "PACKET\n"))
                    tracer.filter(packet)
    finally:
        av.logging.set_level(before)
    head, *packets = "\n".join(text for _, _, text in logs).split("PACKET")
    initial, found = _field("init_qp_minus26", head), []
    for text in packets:
        if "init_qp_minus26" in text:
            initial = _field("init_qp_minus26", text)
        found.append((_field("slice_type", text), 26 + initial + _field("slice_qp_delta", text)))
    return found


def _field(name: str, text: str) -> int:
    match = re.search(rf"{name}\s+\S+ = (-?\d+)", text)
    assert match is not None, name
    return int(match[1])


@pytest.mark.parametrize("name", KINDS)
def test_types_and_quantisers_are_those_that_ffmpeg_reads(tmp_path: Path, name: str) -> None:
    encoder, kind = KINDS[name]
    clip = encode(tmp_path / "clip.mp4", flash(50), encoder, **kind)
    header, packets = read(clip)
    headers = SliceHeaders(header.codec, header.extradata)
    ours = [headers.read(packet.data) for packet in packets]
    theirs = traced(clip)
    assert [(each.kind, each.qp) for each in ours if each] == [
        (TYPES[header.codec][code % 5], qp) for code, qp in theirs
    ]
    assert len({qp for _, qp in theirs}) > 1


@pytest.mark.parametrize(("encoder", "params"), [("libx264", "x264-params"), ("libx265", "x265-params")])
@pytest.mark.parametrize("qp", [12, 33])
def test_a_fixed_quantiser_is_read(tmp_path: Path, encoder: str, params: str, qp: int) -> None:
    options = {params: f"qp={qp}:ipratio=1:pbratio=1" + (":log-level=error" if encoder == "libx265" else "")}
    header, packets = read(encode(tmp_path / "clip.mp4", walk(30), encoder, b_frames=2, options=options))
    headers = SliceHeaders(header.codec, header.extradata)
    assert {headers.read(packet.data).qp for packet in packets} == {qp}  # type: ignore[union-attr]


def test_reference_pictures_and_others_are_told_apart(clips: dict[str, Path]) -> None:
    for name, expected in [("plain", {True}), ("b_frames", {True, False}), ("hevc", {True}), ("hevc_b", {True, False})]:
        header, packets = read(clips[name])
        headers = SliceHeaders(header.codec, header.extradata)
        assert {headers.read(packet.data).reference for packet in packets} == expected  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["b_frames", "hevc_b"])
def test_without_parameter_sets_nothing_is_read(clips: dict[str, Path], name: str) -> None:
    header, packets = read(clips[name])
    headers = SliceHeaders(header.codec)
    assert [headers.read(packet.data) for packet in packets[1:5]] == [None] * 4
    assert headers.read(packets[0].data) is not None


@pytest.mark.parametrize("name", ["b_frames", "hevc_b"])
def test_a_header_cut_anywhere_gives_none_or_itself(clips: dict[str, Path], name: str) -> None:
    header, packets = read(clips[name])
    packet = packets[5].data
    whole = SliceHeaders(header.codec, header.extradata).read(packet)
    for length in range(1, min(len(packet), 40)):
        assert SliceHeaders(header.codec, header.extradata).read(packet[:length]) in (None, whole)


@settings(deadline=None, max_examples=150)
@given(
    data=st.binary(max_size=120),
    codec=st.sampled_from(["h264", "hevc"]),
    kinds=st.lists(st.integers(0, 255), min_size=1, max_size=6),
)
def test_no_bytes_confuse_it(data: bytes, codec: str, kinds: list[int]) -> None:
    headers = SliceHeaders(codec, data)
    for kind in kinds:
        found = headers.read(START_CODE + bytes([kind, 1]) + data)
        assert found is None or isinstance(found, CodedPicture)


@pytest.mark.parametrize("name", ["b_frames", "hevc_b"])
@settings(deadline=None, max_examples=60)
@given(at=st.integers(5, 120), value=st.integers(0, 255))
def test_damaged_parameter_sets_are_survived(clips: dict[str, Path], name: str, at: int, value: int) -> None:
    header, packets = read(clips[name])
    sets = bytearray(header.extradata)
    sets[at % len(sets)] = value
    headers = SliceHeaders(header.codec, bytes(sets))
    for packet in packets[1:4]:
        headers.read(packet.data)
