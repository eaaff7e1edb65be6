import json

import av
import numpy as np
import pytest
from av.video.frame import PictureType
from street_footage import make_all_clips

from cluster.errors import ConfigError
from cluster.lab.scenes.street_clips import CLIP_KINDS, ClipTruth, draw_frames, make_clip
from cluster.lab.scenes.truth import truth_path

SMALL = {"seconds": 2.0, "size": (320, 180)}


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return make_all_clips(tmp_path_factory.mktemp("small"), **SMALL)


def test_all_four_play(clips):
    assert list(clips) == ["street", "noisy", "hevc", "night"]
    for kind, path in clips.items():
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            pictures = [PictureType(frame.pict_type).name for frame in container.decode(stream)]
            assert stream.codec_context.name == ("hevc" if kind == "hevc" else "h264")
            assert (stream.width, stream.height, float(stream.average_rate)) == (320, 180, 12.5)
        assert len(pictures) == 25
        assert pictures[0] == "I"
        assert ("B" in pictures) == (kind == "noisy")


def test_the_truth_lies_beside_the_clip(clips):
    for path in clips.values():
        truth = ClipTruth.load(truth_path(path))
        assert (truth.width, truth.height, truth.fps, len(truth.frames)) == (320, 180, 12.5, 25)
        again = path.parent / "again.json"
        truth.save(again)
        assert json.loads(again.read_text()) == json.loads(truth_path(path).read_text())
        assert ClipTruth.load(again) == truth


def test_the_same_seed_draws_the_same_and_another_does_not(tmp_path):
    one, two, other = (tmp_path / f"{name}.mp4" for name in ("one", "two", "other"))
    first = make_clip("noisy", one, seed=3, **SMALL)
    second = make_clip("noisy", two, seed=3, **SMALL)
    make_clip("noisy", other, seed=4, **SMALL)
    assert first == second
    assert one.read_bytes() == two.read_bytes()
    assert one.read_bytes() != other.read_bytes()


def drawn(kind, seconds, seed=0):
    truth = ClipTruth(kind, seed, 640, 360, 12.5)
    return truth, [picture.copy() for picture in draw_frames(kind, truth, round(seconds * 12.5))]


def test_pixels_change_exactly_where_the_truth_says():
    """Nothing changes but inside the boxes of movers (and their shadows below), and there something does."""
    truth, pictures = drawn("street", 24)
    for number in range(1, len(pictures)):
        changed = (pictures[number] != pictures[number - 1]).any(axis=2)
        explained = np.zeros_like(changed)
        # A shadow may be in the picture before who casts it is.
        explained[:, :20] = explained[:, -20:] = explained[-20:] = True
        for frame in (number - 1, number):
            for thing in truth.frames[frame]:
                left, top, right, bottom = thing.box
                explained[max(0, top - 4) : bottom + 6, max(0, left - 30) : right + 30] = True
                if frame == number and thing.moving:
                    assert changed[top:bottom, left:right].any()
        assert not (changed & ~explained).any()


def test_the_street_has_a_story():
    truth, _ = drawn("street", 24)
    kinds = {thing.id: thing.kind for frame in truth.frames for thing in frame}
    assert sorted(kinds.values()) == ["car", "car", "person", "person", "person"]
    waits = [frame for frame in truth.frames if any(not thing.moving for thing in frame)]
    assert len(waits) > 3 * 12.5
    empty = [frame for frame in truth.frames if not frame]
    assert empty
    for frame in truth.frames:
        for thing in frame:
            left, top, right, bottom = thing.box
            assert 0 <= left < right <= 640
            assert 0 <= top < bottom <= 360


def test_long_clips_go_on_happening():
    truth = ClipTruth("street", 0, 128, 72, 2.0)
    for _ in draw_frames("street", truth, 240):
        pass
    last_cycle = {thing.id for frame in truth.frames[200:] for thing in frame}
    assert len({thing.id for frame in truth.frames for thing in frame}) == 25
    assert len(last_cycle) >= 3


def test_night_is_dark_and_still():
    truth, pictures = drawn("night", 4)
    assert all(np.array_equal(picture, pictures[0]) for picture in pictures)
    assert not any(truth.frames)
    assert pictures[0].mean() < 40
    day, _ = drawn("street", 0.08)
    assert day.frames


def test_noise_and_flicker_are_there(clips):
    with av.open(str(clips["noisy"])) as container:
        luma = [frame.to_ndarray(format="gray").astype(float) for frame in container.decode(video=0)]
    levels = [picture.mean() for picture in luma]
    assert np.ptp(levels) > 2.0
    difference = luma[3] - luma[2]
    assert np.median(np.abs(difference - np.median(difference))) > 1.0


def test_encoders_are_quiet(tmp_path, capfd):
    make_clip("hevc", tmp_path / "quiet.mp4", **SMALL)
    assert capfd.readouterr() == ("", "")


def test_what_makes_no_clip_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="unknown clip 'day'; there are: hevc, night, noisy, street"):
        make_clip("day", tmp_path / "x.mp4")
    with pytest.raises(ConfigError, match="must be even and at least 64 pixels, not 321x180"):
        make_clip("street", tmp_path / "x.mp4", size=(321, 180))
    with pytest.raises(ConfigError, match="at least one frame"):
        make_clip("street", tmp_path / "x.mp4", seconds=0)
    assert not list(tmp_path.iterdir())
    assert set(CLIP_KINDS) == {"street", "noisy", "hevc", "night"}
