"""Lazy decoding in a camera's pipeline: what is sent, shown and told."""

import itertools
from pathlib import Path

import pytest
from codec_clips import encode, visit

from cluster.codec import CameraState, FileSource, lazy
from cluster.config import camera_settings, load_config
from cluster.decoder.footage.camera import CameraFootage
from cluster.decoder.pipeline import CameraPipeline, PipelineSettings, PipelineStatus, pipeline_settings
from cluster.types import MICROSECONDS, BoolGrid, FrameSample, PatchGeometry, SampledPicture, ShownPicture
from cluster.vision.sampler import Cut

GEOMETRY = PatchGeometry(patch=8, merge=2, temporal=2)
FPS, FRAMES = 10, 440
ASKED = "questions: [{id: person, text: 'Is anyone there?'}]\n"


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encode(tmp_path_factory.mktemp("lazy") / "gate.mp4", visit(FRAMES, 334, 370), gop=40, fps=FPS)


class _Shown(CameraFootage):
    def __init__(self, shown: list[SampledPicture]) -> None:
        super().__init__()
        self._shown = shown

    def show(self, picture: ShownPicture, mask: BoolGrid, at_s: float) -> None:
        assert isinstance(picture, SampledPicture)
        self._shown.append(picture)


class Run:
    """The clip through a pipeline; ``running``: its status at each frame."""

    def __init__(self, clip: Path, *, on: bool) -> None:
        self.frames: list[FrameSample] = []
        self.shown: list[SampledPicture] = []
        self.running: list[PipelineStatus] = []
        self.pipeline = CameraPipeline(
            "gate", FileSource(clip), GEOMETRY, PipelineSettings(lazy=on), self._send, footage=_Shown(self.shown)
        )
        self.pipeline.start()
        assert self.pipeline.join(60)
        self.status = self.pipeline.status()

    def _send(self, frame: FrameSample, _cut: Cut) -> None:
        self.frames.append(frame)
        self.running.append(self.pipeline.status())


def test_a_quiet_camera_sends_empty_frames_shows_true_pictures_and_tells_what_it_spared(clip: Path) -> None:
    full, lazily = Run(clip, on=False), Run(clip, on=True)
    assert [frame.pts for frame in lazily.frames] == [frame.pts for frame in full.frames]
    assert lazily.status.state is CameraState.ENDED
    assert lazily.status.stats.frames_decoded + lazily.status.stats.frames_spared == FRAMES
    spared = lazily.status.stats.frames_spared / FRAMES
    assert spared > 0.4
    assert (full.status.decoding, lazily.status.decoding) == ("cpu", f"cpu, {spared:.0%} spared")
    assert lazily.running[3].decoding == "cpu, learning"
    # Only decoded pictures are shown, so that their age is true; of each GOP its keyframe at least, although the other
    # sample of its frame repeats it.
    assert not any(picture.repeated for picture in lazily.shown)
    assert max(after.pts - before.pts for before, after in itertools.pairwise(lazily.shown)) == 4 * MICROSECONDS
    # A repeated picture is no frozen camera.
    still_s = [max(each.picture.still_s for each in run.running if each.picture) for run in (full, lazily)]
    assert still_s[1] <= still_s[0] < 5.0
    assert lazily.frames[-1].activity == full.frames[-1].activity


def test_a_camera_whose_packets_miss_change_says_so(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "MOST_MISSED", -1)
    run = Run(clip, on=True)
    reasons = {status.reason for status in run.running if status.lazy == "suspended"}
    assert reasons == {"decodes everything: lazy decoding missed changes"}
    assert run.status.decoding == "cpu, suspended"
    # Believed for one GOP.
    assert 0 < run.status.stats.frames_spared < 40
    assert set(run.status.lazy_events) == set(lazy.LAZY_EVENTS)


def test_it_is_configured_for_all_cameras_and_for_one(tmp_path: Path) -> None:
    path = tmp_path / "sightline.yaml"
    path.write_text(ASKED + "cameras: [{name: a}, {name: b, sampling: {lazy_decode: auto}}]")
    config = load_config(path)
    assert [pipeline_settings(camera_settings(config, name)).lazy for name in "ab"] == [False, True]
    path.write_text(
        ASKED + "sampling: {lazy_decode: auto}\ncameras: [{name: a}, {name: b, sampling: {lazy_decode: 'off'}}]"
    )
    config = load_config(path)
    assert [pipeline_settings(camera_settings(config, name)).lazy for name in "ab"] == [True, False]


def test_times_continue_over_what_is_spared(clip: Path) -> None:
    times = [frame.pts for frame in Run(clip, on=True).frames]
    assert {after - before for before, after in itertools.pairwise(times)} == {MICROSECONDS}
