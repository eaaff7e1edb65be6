"""The demo's parts that need no cluster."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from actors.cli.demo.live import LiveRun
from actors.cli.demo.plan import CAMERAS, DemoCamera, make_clips, write_config
from actors.cli.demo.record import LoopedTruth, live_windows
from actors.cli.demo.screen import cameras_table
from cluster.config import camera_settings, load_config
from cluster.lab.scenes.questions import standing_question
from cluster.lab.scenes.scene import make_scene
from cluster.lab.scenes.truth import SceneTruth, truth_path
from cluster.lab.scenes.vocabulary import EVENT_KINDS, SceneEvent
from cluster.models.settings import ModelSettings
from cluster.types import Answer, CameraStatus, LastAnswer, Timing, TokenCount

PATHS = {camera.name: Path("clips") / f"{camera.name}.mp4" for camera in CAMERAS}


def test_the_demos_configuration_can_be_run_by_hand(tmp_path):
    clips = {name: tmp_path / "it's: here" / path.name for name, path in PATHS.items()}
    path = write_config(tmp_path, clips, "tiny-qwen2_5_vl", "native", ModelSettings())
    config = load_config(path)
    assert [camera.name for camera in config.cameras] == [camera.name for camera in CAMERAS]
    assert {camera.name for camera in config.cameras if camera.source} == {"yard", "road"}
    for camera in CAMERAS:
        settings = camera_settings(config, camera.name)
        assert [question.id for question in settings.questions] == list(camera.questions)
        assert all(question.text == standing_question(question.id) for question in settings.questions)
        assert ("--camera " + camera.name in path.read_text()) == camera.pushed
        if not camera.pushed:
            assert Path(settings.source.reveal()) == clips[camera.name]
            assert settings.source_options.loop
            assert settings.source_options.realtime


def test_a_model_is_asked_as_it_was_trained(tmp_path):
    said = ModelSettings(
        window_s=16,
        stride_s=2,
        fps=4,
        anchor_interval_s=4,
        threshold=0.35,
        thresholds={"fall": 0.6125},
        questions={"intrusion": "Isn't anyone there?"},
    )
    config = load_config(write_config(tmp_path, PATHS, "demo", "native", said))
    yard = camera_settings(config, "yard")
    assert (yard.window.length_s, yard.window.stride_s) == (16, 2)
    assert (yard.sampling.fps, yard.sampling.anchor_interval_s) == (4, 4)
    asked = {question.id: (question.text, question.threshold) for question in yard.questions}
    assert asked == {
        "fall": (standing_question("fall"), 0.6125),
        "intrusion": ("Isn't anyone there?", 0.35),
        "stopped_vehicle": (standing_question("stopped_vehicle"), 0.35),
    }


@pytest.mark.parametrize("camera", CAMERAS, ids=lambda camera: camera.name)
def test_every_camera_has_something_to_say_no_to_and_all_but_the_night_something_to_say_yes_to(camera):
    scene = camera.scene()
    truth = LoopedTruth(scene.events, scene.seconds, 20.0)
    # The windows of one round, once the first one is whole: those that the report compares.
    rounds = [truth.labels(camera.questions, end - 20, end) for end in range(24, 61, 4)]
    sometimes = {kind for kind in camera.questions if any(labels[kind] for labels in rounds)}
    never = {kind for kind in camera.questions if all(labels[kind] is False for labels in rounds)}
    assert never
    assert bool(sometimes) == (camera.name != "night")
    assert 2 <= len(camera.questions) <= 3
    assert set(camera.questions) <= set(EVENT_KINDS)
    for kind in sometimes:
        # Both answers are seen during a live part of the default length.
        assert {truth.label(kind, max(0, end - 20), end) for end in range(4, 41, 4)} >= {True, False}


FALL, BAG = SceneEvent("fall", 30.0, 40.0, (1,)), SceneEvent("left_object", 10.0, 40.0, (2, 3))


def test_a_round_is_as_true_as_the_first():
    truth = LoopedTruth((BAG, FALL), 40.0, 20.0)
    for kind in EVENT_KINDS:
        for start in range(0, 21, 2):
            first = truth.label(kind, start, start + 20)
            assert truth.label(kind, start + 80, start + 100) is first
    assert truth.label("left_object", 2, 22) is True
    # The window opens after the bag was put down.
    assert truth.label("left_object", 16, 36) is None
    # A bag of the round before is gone, and so is the doubt about it.
    assert truth.label("left_object", 40, 50) is False


def test_a_window_over_the_seam_holds_both_rounds():
    truth = LoopedTruth((SceneEvent("fight", 2.0, 8.0, (4,)), FALL), 40.0, 20.0)
    assert truth.labels(["fall", "fight", "intrusion"], 30, 50) == {"fall": True, "fight": True, "intrusion": False}
    assert truth.label("fall", 38.5, 58.5) is None
    assert truth.label("fall", 40, 60) is False
    spans = [(each.question, each.start_s, each.end_s) for each in truth.intervals(["fall", "fight"], 4, 75)]
    assert spans == [("fight", 4, 8), ("fall", 30, 40), ("fight", 42, 48), ("fall", 70, 75)]


def answer(window, question, score, *, gated=False):
    counts = TokenCount(full=100, kept=40, reused=20, refreshed=8, new=12, query=9, encoded=12)
    end = (window + 1) * 4_000_000
    return Answer("a", window, max(0, end - 20_000_000), end, question, score, True, "", gated, counts, Timing(0.5))


def test_answers_of_a_window_are_put_together_with_what_was_true():
    given = [
        answer(1, "fall", 0.1),
        answer(0, "fall", 0.2),
        answer(0, "fight", 0.3),
        answer(8, "fall", 0.4, gated=True),
    ]
    truth = LoopedTruth((FALL,), 40.0, 20.0)
    first, second, last = live_windows(given, truth)
    assert (first.start_s, first.end_s, first.scores) == (0.0, 4.0, {"fall": 0.2, "fight": 0.3})
    assert (first.full, first.kept, first.computed) == (100, 40, 29)
    assert first.truth == {"fall": False, "fight": False}
    assert (second.end_s, second.scores) == (8.0, {"fall": 0.1})
    assert (last.start_s, last.end_s, last.computed, last.truth) == (16.0, 36.0, 0, {"fall": True})
    assert live_windows([], truth) == ()


def test_the_screen_says_whether_an_answer_is_true():
    def last(question, positive, end_s):
        return LastAnswer(question, 0.9 if positive else 0.1, positive, end_s * 1_000_000)

    statuses = {
        "yard": CameraStatus("yard", windows_done=3, last_answers=(last("fall", True, 36), last("fight", True, 36))),
        "road": CameraStatus("road", windows_done=3, last_answers=(last("fall", True, 31), last("fall", False, 8))),
    }
    truth = LoopedTruth((FALL,), 40.0, 20.0)
    console = Console(file=io.StringIO(), width=80)
    console.print(cameras_table(LiveRun(statuses=statuses), {"yard": truth, "road": truth}))
    text = console.file.getvalue()
    for line in ("fall 0.90 yes ✓", "fight 0.90 yes ✗", "fall 0.90 yes ~", "fall 0.10 no ✓", "✗ wrong"):
        assert line in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80


def small(scene):
    """The same scene by a camera of few pixels."""
    return replace(scene, camera=replace(scene.camera, width=224, height=128))


def test_clips_are_made_once_and_again_when_they_show_something_else(tmp_path, monkeypatch):
    short = small(make_scene("test", 26, seconds=24.0, event=None))
    monkeypatch.setattr("actors.cli.demo.plan.CAMERAS", CAMERAS[-1:])
    monkeypatch.setattr(DemoCamera, "scene", lambda camera: short)
    done = []
    path = make_clips(tmp_path / "a" / "clips", lambda: done.append(1))["night"]
    made = path.stat().st_mtime_ns
    assert SceneTruth.load(truth_path(path)).scene_events == short.events
    make_clips(path.parent, lambda: done.append(1))
    assert path.stat().st_mtime_ns == made
    assert len(done) == 2
    other = small(make_scene("test", 27, seconds=24.0, event=None))
    monkeypatch.setattr(DemoCamera, "scene", lambda camera: other)
    make_clips(path.parent)
    assert SceneTruth.load(truth_path(path)).seed == other.seed
    assert {each.name for each in path.parent.iterdir()} == {"night.mp4", "night.json"}
