import dataclasses

import numpy as np
import pytest

from cluster.errors import ConfigError
from cluster.lab.scenes.actors import Actor, Conditions, Keyframe
from cluster.lab.scenes.layouts import _TEST_TEXTURES, _TRAIN_TEXTURES, ASPECT
from cluster.lab.scenes.questions import memory_questions, phrasings, standing_question
from cluster.lab.scenes.render import SceneRenderer
from cluster.lab.scenes.scene import _CAMERAS, make_scene
from cluster.lab.scenes.vocabulary import EVENT_KINDS, SPLITS


@pytest.fixture
def undrawn(monkeypatch):
    """Scenes are taken as they are written, without pictures that tell whether their events are seen."""
    monkeypatch.setattr("cluster.lab.scenes.scene.seen_share", lambda _scene, _event: 1.0)


@pytest.mark.parametrize("split", SPLITS)
def test_the_same_index_writes_the_same_scene_and_another_split_another(split):
    scene = make_scene(split, 7)
    assert scene == make_scene(split, 7)
    assert scene.name.startswith(split)
    assert all(scene.actors != make_scene(other, 7).actors for other in SPLITS if other != split)


@pytest.mark.parametrize("kind", EVENT_KINDS)
def test_a_forced_event_is_the_only_one_and_lies_in_the_scene(kind, undrawn):
    for index in range(20):
        (event,) = make_scene("train", index, event=kind).events
        assert event.kind == kind
        assert 5.0 < event.start_s < event.end_s <= 40.0
        assert event.actors


def test_without_events_there_are_distractors_only():
    scenes = [make_scene("validation", index, event=None) for index in range(20)]
    assert all(scene.events == () for scene in scenes)
    assert any(scene.actors for scene in scenes)


def test_the_test_split_shares_no_layout_texture_or_camera_with_training(undrawn):
    seen = [make_scene("train", index) for index in range(60)]
    held_out = [make_scene("test", index) for index in range(60)]
    assert {scene.layout.name for scene in seen}.isdisjoint(scene.layout.name for scene in held_out)
    assert {scene.camera for scene in seen}.isdisjoint(scene.camera for scene in held_out)
    for ours, theirs in zip(_TRAIN_TEXTURES, _TEST_TEXTURES, strict=True):
        assert set(ours).isdisjoint(theirs)
    assert set(_CAMERAS["train"]).isdisjoint(_CAMERAS["test"])


def test_training_draws_no_view_that_lies_among_those_of_test(undrawn):
    """Names could differ and views be the same: no road of training is where a lot's is, and none as steep as a
    boulevard's."""
    seen = [make_scene("train", index).layout for index in range(300)]
    held_out = [make_scene("test", index).layout for index in range(300)]
    lots = [layout.road for layout in held_out if layout.name == "lot"]
    boulevards = [layout.slope for layout in held_out if layout.name == "boulevard"]
    assert not [layout.road for layout in seen if min(lots) <= layout.road <= max(lots)]
    assert not [layout.slope for layout in seen if min(boulevards) <= layout.slope <= max(boulevards)]


def test_training_has_views_beyond_those_it_is_validated_on(undrawn):
    layouts = {split: [make_scene(split, index).layout for index in range(150)] for split in ("train", "validation")}

    def spread(split, of):
        values = [of(layout) for layout in layouts[split]]
        return max(values) - min(values)

    for of in (
        lambda layout: layout.road,
        lambda layout: layout.horizon,
        lambda layout: layout.slope,
        lambda layout: layout.zone.x0,
        lambda layout: layout.body,
    ):
        assert spread("train", of) > 1.05 * spread("validation", of)


def test_every_view_has_room_for_both_lanes_a_walk_and_a_zone_outside_of_the_road():
    for index in range(300):
        layout = make_scene("train", index, event=None).layout
        zone = layout.zone
        assert layout.pavements()
        assert 0 <= zone.x0 < zone.x1 <= ASPECT
        assert layout.horizon < zone.y0 < zone.y1 < 1
        for x in (zone.x0, zone.x1):
            assert zone.y1 <= layout.road_top(x) or zone.y0 >= layout.road_bottom(x)
        assert all(layout.lane_y(near, x) < 1 for near in (True, False) for x in (0, ASPECT))


