"""A directory of scenes: deterministic, resumable, in parallel, with an index; the contact sheet of it."""

import json
import multiprocessing
import shutil
import signal
import threading
import time

import numpy as np
import pytest
from PIL import Image

from cluster.errors import ConfigError, SightlineError
from cluster.lab.scenes.dataset import INDEX, SceneSet, contact_sheet, make_scenes
from cluster.lab.scenes.truth import SceneTruth, truth_path

# What is tested are files, not pictures.
pytestmark = pytest.mark.usefixtures("small_cameras")
WANTED = SceneSet("train", 3, seed=2, seconds=24.0, events=("fall", "none"))


@pytest.fixture(scope="module")
def made(tmp_path_factory, small_cameras):
    """Three scenes made by two processes."""
    folder = tmp_path_factory.mktemp("made") / "scenes"
    seen = []
    result = make_scenes(folder, WANTED, jobs=2, on_clip=seen.append)
    assert sorted(seen) == sorted(result.clips)
    return folder, result


@pytest.fixture
def copy(made, tmp_path):
    shutil.copytree(made[0], tmp_path / "scenes")
    return tmp_path / "scenes"


def test_clips_truths_and_an_index_and_nothing_else(made):
    folder, result = made
    names = ["train-200000", "train-200001", "train-200002"]
    assert [path.stem for path in result.clips] == names
    assert result.made == 3
    assert {path.name for path in folder.iterdir()} == {INDEX} | {
        f"{name}.{ending}" for name in names for ending in ("mp4", "json")
    }
    index = json.loads((folder / INDEX).read_text())
    assert [clip["name"] for clip in index["clips"]] == names
    assert [clip["events"] for clip in index["clips"]] == [["fall"], [], ["fall"]]
    assert (index["split"], index["seed"], index["seconds"], index["events"]) == ("train", 2, 24.0, ["fall", "none"])


def test_events_come_in_turn(made):
    truths = [SceneTruth.load(truth_path(path)) for path in made[1].clips]
    assert [truth.event for truth in truths] == ["fall", None, "fall"]
    assert [[event.kind for event in truth.events] for truth in truths] == [["fall"], [], ["fall"]]


def test_one_process_makes_the_same_bytes_as_two(made, tmp_path):
    again = make_scenes(tmp_path / "one", SceneSet("train", 1, seed=2, seconds=24.0, events=("fall", "none")), jobs=1)
    assert again.clips[0].read_bytes() == made[1].clips[0].read_bytes()
    assert truth_path(again.clips[0]).read_bytes() == truth_path(made[1].clips[0]).read_bytes()


def test_what_is_whole_is_left_alone_and_what_is_not_is_made_again(made, copy):
    before = {path.name: path.stat().st_mtime_ns for path in copy.glob("*.mp4")}
    (copy / "train-200001.json").unlink()
    (copy / ".train-200001.mp4.part").write_bytes(b"half a clip")
    result = make_scenes(copy, WANTED)
    assert result.made == 1
    after = {path.name: path.stat().st_mtime_ns for path in copy.glob("*.mp4")}
    assert {name for name in after if after[name] != before[name]} == {"train-200001.mp4"}
    assert {path.name for path in copy.iterdir()} == {path.name for path in made[0].iterdir()}
    assert (copy / "train-200001.mp4").read_bytes() == (made[0] / "train-200001.mp4").read_bytes()


def test_a_clip_of_another_scene_under_its_name_is_made_again(made, copy):
    """What an older version drew must not be taken for what this one draws."""
    path = copy / "train-200001.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seed": 1}))
    assert make_scenes(copy, WANTED).made == 1
    assert path.read_bytes() == (made[0] / path.name).read_bytes()


