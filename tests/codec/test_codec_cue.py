"""What change is judged by follows from what the decoder gives, never from the codec's name."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from av.video.codeccontext import VideoCodecContext
from codec_clips import FPS, GEOMETRY, encode, process, read, walk
from hostile_video import H264Writer

from cluster.codec import StreamHeader
from cluster.codec.stream_state import ChangeAccumulator
from cluster.types import MICROSECONDS, ChangeGrid, EncodedPacket

WIDTH, HEIGHT = 256, 128


def accumulate(path: Path, every: int, *, export: bool, threads: int) -> list[ChangeGrid]:
    """The pictures of a clip as another decoder gives them, a span closed at every ``every``-th."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = threads
        if export:
            stream.codec_context.options = {"flags2": "+export_mvs"}
        width, height = stream.codec_context.width, stream.codec_context.height
        grid = GEOMETRY.grid(width, height)
        change = ChangeAccumulator(width, height, grid)
        spans = []
        for index, frame in enumerate(container.decode(stream)):
            change.add_picture(frame, 1.0, 1.0)
            if index % every == every - 1:
                luma = frame.reformat(grid.width, grid.height, "gray").to_ndarray()
                spans.append(change.pop_change(luma))
        return spans


@pytest.mark.parametrize("threads", [1, 2])
def test_h264_of_a_decoder_that_exports_no_vectors_is_not_all_new(tmp_path: Path, threads: int) -> None:
    path = encode(tmp_path / "walk.mp4", walk(40), gop=20)
    spans = accumulate(path, 4, export=False, threads=threads)
    assert [span.cue for span in spans] == ["luma"] * 10
    for span in spans:
        assert span.intra.max() == span.max_motion.max() == span.net_motion.max() == 0.0
    # The square that walks is seen all the same, and the scene around it is still.
    assert all(span.luma.max() > 10 > 4 > np.median(span.luma) for span in spans[1:])


def test_h264_of_a_decoder_that_exports_them_has_them_from_the_first_span_on(tmp_path: Path) -> None:
    path = encode(tmp_path / "walk.mp4", walk(40), gop=20)
    spans = accumulate(path, 4, export=True, threads=1)
    assert [span.cue for span in spans] == ["vectors+luma"] * 10
    assert all(span.max_motion.max() > 2 for span in spans)
    assert all(span.intra.mean() < 0.2 for span in spans)


def test_a_camera_of_i_frames_alone_is_judged_by_luma(tmp_path: Path) -> None:
    path = encode(tmp_path / "intra.mp4", walk(20), gop=1)
    _, samples = process(*read(path), fps=5)
    assert {sample.change.cue for sample in samples} == {"luma"}
    assert all(sample.change.intra.max() == 0.0 for sample in samples)


def shown(kinds: str, fps: float) -> list[ChangeGrid]:
    """A key picture, then: ``s`` one that repeats it, ``n`` a P picture in which every block is intra, ``i`` a key."""
    writer = H264Writer(WIDTH, HEIGHT, 1)
    pictures, number = [writer.key()], 0
    for kind in kinds:
        number = 0 if kind == "i" else number + 1
        pictures.append(
            writer.key() if kind == "i" else writer.skipped(number) if kind == "s" else writer.all_new(number)
        )
    frame = MICROSECONDS // FPS
    packets = [
        EncodedPacket("h264", data, index * frame, index * frame, index == 0 or kinds[index - 1] == "i", index)
        for index, data in enumerate(pictures)
    ]
    processor, samples = process(StreamHeader("h264", WIDTH, HEIGHT, b""), packets, fps=fps)
    assert processor.stats.decode_errors == processor.stats.resyncs["corrupt"] == 0
    return [sample.change for sample in samples[1:]]


def test_one_picture_that_is_all_intra_is_all_new_where_others_have_vectors() -> None:
    # Four pictures a sample: within a span, and alone in a sample that follows one with vectors.
    assert [(change.cue, change.intra.mean()) for change in shown("ssns", 5)] == [("vectors+luma", 1.0)]
    cut = shown("sssnss", FPS)
    assert [change.cue for change in cut] == ["vectors+luma"] * 6
    assert [change.intra.mean() for change in cut] == [0, 0, 0, 1, 0, 0]


def test_key_pictures_between_them_decide_nothing() -> None:
    cut = shown("ssins", FPS)
    assert [change.cue for change in cut] == ["vectors+luma"] * 5
    assert [change.intra.mean() for change in cut] == [0, 0, 0, 1, 0]


def test_a_camera_whose_p_pictures_are_all_intra_is_judged_by_luma() -> None:
    for change in shown("n" * 12, 5):
        assert change.cue == "luma"
        assert change.intra.max() == 0.0


def test_vectors_that_come_late_are_taken_when_they_come() -> None:
    assert [change.cue for change in shown("n" * 4 + "s" * 8, 5)] == ["luma", "vectors+luma", "vectors+luma"]


def test_mpeg2_has_vectors_which_nobody_has_to_name() -> None:
    context = av.CodecContext.create("mpeg2video", "w")
    assert isinstance(context, VideoCodecContext)
    context.width, context.height, context.pix_fmt, context.time_base = 192, 128, "yuv420p", Fraction(1, 25)
    context.framerate, context.gop_size = Fraction(25), 12
    packets = []
    for index, luma in enumerate(walk(16)):
        frame = av.VideoFrame.from_ndarray(np.vstack([luma, np.full((64, 192), 128, np.uint8)]), "yuv420p")
        frame.pts = index
        packets += context.encode(frame)
    packets += context.encode(None)
    given = [
        EncodedPacket("mpeg2video", bytes(packet), index * 40_000, index * 40_000, packet.is_keyframe, index)
        for index, packet in enumerate(packets)
    ]
    processor, samples = process(StreamHeader("mpeg2video", 192, 128, b""), given, fps=5)
    assert processor.stats.cue == "vectors+luma"
    assert samples[1].change.max_motion.max() > 2
