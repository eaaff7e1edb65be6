"""The truth on disk says what the renderer draws, and says clearly when it is broken."""

import json
from dataclasses import replace

import numpy as np
import pytest

from cluster.errors import ConfigError
from cluster.lab.scenes.questions import memory_questions, standing_question
from cluster.lab.scenes.render import SceneRenderer
from cluster.lab.scenes.truth import SceneTruth, scene_truth
from cluster.lab.scenes.vocabulary import EVENT_KINDS, window_label


def test_it_names_what_makes_the_scene_again(fall):
    scene, _, truth = fall
    assert (truth.split, truth.index, truth.seconds, truth.event) == ("validation", 3, 24.0, "fall")
    assert (truth.name, truth.seed, truth.layout, truth.light) == (
        scene.name,
        scene.seed,
        scene.layout.name,
        scene.light,
    )
    assert frozenset(truth.strata) == scene.strata
    assert truth.camera == scene.camera
    assert (truth.width, truth.height, truth.fps) == (192, 108, 5.0)


def test_events_and_their_labels_survive_the_disk(fall):
    scene, path, _ = fall
    loaded = SceneTruth.load(path.with_suffix(".json"))
    assert loaded.scene_events == scene.events
    assert [each.kind for each in loaded.events] == ["fall"]
    for kind in EVENT_KINDS:
        for start in np.arange(0, 20, 2.0):
            assert window_label(loaded.scene_events, kind, start, start + 8) == window_label(
                scene.events, kind, start, start + 8
            )


def test_boxes_of_an_event_hold_its_actors_while_it_lasts(fall):
    scene, _, truth = fall
    event = truth.events[0]
    renderer = SceneRenderer(scene, 192, 108)
    assert len(event.boxes) >= 6
    for second, box in event.boxes:
        assert event.start_s <= second < event.end_s
        assert second * 2 == int(second * 2), "twice a second"
        own = [each.box for each in renderer.objects(second) if each.id in event.actors]
        assert own
        for left, top, right, bottom in own:
            assert box[0] - 1 <= left * 192
            assert box[1] - 1 <= top * 108
            assert right * 192 <= box[2] + 1
            assert bottom * 108 <= box[3] + 1


def test_samples_hold_every_visible_object_twice_a_second(fall):
    scene, _, truth = fall
    assert [sample.second for sample in truth.samples] == [number / 2 for number in range(48)]
    renderer = SceneRenderer(scene, 192, 108)
    for sample in truth.samples[::7]:
        drawn = renderer.objects(sample.second)
        assert [(each.id, each.kind, each.state) for each in sample.objects] == [
            (each.id, each.kind, each.state) for each in drawn
        ]
        for each in sample.objects:
            left, top, right, bottom = each.box
            assert 0 <= left <= right <= 192
            assert 0 <= top <= bottom <= 108


def test_questions_have_the_answers_of_the_scene(fall):
    scene, _, truth = fall
    assert {each.kind: each.answer for each in truth.questions} == {
        kind: "yes" if kind == "fall" else "no" for kind in EVENT_KINDS
    }
    assert [each.text for each in truth.questions] == [standing_question(kind) for kind in EVENT_KINDS]
    assert list(truth.memory) == memory_questions(scene)


def test_motion_is_area_times_speed(fall):
    """Against the objects at the samples, summed another way."""
    scene, _, truth = fall
    renderer = SceneRenderer(scene, 192, 108)
    rows = [
        (number, (o.box[2] - o.box[0]) * (o.box[3] - o.box[1]), np.hypot(*o.velocity))
        for number in range(48)
        for o in renderer.objects(number / 2)
    ]
    _, areas, speeds = map(np.asarray, zip(*rows, strict=True))
    assert truth.mean_motion == pytest.approx(float(areas @ speeds) / 48, abs=1e-8)
    assert truth.mean_motion > 0


def test_a_scene_where_nothing_moves_has_no_motion(small_scene):
    scene = replace(small_scene(event=None), actors=(), events=())
    truth = scene_truth(scene, SceneRenderer(scene, 192, 108), None)
    assert truth.mean_motion == 0
    assert (truth.events, truth.event) == ((), None)
    assert {each.answer for each in truth.questions} == {"no"}
    assert len(truth.samples) == 48
    assert not any(sample.objects for sample in truth.samples)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"version": 7}, r"has version 7, not 1; regenerate the scenes"),
        ({"fps": "fast"}, r"not the ground truth of a scene: fps: .*number"),
        ({"camera": {"width": 640}}, r"not the ground truth of a scene: camera\.height: Field required"),
        (
            {"events": [{"kind": "flood", "start_s": 1, "end_s": 2, "actors": [], "boxes": []}]},
            r"unknown event kind 'flood'; there are: fall, fight",
        ),
        (
            {"events": [{"kind": "fall", "start_s": 5, "end_s": 2, "actors": [], "boxes": []}]},
            r"a fall from 5 to 2 s is invalid",
        ),
        ({"strata": None}, r"strata: "),
    ],
)
def test_a_broken_truth_is_refused_by_its_first_wrong_field(fall_json, fields, says):
    with pytest.raises(ConfigError, match=says):
        SceneTruth.load(fall_json(**fields))


def test_files_that_are_no_truth(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*nothing\.json: No such file"):
        SceneTruth.load(tmp_path / "nothing.json")
    path = tmp_path / "x.json"
    for text, says in (("", "not JSON"), ("{", "not JSON"), ("[1]", "has no version"), ("{}", "has no version")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=says):
            SceneTruth.load(path)
    path.write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(ConfigError, match="not JSON"):
        SceneTruth.load(path)


def test_it_is_plain_json(fall):
    raw = json.loads(fall[1].with_suffix(".json").read_text())
    assert raw["version"] == 1
    second, box = raw["events"][0]["boxes"][0]
    assert isinstance(second, float)
    assert len(box) == 4
