"""Clips: what a player shows of them, as they were sent, encoded anew, masked, and cut off at any part."""

import io
import struct
from dataclasses import replace
from fractions import Fraction

import av
import numpy as np
import pytest
from footage_parts import FPS, HEIGHT, STEP, WIDTH, level, luma, played, video
from PIL import Image

from cluster.codec.privacy import PrivacyMasks
from cluster.decoder.footage.clip import clip_writer
from cluster.decoder.footage.pictures import still
from cluster.decoder.footage.ring import PacketRing, RingBudget
from cluster.errors import SourceError
from cluster.types import MICROSECONDS

S = MICROSECONDS


def placed(header, packets, start=0, until=100 * S):
    ring = PacketRing(100.0, 1 << 26, RingBudget(1 << 30))
    ring.open(header)
    for packet in packets:
        ring.add_packet(packet)
    recording = ring.record(start, until)
    return recording, recording.pop_packets(10_000)


def parts_of(recording, packets, **options):
    """The file in the parts in which it leaves, and what it shows."""
    writer = clip_writer(recording.segment, recording.start, **{"painter": None, "height": 720} | options)
    parts = [writer.feed(packets[at : at + 10]) for at in range(0, len(packets), 10)]
    return [part for part in [*parts, writer.close()] if part], writer


def boxes(data):
    at, found = 0, []
    while at < len(data):
        size, name = struct.unpack(">I4s", data[at : at + 8])
        found.append(name.decode())
        at += size
    assert at == len(data), "a box is cut off"
    return found


def test_h264_leaves_as_it_came(h264):
    recording, packets = placed(*h264, start=round(3.4 * S), until=6 * S)
    parts, writer = parts_of(recording, packets)
    shown = played(b"".join(parts))
    assert [grey for _, grey in shown] == [pytest.approx(level(i), abs=2) for i in range(60, 120)]
    assert [at for at, _ in shown] == pytest.approx([i / FPS for i in range(60)], abs=0.001)
    assert writer.span == (3 * S, 6 * S - STEP)
    # Not one picture is encoded anew: the very bytes are in it, but for how they are framed.
    body = packets[30].packet.data
    assert body[body.rindex(b"\0\0\1") + 3 :] in b"".join(parts)


def test_b_pictures_are_shown_in_their_order(h264_b):
    recording, packets = placed(*h264_b)
    shown = played(b"".join(parts_of(recording, packets)[0]))
    assert len(shown) == 200
    assert [grey for _, grey in shown] == [pytest.approx(level(i), abs=3) for i in range(200)]


@pytest.mark.parametrize("fps", [FPS, 5])
@pytest.mark.parametrize("guess", [None, 0, 1])
@pytest.mark.parametrize("b_frames", [2, 3])
def test_b_pictures_without_proper_decoding_times(b_frames, guess, fps):
    """Without any, and with those that FFmpeg guesses for RTSP where it takes the reordering for less than it is."""
    header, packets = video(200, b_frames=b_frames)
    untimed, latest = [], []
    for packet in packets:
        pts = packet.pts * FPS // fps
        latest = sorted([*latest, pts])[-1 - (guess or 0) :]
        untimed.append(replace(packet, pts=pts, dts=None if guess is None else latest[0]))
    recording, packets = placed(header, untimed)
    shown = played(b"".join(parts_of(recording, packets)[0]))
    assert [grey for _, grey in shown] == [pytest.approx(level(i), abs=3) for i in range(200)]
    steps = np.diff([at for at, _ in shown])
    assert steps == pytest.approx(1 / fps, abs=0.002)


def test_every_part_may_be_the_last(h264):
    """A decoder that dies leaves what has left: whole parts, all of which play."""
    parts, _ = parts_of(*placed(*h264))
    assert boxes(parts[0])[:2] == ["ftyp", "moov"]
    assert len(parts) > 5
    before = 0
    for end in range(2, len(parts) + 1):
        data = b"".join(parts[:end])
        boxes(data)
        shown = len(played(data))
        assert shown >= before
        before = shown
    assert before == 200


