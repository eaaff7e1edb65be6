"""A directory as `sightline scenes make` writes it, whole and broken."""

import json
import shutil
from dataclasses import replace

import pytest

from actors.cli.evaluate import _made
from cluster.errors import ConfigError
from cluster.lab.evaluation.datasets import Dataset, check_validation, load_dataset
from cluster.lab.scenes.dataset import INDEX
from cluster.lab.scenes.encode import encode_scene
from cluster.lab.scenes.questions import standing_question
from cluster.lab.scenes.scene import make_scene
from cluster.lab.scenes.truth import SceneTruth
from cluster.lab.scenes.vocabulary import EVENT_KINDS


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    names = []
    for index, event in enumerate(("fall", "fight", None)):
        scene = make_scene("test", index, seconds=24, event=event)
        scene = replace(scene, camera=replace(scene.camera, width=128, height=72, fps=4.0))
        encode_scene(scene, folder / f"{scene.name}.mp4", event=event)
        names.append({"name": scene.name})
    (folder / INDEX).write_text(json.dumps({"version": 1, "clips": names}))
    return folder


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made, tmp_path / "scenes")


def test_every_scene_is_judged_on_every_kind(made):
    dataset = load_dataset(made, min_seconds=20)
    assert [video.name for video in dataset.videos] == ["test-000000", "test-000001", "test-000002"]
    assert not dataset.skipped
    assert dataset.questions == {kind: standing_question(kind) for kind in EVENT_KINDS}
    for video in dataset.videos:
        truth = SceneTruth.load(video.path.with_suffix(".json"))
        assert video.kinds == EVENT_KINDS
        assert video.events == tuple((each.kind, each.start_s, each.end_s) for each in truth.events)
        assert video.strata == frozenset((*truth.strata, truth.camera.codec))
        assert video.motion == truth.mean_motion
    assert [[kind for kind, _, _ in video.events] for video in dataset.videos] == [["fall"], ["fight"], []]


def test_a_video_that_is_judged_is_not_fitted_on_under_another_name(made, tmp_path):
    judged = load_dataset(made).videos
    held = [replace(video, split="validation") for video in judged]
    other = shutil.copy(held[0].path, tmp_path / "other.mp4")
    found = Dataset("scenes", tmp_path, (replace(held[0], path=other, name="other"),), {})
    check_validation(found, judged[1:])
    with pytest.raises(ConfigError, match=r"other\.mp4 is also a test video \(.*test-000000\.mp4\)"):
        check_validation(found, judged)


def test_a_smaller_number_of_scenes_is_not_what_an_earlier_run_made(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("cluster.lab.scenes.dataset.make_scenes", lambda folder, wanted, **_: asked.append(folder))
    assert [_made(tmp_path, count, 0, 1) for count in (70, 14)] == asked
    assert len(set(asked)) == 2


def test_bad_clips_are_skipped_with_their_reasons(copy):
    (copy / "test-000000.json").unlink()
    (copy / "test-000001.mp4").unlink()
    shutil.copy(copy / "test-000002.mp4", copy / "more.mp4")
    (copy / "more.json").write_text("{")
    broken = copy / "broken.mp4"
    broken.write_bytes(b"x" * 1000)
    shutil.copy(copy / "test-000002.json", broken.with_suffix(".json"))
    dataset = load_dataset(copy)
    assert [video.name for video in dataset.videos] == ["test-000002"]
    why = {each.path.name: each.reason for each in dataset.skipped}
    assert why["test-000000.mp4"] == "its ground truth test-000000.json is missing"
    assert why["test-000001.mp4"] == "in the index, not on disk"
    assert "not JSON" in why["more.mp4"]
    assert why["broken.mp4"].startswith("cannot be read: ")


def test_unknown_events_are_skipped(copy):
    path = copy / "test-000000.json"
    truth = json.loads(path.read_text())
    truth["events"][0]["kind"] = "flood"
    path.write_text(json.dumps(truth))
    dataset = load_dataset(copy)
    assert len(dataset.videos) == 2
    assert "unknown event kind 'flood'" in dataset.skipped[0].reason


def test_without_an_index_whatever_lies_there_counts(copy):
    (copy / INDEX).unlink()
    assert len(load_dataset(copy).videos) == 3
    (copy / INDEX).write_text("[]")
    with pytest.raises(ConfigError, match="is not an index of scenes"):
        load_dataset(copy)


def test_nothing_left(copy, tmp_path):
    with pytest.raises(ConfigError, match=r"no videos left in .*: shorter than a window: 24\.0 of 60 s"):
        load_dataset(copy, min_seconds=60)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="it holds no video of this layout"):
        load_dataset(tmp_path / "empty")
