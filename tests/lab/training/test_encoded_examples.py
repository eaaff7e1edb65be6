"""Training on encoded clips: through the live front end, kept on disk, the test split refused."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cluster.errors import ConfigError
from cluster.lab.scenes.encode import encode_scene
from cluster.lab.scenes.scene import make_scene
from cluster.lab.scenes.truth import SceneTruth, truth_path
from cluster.lab.training.config import Shape
from cluster.lab.training.encoded_examples import (
    EncodedExamples,
    LivePruning,
    list_training_clips,
    prune_clip,
    read_frames,
    regenerate_scene,
    write_frames,
)
from cluster.types import PatchGrid


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    scene = make_scene("train", 0, seconds=24.0, event="fall")
    scene = replace(scene, camera=replace(scene.camera, width=224, height=128))
    encode_scene(scene, folder / f"{scene.name}.mp4", event="fall")
    return folder


@pytest.fixture(scope="module")
def clip(clips: Path) -> Path:
    return list_training_clips(clips)[0]


def test_a_clip_is_seen_as_it_is_live(clip: Path, shape: Shape, grid: PatchGrid) -> None:
    scene = regenerate_scene(SceneTruth.load(truth_path(clip)))
    rng = np.random.default_rng(0)
    whole = prune_clip(clip, scene, shape, LivePruning("none", {}, 8.0, 0.0), rng)
    assert len(whole) == 24
    assert all(frame.complete and len(frame.cells) == grid.tokens for frame in whole)
    assert np.allclose(np.diff([frame.time_s for frame in whole]), 1.0, atol=0.2)
    pruned = prune_clip(clip, scene, shape, LivePruning("replenish", {}, 8.0, 0.0), rng)
    assert pruned[0].complete
    assert sum(len(f.cells) for f in pruned) < 0.8 * sum(len(f.cells) for f in whole)
    for some, every in zip(pruned, whole, strict=True):
        rows = (some.cells @ [grid.group_cols, 1]).astype(int)
        assert np.array_equal(some.labels.hot, every.labels.hot[rows])
        by_token = every.patches.reshape(grid.tokens, grid.merge**2, *every.patches.shape[1:])
        assert np.array_equal(some.patches, by_token[rows].reshape(-1, *every.patches.shape[1:]))


def test_what_was_kept_is_what_was_written(clip: Path, shape: Shape, tmp_path: Path) -> None:
    scene = regenerate_scene(SceneTruth.load(truth_path(clip)))
    frames = prune_clip(clip, scene, shape, LivePruning("replenish", {}, 8.0, 0.3), np.random.default_rng(1))
    write_frames(tmp_path / "kept" / "a.pt", frames)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["a.pt"]
    for one, other in zip(read_frames(tmp_path / "kept" / "a.pt"), frames, strict=True):
        assert (one.time_s, one.complete) == (other.time_s, other.complete)
        assert np.array_equal(one.cells, other.cells)
        assert np.array_equal(one.patches, other.patches)
        assert np.array_equal(one.labels.hot, other.labels.hot)
        assert np.array_equal(one.labels.covered, other.labels.covered)


def test_examples_come_from_the_cache_once_it_is_there(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = EncodedExamples(str(clips), str(tmp_path / "cache"), "tiny", seed=0)
    made = [make(number) for number in range(4)]
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert kept
    again = [make(number) for number in range(4)]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == kept
    for one, other in zip(made, again, strict=True):
        assert one.questions == other.questions
        assert np.array_equal(one.context, other.context)
    assert any(question.answer == "yes" for example in made for question in example.questions)
    # Frames of other code are made anew.
    monkeypatch.setattr("cluster.lab.training.encoded_examples.code_digest", lambda: "other")
    make(0)
    assert len(list((tmp_path / "cache").iterdir())) == len(kept) + 1


@pytest.mark.parametrize("split", ["test", "validation"])
def test_scenes_that_a_model_is_judged_on_are_never_trained_on(clip: Path, tmp_path: Path, split: str) -> None:
    """Whatever their files are called, as the demo's clips have names of their own."""
    shutil.copy(clip, tmp_path / "train-000000.mp4")
    replace(SceneTruth.load(truth_path(clip)), split=split).save(tmp_path / "train-000000.json")
    with pytest.raises(ConfigError, match=f"{split} split"):
        list_training_clips(tmp_path)
    with pytest.raises(ConfigError, match=f"{split} split"):
        EncodedExamples(str(tmp_path), str(tmp_path / "cache"), "tiny", seed=0)(0)
    with pytest.raises(ConfigError, match="no encoded scenes"):
        list_training_clips(tmp_path / "nowhere")


def test_a_scene_of_another_generator_is_refused(clip: Path) -> None:
    truth = SceneTruth.load(truth_path(clip))
    object.__setattr__(truth, "seed", truth.seed + 1)
    with pytest.raises(ConfigError, match="another version"):
        regenerate_scene(truth)