@pytest.mark.parametrize("codec", ["libx265", "mjpeg"])
def test_what_browsers_do_not_play_is_encoded_anew(codec):
    header, packets = video(60, codec)
    recording, packets = placed(header, packets, start=round(0.5 * S), until=round(2.5 * S))
    parts, writer = parts_of(recording, packets, height=32)
    data = b"".join(parts)
    shown = played(data)
    # Exactly from where it should begin, since the pictures before it need not be shown.
    assert writer.span == (round(0.5 * S), round(2.45 * S))
    assert [grey for _, grey in shown] == [pytest.approx(level(i), abs=6) for i in range(10, 50)]
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.width, stream.height) == ("h264", WIDTH // 2, HEIGHT // 2)


def test_pictures_that_came_in_a_burst_are_shown_as_far_as_a_player_can_tell_them_apart():
    """As those of an MJPEG camera whose times are those of their arrival: 0.4 ms apart, in a clock of milliseconds."""
    header, packets = video(8, "mjpeg")
    times = [round(each * S) for each in (0, 0.05, 0.1, 0.1004, 0.1008, 0.1012, 0.15, 0.2)]
    burst = [replace(packet, pts=time, dts=time) for packet, time in zip(packets, times, strict=True)]
    shown = played(b"".join(parts_of(*placed(header, burst))[0]))
    assert [at for at, _ in shown] == pytest.approx([0, 0.05, 0.1, 0.101, 0.15, 0.2], abs=0.0005)
    assert [grey for _, grey in shown] == [pytest.approx(level(i), abs=6) for i in (0, 1, 2, 5, 6, 7)]


def test_masks_are_in_every_picture(h264):
    recording, packets = placed(*h264, until=2 * S)
    masks = PrivacyMasks([((0.0, 0.0), (0.5, 0.0), (0.5, 1.0), (0.0, 1.0))])
    parts, _ = parts_of(recording, packets, painter=masks.apply)
    with av.open(io.BytesIO(b"".join(parts))) as container:
        pictures = [luma(frame) for frame in container.decode(video=0)]
    assert len(pictures) == 40
    for index, picture in enumerate(pictures):
        # Encoding smears a little over the mask's edge; what lies inside is black.
        assert picture[:, : WIDTH // 2 - 8].max() < 24
        assert picture[:, WIDTH // 2 + 8 :].mean() == pytest.approx(level(index), abs=6)


def test_a_clip_that_is_encoded_anew_tells_its_colours():
    header, packets = video(20, x264=":colormatrix=bt709:colorprim=bt709:transfer=bt709:fullrange=on")
    parts, _ = parts_of(*placed(header, packets, until=S), painter=lambda frame: frame)
    with av.open(io.BytesIO(b"".join(parts))) as container:
        context = container.streams.video[0].codec_context
        found = context.colorspace, context.color_primaries, context.color_trc, context.color_range
        first = next(container.decode(video=0))
    # The matrix is the camera's; black and white are those of other videos.
    assert found == (1, 1, 1, 1)
    assert first.to_ndarray(format="gray")[8, 8] == pytest.approx(level(0), abs=6)


@pytest.mark.parametrize(("aspect", "painter"), [("16/11", None), ("16/11", lambda frame: frame), ("1/1", lambda f: f)])
def test_clips_and_stills_have_the_shape_that_the_stream_tells(aspect, painter):
    """Pixels that are wider than high, as of analogue cameras: in what is encoded anew too, as with a mask."""
    header, packets = video(20, x264="" if aspect == "1/1" else f":sar={aspect}")
    recording, taken = placed(header, packets, until=S)
    parts, _ = parts_of(recording, taken, painter=painter)
    with av.open(io.BytesIO(b"".join(parts))) as container:
        assert (container.streams.video[0].sample_aspect_ratio or 1) == Fraction(aspect)
    with Image.open(io.BytesIO(still(taken, 0, painter))) as picture:
        assert picture.size == (round(WIDTH * Fraction(aspect)), HEIGHT)


def test_a_mask_that_cannot_be_applied_makes_no_clip(h264):
    def refuse(frame):
        raise ValueError("upside down")

    recording, packets = placed(*h264)
    writer = clip_writer(recording.segment, 0, painter=refuse, height=720)
    with pytest.raises(SourceError, match="cannot be re-encoded"):
        writer.feed(packets)


def test_damage_costs_its_pictures_only():
    header, packets = video(60, "libx265")
    packets[25] = replace(packets[25], data=packets[25].data[:12] + bytes(40))
    parts, _ = parts_of(*placed(header, packets))
    assert 30 <= len(played(b"".join(parts))) < 60


def test_a_size_nobody_told_is_read_from_the_picture(h264):
    header, packets = h264
    parts, _ = parts_of(*placed(replace(header, width=0, height=0), packets))
    with av.open(io.BytesIO(b"".join(parts))) as container:
        assert (container.streams.video[0].width, container.streams.video[0].height) == (WIDTH, HEIGHT)


def test_h264_that_is_none_is_refused_in_a_sentence(h264):
    header, packets = h264
    broken = [replace(p, data=bytes(100)) for p in packets[:30]]
    recording, packets = placed(replace(header, width=0, height=0), broken)
    with pytest.raises(SourceError, match="cannot be decoded"):
        parts_of(recording, packets)
