import av
import numpy as np
import pytest
from av.video.frame import PictureType
from street_footage import make_all_clips

from cluster.errors import ConfigError
from cluster.lab.scenes.actors import CameraSettings
from cluster.lab.scenes.render import SceneRenderer
from cluster.lab.scenes.street_clips import CLIP_KINDS, make_clip, street_scene
from cluster.lab.scenes.truth import SceneTruth, truth_path

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
        truth = SceneTruth.load(truth_path(path))
        assert (truth.width, truth.height, truth.fps, len(truth.samples)) == (320, 180, 12.5, 4)
        assert [truth.at(second) for second in (0.0, 0.3, 9.0)] == [truth.samples[at].objects for at in (0, 1, 3)]


def test_the_same_seed_draws_the_same_and_another_does_not(tmp_path):
    one, two, other = (tmp_path / f"{name}.mp4" for name in ("one", "two", "other"))
    first = make_clip("noisy", one, seed=3, **SMALL)
    second = make_clip("noisy", two, seed=3, **SMALL)
    make_clip("noisy", other, seed=4, **SMALL)
    assert first == second
    assert one.read_bytes() == two.read_bytes()
    assert one.read_bytes() != other.read_bytes()


def renderer(kind, seconds, seed=0):
    camera = CameraSettings(640, 360, 12.5, "h264", 4.0, 0, 23)
    return SceneRenderer(street_scene(CLIP_KINDS[kind], camera, seconds, seed), 640, 360)


def pixel_boxes(drawn, second):
    return [
        (round(640 * left), round(360 * top), round(640 * right), round(360 * bottom))
        for left, top, right, bottom in (each.box for each in drawn.objects(second))
    ]


def test_pixels_change_exactly_where_the_objects_are():
    """Nothing changes but inside the boxes of movers (and their shadows below), and there something does."""
    drawn = renderer("street", 24)
    before = drawn.picture(0.0, 0).astype(int)
    seen = 0
    for number in range(2, 300, 2):
        second = number / 12.5
        picture = drawn.picture(second, number).astype(int)
        # One grey level is rounding.
        changed = (abs(picture - before) > 1).any(axis=2)
        explained = np.zeros_like(changed)
        # A shadow may be in the picture before who casts it is.
        explained[:, :30] = explained[:, -30:] = explained[-30:] = True
        for left, top, right, bottom in pixel_boxes(drawn, second - 0.16) + pixel_boxes(drawn, second):
            explained[max(0, top - 4) : bottom + 24, max(0, left - 30) : right + 30] = True
        for each, (left, top, right, bottom) in zip(drawn.objects(second), pixel_boxes(drawn, second), strict=True):
            if each.state in ("walking", "driving") and right - left > 8:
                assert changed[top:bottom, left:right].any()
                seen += 1
        assert not (changed & ~explained).any()
        before = picture
    assert seen > 100


def test_the_street_has_a_story(tmp_path):
    truth = make_clip("street", tmp_path / "street.mp4", seconds=24, fps=2, size=(64, 64))
    kinds = {thing.id: thing.kind for sample in truth.samples for thing in sample.objects}
    assert sorted(kinds.values()) == ["person", "person", "person", "vehicle", "vehicle"]
    waits = [sample for sample in truth.samples if any(not thing.moving for thing in sample.objects)]
    assert len(waits) > 3 * 2
    assert any(not sample.objects for sample in truth.samples)
    for sample in truth.samples:
        for thing in sample.objects:
            left, top, right, bottom = thing.box
            assert 0 <= left <= right <= 64
            assert 0 <= top <= bottom <= 64


def test_long_clips_go_on_happening(tmp_path):
    truth = make_clip("street", tmp_path / "long.mp4", seconds=120, fps=1, size=(64, 64))
    last_cycle = {thing.id for sample in truth.samples[200:] for thing in sample.objects}
    assert len({thing.id for sample in truth.samples for thing in sample.objects}) == 25
    assert len(last_cycle) >= 3


def test_night_is_dark_and_still(tmp_path):
    truth = make_clip("night", tmp_path / "night.mp4", seconds=4, fps=2, size=(64, 64))
    assert not any(sample.objects for sample in truth.samples)
    drawn = renderer("night", 4)
    pictures = np.stack([drawn.picture(second, round(second * 12.5)) for second in (0.0, 0.4, 1.6, 3.2)]).astype(int)
    assert pictures.mean() < 40
    assert np.ptp(pictures, axis=0).mean() < 5.0, "noise alone"
    assert renderer("street", 4).picture(0.0, 0).mean() > 80


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