def test_an_end_between_truth_and_clip_leaves_no_truth_beside_the_clip_of_before(copy, monkeypatch):
    truth = copy / "train-200001.json"
    truth.write_text(json.dumps(json.loads(truth.read_text()) | {"seed": 1}))
    clip, save = truth.with_suffix(".mp4"), SceneTruth.save

    def ends(self, path):
        save(self, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(SceneTruth, "save", ends)
    with pytest.raises(KeyboardInterrupt):
        make_scenes(copy, WANTED)
    monkeypatch.undo()
    assert not clip.exists()
    assert make_scenes(copy, WANTED).made == 1


def test_an_interruption_keeps_what_is_done(made, tmp_path):
    folder = tmp_path / "scenes"

    def stop(path):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_scenes(folder, WANTED, on_clip=stop)
    assert {path.name for path in folder.iterdir()} == {INDEX, "train-200000.mp4", "train-200000.json"}
    assert [clip["name"] for clip in json.loads((folder / INDEX).read_text())["clips"]] == ["train-200000"]
    assert make_scenes(folder, WANTED).made == 2
    assert (folder / INDEX).read_bytes() == (made[0] / INDEX).read_bytes()


def test_ctrl_c_while_the_processes_start(tmp_path, monkeypatch):
    start = threading.Thread.start

    def interrupted(thread):
        signal.raise_signal(signal.SIGINT)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_scenes(tmp_path / "scenes", WANTED, jobs=2)
    assert not multiprocessing.active_children()


def test_other_settings_need_another_directory(copy):
    for other in (
        SceneSet("train", 3, seed=3, seconds=24.0, events=("fall", "none")),
        SceneSet("train", 3, seed=2, seconds=30.0, events=("fall", "none")),
        SceneSet("train", 3, seed=2, seconds=24.0),
        SceneSet("test", 3, seed=2, seconds=24.0, events=("fall", "none")),
    ):
        with pytest.raises(ConfigError, match=r"holds scenes made with .*; choose another directory"):
            make_scenes(copy, other)
    (copy / INDEX).write_text("{}")
    with pytest.raises(ConfigError, match="is not an index of scenes"):
        make_scenes(copy, WANTED)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"count": 0}, "the number of scenes must be between 1 and 100000, not 0"),
        ({"count": 100_001}, "not 100001"),
        ({"seed": -1}, "a seed must be at least 0, not -1"),
        ({"events": ("flood",)}, "unknown event 'flood'; there are: any, none, fall"),
        ({"events": ()}, "no event given"),
        ({"split": "dev"}, "unknown split 'dev'; there are: train, validation, test"),
        ({"seconds": 5.0}, "must last at least 24 s, not 5"),
    ],
)
def test_sets_that_name_no_scenes(settings, says):
    with pytest.raises(ConfigError, match=says):
        SceneSet(**({"split": "train", "count": 1} | settings))


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a directory"):
        make_scenes(tmp_path / "file", WANTED)
    with pytest.raises(SightlineError, match=r"cannot write .*: Not a directory"):
        make_scenes(tmp_path / "file" / "below", WANTED)
    with pytest.raises(ConfigError, match="number of processes must be at least 1, not 0"):
        make_scenes(tmp_path / "out", WANTED, jobs=0)


def test_seeds_of_two_sets_never_meet():
    last, first = SceneSet("train", 100_000, seed=0), SceneSet("train", 1, seed=1)
    assert last.scene(99_999).index + 1 == first.scene(0).index


def test_a_contact_sheet_shows_events_in_their_boxes(made, tmp_path):
    path = tmp_path / "sheet.png"
    assert contact_sheet(made[1].clips, path) == 3
    with Image.open(path) as sheet:
        picture = np.asarray(sheet.convert("RGB")).astype(int)
    rows = np.array_split(picture, 3)
    # The mark's red, in rows of scenes with an event and in no other.
    red = [int((abs(row - (255, 72, 60)).max(axis=-1) < 8).sum()) for row in rows]
    assert min(red[0], red[2]) > 20
    assert red[1] == 0


def test_of_many_clips_a_sheet_shows_an_even_choice(made, tmp_path):
    assert contact_sheet(made[1].clips, tmp_path / "sheet.png", rows=2) == 2


def test_an_error_ends_the_other_processes_and_keeps_what_is_done(tmp_path):
    folder = tmp_path / "scenes"

    def full(path):
        raise OSError(28, "No space left on device")

    started = time.monotonic()
    with pytest.raises(SightlineError, match=r"cannot write scenes to .*: No space left on device"):
        make_scenes(folder, SceneSet("train", 40, seconds=24.0), jobs=2, on_clip=full)
    assert time.monotonic() - started < 60
    assert not multiprocessing.active_children()
    assert not list(folder.glob(".*.part"))
    whole = {path.stem for path in folder.glob("*.mp4")}
    assert 1 <= len(whole) < 40
    assert {clip["name"] for clip in json.loads((folder / INDEX).read_text())["clips"]} == whole
