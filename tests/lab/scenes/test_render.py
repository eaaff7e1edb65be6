import numpy as np
import pytest

from cluster.lab.scenes.render import SceneRenderer
from cluster.lab.scenes.scene import make_scene


def test_pictures_are_the_same_for_the_same_instant_and_carry_noise():
    scene = make_scene("train", 5)
    picture = SceneRenderer(scene, 308, 168).picture(3.0, 30)
    assert picture.shape == (168, 308, 3)
    assert picture.dtype == np.uint8
    assert (picture == SceneRenderer(scene, 308, 168).picture(3.0, 30)).all()
    assert (picture != SceneRenderer(scene, 308, 168).picture(3.0, 31)).any()


@pytest.mark.parametrize("size", [(308, 168), (640, 360)])
def test_boxes_hold_what_changes_between_two_instants(size):
    """Where two noiseless pictures differ, there is an object in one of them."""
    for index in range(6):
        scene = make_scene("train", index, event="wrong_way")
        renderer = SceneRenderer(scene, *size)
        renderer._foreground = []
        instants = (12.0, 13.0)
        pictures = [_unlit(renderer, second) for second in instants]
        changed = np.abs(pictures[0] - pictures[1]).max(axis=-1) > 60
        allowed = np.zeros_like(changed)
        for second in instants:
            for each in renderer.objects(second):
                x0, y0, x1, y1 = each.box
                pad = 0.03
                rows = slice(int(max(0, y0 - pad) * size[1]), int((y1 + 2 * pad) * size[1]))
                cols = slice(int(max(0, x0 - pad) * size[0]), int((x1 + pad) * size[0]))
                allowed[rows, cols] = True
        assert not (changed & ~allowed).any()


def _unlit(renderer: SceneRenderer, second: float) -> np.ndarray:
    kept = {}
    renderer._sensor.expose = lambda picture, *_: kept.setdefault("picture", picture.copy())
    renderer.picture(second, 0)
    return kept["picture"]


def test_objects_are_clipped_to_the_picture_and_move_as_they_say():
    scene = make_scene("train", 2, event="wrong_way")
    (event,) = scene.events
    renderer = SceneRenderer(scene, 308, 168)
    middle = (event.start_s + event.end_s) / 2
    here, there = (
        {each.id: each for each in renderer.objects(second)}[event.actors[0]] for second in (middle, middle + 0.5)
    )
    assert here.state == "driving"
    assert all(0 <= edge <= 1 for edge in here.box)
    centre = [(each.box[0] + each.box[2]) / 2 for each in (here, there)]
    assert centre[1] - centre[0] == pytest.approx(0.5 * here.velocity[0], abs=0.02)


def test_somebody_who_fell_lies_flat():
    scene = make_scene("train", 4, event="fall")
    (event,) = scene.events
    renderer = SceneRenderer(scene, 308, 168)

    def height(second: float) -> float:
        (person,) = (each for each in renderer.objects(second) if each.id == event.actors[0])
        return person.box[3] - person.box[1]

    assert height(event.start_s + 2) < 0.5 * height(event.start_s - 0.8)


def test_night_is_darker_and_monochrome_cameras_have_no_colour():
    def scenes():
        return (make_scene("train", index) for index in range(60))

    night = next(scene for scene in scenes() if scene.conditions.monochrome)
    day = next(scene for scene in scenes() if scene.light == "day" and not scene.conditions.noise > 2)
    dark, bright = (SceneRenderer(scene, 308, 168).picture(1.0, 1) for scene in (night, day))
    assert dark.mean() < 0.6 * bright.mean()
    if night.conditions.noise < 2.5:
        assert (dark == dark[..., :1]).all()


def test_vehicles_keep_right_on_the_lane_they_are_said_to_be_on_but_for_those_that_drive_the_wrong_way():
    seen = set()
    for number in range(12):
        scene = make_scene("train", number, event=("wrong_way", "stopped_vehicle") if number % 2 else None)
        wrong = {actor for event in scene.events if event.kind == "wrong_way" for actor in event.actors}
        renderer = SceneRenderer(scene, 160, 90)
        for found in (each for second in range(0, 40, 2) for each in renderer.objects(second)):
            if found.kind != "vehicle" or found.state == "parked":
                assert found.lane == ""
            elif found.state == "driving" and found.velocity[0]:
                right = found.velocity[0] > 0
                assert found.lane == ("near" if right != (found.id in wrong) else "far"), (number, found)
                seen.add((found.lane, found.id in wrong))
    assert seen == {("near", False), ("near", True), ("far", False), ("far", True)}