def test_training_has_more_of_what_looks_like_an_event():
    def alike(split):
        states = ("furniture", "attended", "sitting", "crouching", "parked")
        scenes = [make_scene(split, index, event=None) for index in range(80)]
        return sum(any(key.state in states for key in actor.keys) for scene in scenes for actor in scene.actors)

    assert alike("train") > 1.3 * alike("validation")


def test_several_events_can_be_asked_for():
    scene = make_scene("train", 4, event=("fight", "wrong_way", "fall"))
    assert {event.kind for event in scene.events} == {"fight", "wrong_way", "fall"}
    with pytest.raises(ConfigError, match="unknown event 'robbery'"):
        make_scene("train", 4, event=("fall", "robbery"))


def test_strata_change_what_they_name(undrawn):
    scenes = [make_scene("train", index) for index in range(120)]
    night = [scene for scene in scenes if "night" in scene.strata]
    noisy = [scene for scene in scenes if "noisy" in scene.strata]
    assert night
    assert all(scene.light == "night" and scene.conditions.level < 0.55 for scene in night)
    assert noisy
    assert min(scene.conditions.noise for scene in noisy) > max(
        scene.conditions.noise for scene in scenes if "noisy" not in scene.strata
    )
    for scene in scenes:
        people_of_events = {id for event in scene.events for id in event.actors}
        contrasts = [actor.contrast for actor in scene.actors if actor.id in people_of_events]
        assert all((contrast < 0.7) == ("low_contrast" in scene.strata) for contrast in contrasts)


def test_wrong_way_goes_against_the_arrows_and_traffic_with_them(undrawn):
    for index in range(30):
        scene = make_scene("train", index, event="wrong_way")
        (event,) = scene.events
        for actor in scene.actors:
            if actor.kind != "vehicle" or actor.keys[0].state == "parked":
                continue
            near = actor.keys[0].y > scene.layout.middle(actor.keys[0].x)
            direction = np.sign(actor.keys[-1].x - actor.keys[0].x)
            assert (direction == (1 if near else -1)) != (actor.id in event.actors)


def stands_in(zone, place):
    return place is not None and zone.x0 <= place.x <= zone.x1 and zone.y0 <= place.y <= zone.y1


def test_nobody_but_intruders_enters_the_zone(undrawn):
    for index in range(60):
        scene = make_scene("train", index, event="intrusion" if index % 2 else None)
        allowed = {id for event in scene.events for id in event.actors}
        entered = set()
        for actor in scene.actors:
            if actor.kind != "person":
                continue
            for second in np.arange(0, scene.seconds, 0.5):
                if stands_in(scene.layout.zone, actor.state_at(second)):
                    entered.add(actor.id)
        assert entered == allowed


def test_an_intrusion_lasts_while_somebody_is_in_the_zone(undrawn):
    for index in range(40):
        scene = make_scene("train", index, event="intrusion")
        (event,) = scene.events
        actor, zone = scene.actors[event.actors[0]], scene.layout.zone
        times = np.arange(0, scene.seconds, 0.02)
        inside = [second for second in times if stands_in(zone, actor.state_at(second))]
        assert inside[0] == pytest.approx(event.start_s, abs=0.05)
        assert inside[-1] == pytest.approx(event.end_s, abs=0.05)


def test_a_scene_is_drawn_anew_where_something_hides_its_event():
    """What is seen is the difference that the event's actor makes to the picture, as a share of what it makes alone."""
    shares = []
    # Of the first 24 those in which the event of the first draft is hidden: at most 0.57 of it is seen.
    for index in (2, 8, 13, 17, 19, 20):
        scene = make_scene("train", index, event=("fall", "stopped_vehicle"))
        event = next(each for each in scene.events if each.kind == "fall")
        fallen = event.actors[0]
        bare = dataclasses.replace(
            scene, actors=tuple(each for each in scene.actors if each.id == fallen), tree=False, pole=False
        )
        together, alone = _differences(scene, fallen), _differences(bare, fallen)
        times = np.arange(event.start_s, event.end_s, 2.0)
        seen = [together(second) / whole for second in times if (whole := alone(second))]
        shares.append(np.mean([share >= 0.5 for share in seen]))
    # Of other instants, at another size, than those by which it was chosen.
    assert min(shares) > 0.6
    assert min(shares) < 0.95, "something passes in front now and then"


