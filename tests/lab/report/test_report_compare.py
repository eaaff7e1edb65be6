"""The report's measurement: with nothing pruned and everything refreshed, ours is full computation."""

from dataclasses import replace

import pytest

from cluster.codec.processor import CodecOptions
from cluster.engine.native.engine import NativeEngine
from cluster.errors import SourceError
from cluster.lab.bench.frames import prune_clip, read_clip
from cluster.lab.report.compare import answer_in_full, compare, count_windows, picture_frames
from cluster.lab.scenes.street_clips import make_clip
from cluster.models.loading import load_model
from cluster.types import MICROSECONDS, Question, StreamSpec, WindowRequest

QUESTIONS = (Question("person", "Is anyone there?"), Question("car", "Is there a car?"))
SPEC = StreamSpec("street", QUESTIONS, window_s=6, stride_s=2)


@pytest.fixture(scope="module")
def engine():
    return NativeEngine(load_model("tiny-qwen2_5_vl"))


@pytest.fixture(scope="module")
def clip(engine, tmp_path_factory):
    path = tmp_path_factory.mktemp("clips") / "street.mp4"
    make_clip("street", path, seconds=8, fps=10, size=(256, 144))
    return read_clip(path, engine.geometry, options=CodecOptions(anchor_interval_s=4), at_least=10, at_most=10)


def test_a_clip_is_looped_until_there_is_enough(clip):
    assert (clip.stats.codec, clip.stats.width, clip.stats.height, clip.stats.cue) == ("h264", 256, 144, "vectors+luma")
    pts = [frame.pts for frame in clip.frames]
    assert pts == sorted(set(pts))
    assert pts[-1] - pts[0] == 9.5 * MICROSECONDS


def test_nothing_pruned_and_all_refreshed_is_full_computation(engine, clip):
    whole = prune_clip(clip, "street", "none").samples
    spec = StreamSpec("street", QUESTIONS, window_s=6, stride_s=2, refresh="all", static_gate=False)
    found = compare(engine, spec, whole, whole)
    assert len(found) == count_windows(spec, 10) == 2
    for window in found:
        assert window.our_scores == pytest.approx(window.full_scores, abs=1e-5)
        assert window.ours.tokens == window.full.tokens
        assert window.full_scores.keys() == {"person", "car"}
    assert [window.end_s for window in found] == [8.0, 10.0]
    # Full means full: the tower runs again for every window.
    assert found[-1].full.flops > found[-1].ours.flops > 0


def test_ours_computes_less_and_full_does_not_depend_on_ours(engine, clip):
    whole = prune_clip(clip, "street", "none").samples
    pruned = prune_clip(clip, "street", "replenish").samples
    calls = []
    ours = compare(engine, SPEC, pruned, whole, lambda: calls.append(1))
    again = compare(engine, StreamSpec("street", QUESTIONS, 6, 2, refresh="none"), pruned, whole)
    assert len(calls) == len(ours) == 2
    for first, second in zip(ours, again, strict=True):
        assert first.full_scores == pytest.approx(second.full_scores, abs=1e-6)
        assert first.full.tokens == second.full.tokens
        assert second.ours.tokens <= first.ours.tokens < first.full.tokens
    assert engine.memory_bytes() == 0


@pytest.mark.parametrize(("stride_s", "start_s", "late_us"), [(4, 2, 0), (3, 3, 200_000)])
def test_a_full_window_has_all_its_frames(engine, clip, stride_s, start_s, late_us):
    """Also where it is no whole number of strides long, and where its first frame comes after its start: of cameras
    with few pictures a second every other frame is late."""
    whole = [
        replace(sample, pts=sample.pts + late_us * (number % 2))
        for number, sample in enumerate(prune_clip(clip, "street", "none").samples)
    ]
    request = WindowRequest("street", 2, start_s * MICROSECONDS, (start_s + 6) * MICROSECONDS, 0.0)
    answers, cost = answer_in_full(engine, replace(SPEC, stride_s=stride_s), whole, request)
    (window,) = engine.stats.windows
    assert window.tokens.full == window.tokens.new == 6 * whole[0].grid.tokens
    assert cost.tokens == window.tokens.full + window.tokens.query
    assert [answer.question for answer in answers] == ["person", "car"]


def test_pictures_show_an_anchor_and_then_what_was_pruned(clip):
    sent = prune_clip(clip, "street", "replenish")
    frames = list(zip(sent.samples, sent.pictures, strict=True))
    pictures = picture_frames(frames, 4)
    assert len(pictures) == 4
    assert [picture.anchor for picture in pictures] == [True, False, False, False]
    assert pictures[0].kept == 1.0
    assert all(picture.kept < 0.9 for picture in pictures[1:])
    assert all(picture.jpeg.startswith(b"\xff\xd8\xff") for picture in pictures)
    assert len({picture.time_s for picture in pictures}) == 4
    # Of the stretches between them, what is kept most is shown.
    kept = [float(sample.mask.mean()) for sample, _ in frames if not sample.anchor]
    assert max(picture.kept for picture in pictures[1:]) == max(kept)
    assert len(picture_frames(frames[:1], 4)) == 1


def test_a_missing_clip_is_told(engine, tmp_path):
    with pytest.raises(SourceError, match="does not exist"):
        read_clip(tmp_path / "no.mp4", engine.geometry, at_least=1)
