"""Scenes small enough to be encoded in a blink, by cameras of every kind there is."""

import json
from dataclasses import replace

import pytest

from cluster.lab.scenes.encode import encode_scene
from cluster.lab.scenes.scene import make_scene


def small_scene(split="train", index=0, *, event="any", seconds=24.0, **camera):
    made = make_scene(split, index, event=event, seconds=seconds)
    return replace(made, camera=replace(made.camera, **{"width": 192, "height": 108, "fps": 5.0, **camera}))


@pytest.fixture(name="small_scene")
def small_scene_fixture():
    return small_scene


@pytest.fixture(scope="session")
def fall(tmp_path_factory):
    """A small encoded scene with a fall: its scene, path and truth."""
    shown = small_scene("validation", 3, event="fall")
    path = tmp_path_factory.mktemp("fall") / f"{shown.name}.mp4"
    return shown, path, encode_scene(shown, path, event="fall")


@pytest.fixture
def fall_json(fall, tmp_path):
    """A copy of its truth to be spoilt: ``change(**fields)`` writes it with other values and returns the path."""

    def change(**fields):
        raw = json.loads(fall[1].with_suffix(".json").read_text())
        path = tmp_path / "spoilt.json"
        path.write_text(json.dumps(raw | fields))
        return path

    return change