def _differences(scene, actor_id):
    """Function from an instant to the number of pixels in which the scene differs with and without the actor. Its
    shadow is there in both."""
    even = dataclasses.replace(
        scene,
        conditions=Conditions((1.0, 1.0, 1.0), 1.0),
        layout=dataclasses.replace(scene.layout, zone=dataclasses.replace(scene.layout.zone, fence=False)),
    )
    with_and_without = [
        SceneRenderer(
            dataclasses.replace(
                even,
                actors=tuple(
                    dataclasses.replace(each, contrast=contrast if each.id == actor_id else 1.0) for each in even.actors
                ),
            ),
            308,
            168,
        )
        for contrast in (1.0, 0.0)
    ]

    def count(second):
        there, gone = (renderer.picture(second, 0).astype(int) for renderer in with_and_without)
        return int((np.abs(there - gone).max(axis=-1) > 8).sum())

    return count


def test_a_parked_car_is_seen_and_does_not_pass():
    scene = make_scene("train", 3, event=None)
    car = Actor(0, "vehicle", (Keyframe(-1.0, 0.9, 0.4, "parked"), Keyframe(41.0, 0.9, 0.4, "parked")), "red", "car")
    walker = Actor(1, "person", (Keyframe(5.0, 0.2, 0.9, "walking"), Keyframe(15.0, 1.6, 0.9, "walking")), "blue")
    answers = {q.text: q.answer for q in memory_questions(dataclasses.replace(scene, actors=(car, walker)))}
    assert answers["Was there a red vehicle?"] == "yes"
    assert answers["How many vehicles were seen?"] == "one"
    assert answers["Did a red vehicle pass earlier?"] == "no"
    assert answers["Did a red vehicle stop here earlier?"] == "no"
    assert answers["How many vehicles passed?"] == "zero"
    assert "Which came first, a person or a vehicle?" not in answers


def test_a_left_bag_stays_where_its_owner_left_it():
    scene = make_scene("train", 3, event="left_object")
    (event,) = scene.events
    owner, bag = (scene.actors[id] for id in event.actors)
    assert (owner.kind, bag.kind) == ("person", "bag")
    assert bag.state_at(event.start_s + 1).state == "left"
    assert bag.state_at(event.start_s - 0.1).state == "attended"
    assert owner.carries[1] == bag.keys[0].t


@pytest.mark.parametrize(
    ("split", "index", "more", "says"),
    [
        ("holdout", 0, {}, "unknown split"),
        ("train", -1, {}, "at least 0"),
        ("train", 0, {"event": "robbery"}, "unknown event 'robbery'"),
        ("train", 0, {"seconds": 5.0}, "at least 24 s"),
        ("train", 0, {"seconds": float("nan")}, "at least 24 s, not nan"),
        ("train", 0, {"seconds": float("inf")}, "at least 24 s, not inf"),
    ],
)
def test_impossible_scenes_are_refused(split, index, more, says):
    with pytest.raises(ConfigError, match=says):
        make_scene(split, index, **more)


def test_every_kind_has_several_phrasings_and_no_two_kinds_share_one():
    all_texts = [text for kind in EVENT_KINDS for text in phrasings(kind)]
    assert len(set(all_texts)) == len(all_texts)
    assert all(phrasings(kind)[0] == standing_question(kind) and len(phrasings(kind)) >= 3 for kind in EVENT_KINDS)


def test_memory_answers_follow_from_the_actors():
    scene = make_scene("train", 11, event="stopped_vehicle")
    (event,) = scene.events
    color = scene.actors[event.actors[0]].color
    answers = {question.text: question.answer for question in memory_questions(scene)}
    assert answers[f"Did a {color} vehicle stop here earlier?"] == "yes"
    assert answers[f"Was there a {color} vehicle?"] == "yes"
    bare = dataclasses.replace(scene, actors=())
    empty = {question.text: question.answer for question in memory_questions(bare)}
    assert empty["How many people were seen?"] == "zero"
    assert "Which came first, a person or a vehicle?" not in empty


def test_memory_is_asked_of_the_past_only():
    scene = make_scene("train", 11, event="stopped_vehicle")
    (event,) = scene.events
    color = scene.actors[event.actors[0]].color
    before = {q.text: q.answer for q in memory_questions(scene, at_s=event.start_s)}
    assert before.get(f"Did a {color} vehicle stop here earlier?", "no") == "no"
