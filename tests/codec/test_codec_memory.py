"""What decoders may hold: bounded before anything is decoded, told in a sentence, and given back."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import hostile_video
import pytest
from codec_clips import FPS, GEOMETRY, encode, read, renumber, walk
from decoder_bombs import X265, encoded
from hostile_video import H264Writer
from waiting import until

from cluster.codec import CameraState, FileSource, PushSource, StreamHeader
from cluster.codec.decoder import Decoder, PicturesTooLargeError
from cluster.codec.nal import sequences
from cluster.codec.processor import CodecOptions, CodecProcessor
from cluster.decoder.pipeline import CameraPipeline, PipelineSettings
from cluster.types import MICROSECONDS, EncodedPacket, SampledPicture

FRAME = MICROSECONDS // FPS


def packets(datas: list[bytes], codec: str = "h264", keyframes: tuple[int, ...] = (0,)) -> list[EncodedPacket]:
    return [
        EncodedPacket(codec, data, index * FRAME, index * FRAME, index in keyframes, index)
        for index, data in enumerate(datas)
    ]


def feed(processor: CodecProcessor, given: list[EncodedPacket]) -> list[SampledPicture]:
    return [sample for packet in given for sample in processor.feed(packet)]


def opened(decoded_bytes: int, codec: str = "h264", extradata: bytes = b"") -> CodecProcessor:
    processor = CodecProcessor(GEOMETRY, CodecOptions(fps=FPS, decoded_bytes=decoded_bytes))
    processor.open(StreamHeader(codec, 0, 0, extradata))
    return processor


# -- what parameter sets ask for ----------------------------------------------------------------
@pytest.mark.parametrize(
    ("encoder", "size", "form", "options", "expected"),
    [
        ("libx264", (192, 128), "yuv420p", {"x264-params": "ref=3:bframes=0"}, (192, 128, 1, 8, 3)),
        ("libx264", (320, 180), "yuv420p", {"x264-params": "ref=5:bframes=0"}, (320, 192, 1, 8, 5)),
        ("libx264", (192, 128), "yuv444p10le", {"x264-params": "ref=2:bframes=0"}, (192, 128, 3, 10, 2)),
        ("libx264", (320, 180), "yuv422p", {"x264-params": "ref=4:bframes=0:interlaced=1"}, (320, 192, 2, 8, 4)),
        ("libx265", (192, 128), "yuv420p", {"x265-params": "log-level=error:ref=3:bframes=0"}, (192, 128, 1, 8, 3)),
        (
            "libx265",
            (320, 180),
            "yuv422p10le",
            {"x265-params": "log-level=error:ref=5:bframes=0"},
            (320, 184, 2, 10, 5),
        ),
    ],
)
def test_parameter_sets_tell_what_the_encoder_was_told(
    encoder: str, size: tuple[int, int], form: str, options: dict[str, str], expected: tuple[int, ...]
) -> None:
    codec = "h264" if encoder == "libx264" else "hevc"
    first = encoded(encoder, *size, 2, form, preset="medium", **options)[0]
    (found,) = sequences(codec, first)
    assert (found.width, found.height, found.chroma, found.depth, found.references) == expected
    samples = {1: Fraction(3, 2), 2: Fraction(2), 3: Fraction(3)}[expected[2]]
    assert (found.samples_per_pixel, found.pictures) == (samples, expected[4] + 2)


def test_parameter_sets_are_found_wherever_they_stand() -> None:
    one, other = H264Writer(64, 48, 1), H264Writer(128, 96, 4)
    found = list(sequences("h264", one.key() + other.parameter_sets(3) + one.parameter_sets(5)))
    assert [(each.width, each.height, each.references) for each in found] == [(64, 48, 1), (128, 96, 4), (64, 48, 1)]
    assert list(sequences("mjpeg", one.key())) == []


# -- the bound ----------------------------------------------------------------------------------
def test_a_stream_is_decoded_with_what_it_takes_and_refused_with_a_byte_less() -> None:
    # 4 references, one in decoding and one shown, of 320 x 192 pixels with 2.25 bytes each.
    takes = 6 * 320 * 192 * 9 // 4
    video = packets(list(hostile_video.many_references(320, 192, 4)))
    enough, less = opened(takes), opened(takes - 1)
    assert len(feed(enough, video)) == len(video)
    assert enough.stats.refusal == ""
    assert feed(less, video) == []
    assert less.stats.frames_decoded == less.stats.decode_errors == 0
    assert less.stats.resyncs == {"too_large": 1}
    assert "320 x 192 with 4 references" in less.stats.refusal
    assert "source_options.decoded_bytes" in less.stats.refusal


def test_a_camera_that_asks_for_less_again_is_decoded_again() -> None:
    small, large = H264Writer(320, 192, 1), H264Writer(1920, 1088, 16)
    video = packets(
        [small.key(), small.skipped(1), large.key(), large.skipped(1), large.key(), small.key(), small.skipped(1)],
        keyframes=(0, 2, 4, 5),
    )
    processor = opened(8 * 2**20)
    assert len(feed(processor, video[:5])) == 2
    assert "1920 x 1088 with 16 references" in processor.stats.refusal
    after = feed(processor, video[5:])
    told = [(sample.fresh, sample.gap, sample.anchor) for sample in after]
    assert told == [(False, True, True), (False, False, False)]
    assert processor.stats.refusal == ""
    assert processor.stats.resyncs == {"too_large": 2}


def test_a_parameter_set_anywhere_in_mid_stream_is_looked_at() -> None:
    small, large = H264Writer(320, 192, 1), H264Writer(8192, 8192, 16)
    video = packets([small.key(), small.skipped(1) + large.parameter_sets(7, 7), small.skipped(2)])
    processor = opened(8 * 2**20)
    assert len(feed(processor, video)) == 1
    assert "8192 x 8192" in processor.stats.refusal


def test_what_the_header_asks_for_counts_until_the_stream_asks_for_something_else() -> None:
    small, large = H264Writer(320, 192, 1), H264Writer(8192, 8192, 16)
    processor = opened(8 * 2**20, extradata=large.parameter_sets())
    sets = small.parameter_sets()
    bare = small.key()[len(sets) :]
    assert feed(processor, packets([bare])) == []
    assert "8192 x 8192" in processor.stats.refusal
    again = [replace(packet, sequence=packet.sequence + 1) for packet in packets([small.key(), small.skipped(1)])]
    assert len(feed(processor, again)) == 2


def test_pictures_held_back_are_counted_which_no_parameter_set_tells() -> None:
    video = packets(list(hostile_video.late_pictures(320, 192)))
    # With one reference declared FFmpeg comes to hold 17.
    held = 320 * 192 * 9 // 4
    enough = opened(18 * held)
    feed(enough, video)
    assert enough.stats.refusal == ""
    assert enough.stats.frames_decoded > 30
    processor = opened(10 * held)
    feed(processor, video)
    assert "11 pictures at a time" in processor.stats.refusal


def test_references_that_hevc_slices_hold_beyond_the_declared_are_counted() -> None:
    pictures = encoded("libx265", 320, 192, 24, preset="ultrafast", **{"x265-params": X265})
    honest, video = packets(pictures, "hevc"), packets([hostile_video.one_declared(pictures[0]), *pictures[1:]], "hevc")
    held = 320 * 192 * 9 // 4
    assert len(feed(opened(17 * held, "hevc"), honest)) == 24
    assert len(feed(opened(17 * held, "hevc"), video)) == 24
    processor = opened(10 * held, "hevc")
    assert len(feed(processor, video)) == 10
    assert "11 pictures at a time" in processor.stats.refusal


@pytest.mark.parametrize(
    ("codec", "encoder", "form"),
    [("av1", "libsvtav1", "yuv420p"), ("vp9", "libvpx-vp9", "yuv420p"), ("mjpeg", "mjpeg", "yuvj420p")],
)
def test_other_codecs_are_bounded_by_the_size_of_a_picture(codec: str, encoder: str, form: str) -> None:
    options = {"preset": "12", "svtav1-params": "lp=1"} if codec == "av1" else {}
    video = packets(encoded(encoder, 320, 192, 3, form, **options), codec)
    slots = {"av1": 10, "vp9": 10, "mjpeg": 8}[codec]
    takes = slots * 320 * 192 * 7 // 4
    enough, less = opened(2 * takes, codec), opened(takes // 2, codec)
    assert len(feed(enough, video) + enough.drain()) == 3
    assert feed(less, video) == []
    assert f"its {codec} pictures have more than 0.0 megapixels" in less.stats.refusal


def test_ten_bits_a_sample_are_seen_at_the_first_picture() -> None:
    video = packets(
        encoded("libsvtav1", 320, 192, 4, "yuv420p10le", preset="12", **{"svtav1-params": "lp=1"}), "av1", (0,)
    )
    processor = opened(10 * 320 * 192 * 2, "av1")
    assert len(feed(processor, video)) == 1
    assert "av1 video of 320 x 192 with 10 pictures at a time" in processor.stats.refusal


def test_a_refused_decoder_holds_nothing() -> None:
    decoder = Decoder("h264", b"", 10 * 320 * 192 * 9 // 4)
    late = list(enumerate(hostile_video.late_pictures(320, 192)))
    with pytest.raises(PicturesTooLargeError):
        all(decoder.decode(data, index, index) is not None for index, data in late)
    memory = decoder._memory
    assert len(memory.live) == 10
    del decoder
    assert len(memory.live) == 0


def test_pictures_that_are_shown_are_no_longer_the_decoders() -> None:
    # 4 references, one in decoding and one shown: samples of all pictures are kept, and copies of them.
    processor = opened(6 * 320 * 192 * 9 // 4)
    kept = feed(processor, packets(list(hostile_video.many_references(320, 192, 4))))
    assert len(kept) == 40
    assert processor.stats.refusal == ""


# -- what an operator sees ----------------------------------------------------------------------
def test_a_refused_camera_says_why_and_runs_again_when_it_asks_for_less() -> None:
    small, large = H264Writer(320, 192, 1), H264Writer(1920, 1088, 16)
    source, sent = PushSource(), []
    settings = PipelineSettings(fps=FPS, decoded_bytes=8 * 2**20)
    pipeline = CameraPipeline("gate", source, GEOMETRY, settings, lambda frame, _cut: sent.append(frame))
    source.begin_session(StreamHeader("h264", 0, 0, b""), "session")
    pipeline.start()
    video = packets([large.key(), large.skipped(1), small.key(), small.skipped(1)], keyframes=(0, 2))
    try:
        source.offer(video[:2])
        until(lambda: pipeline.status().state is CameraState.ERROR)
        assert "1920 x 1088 with 16 references" in pipeline.status().reason
        source.offer(video[2:])
        until(lambda: pipeline.status().stats.frames_decoded == 2)
        assert (pipeline.status().state, pipeline.status().reason) == (CameraState.RUNNING, "")
    finally:
        assert pipeline.stop()
    assert sent


def test_a_file_that_is_refused_has_failed(tmp_path: Path) -> None:
    path = tmp_path / "large.h264"
    path.write_bytes(b"".join(hostile_video.many_references(1920, 1088, 16, 3)))
    settings = PipelineSettings(decoded_bytes=2**23)
    pipeline = CameraPipeline("gate", FileSource(path), GEOMETRY, settings, lambda *_: None)
    pipeline.start()
    until(lambda: not pipeline.running)
    assert pipeline.status().state is CameraState.ERROR
    assert "1920 x 1088 with 16 references" in pipeline.status().reason


def test_pictures_too_large_to_probe_are_opened_and_decoded(tmp_path: Path) -> None:
    path = tmp_path / "large.ts"
    encode(path, walk(3, 2560, 1632))
    header, video = read(path)
    assert (header.codec, header.width, header.height) == ("h264", 2560, 1632)
    processor = opened(192 * 2**20)
    assert len(feed(processor, renumber(video)) + processor.drain()) == 3
