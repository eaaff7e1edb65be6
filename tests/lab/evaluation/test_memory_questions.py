"""Long footage: what is in it, when, and how it looks; and the questions about it, against the footage itself."""

from collections import Counter, defaultdict
from itertools import pairwise

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import ConfigError
from cluster.lab.evaluation.memory.long_scene import LongScene, visible_span
from cluster.lab.evaluation.memory.questions import Question, generate_questions, multiple_choice
from cluster.lab.scenes.actors import CameraSettings
from cluster.lab.scenes.encode import encode_missing_clips
from cluster.lab.scenes.questions import memory_questions, phrasings
from cluster.lab.scenes.render import SceneRenderer
from cluster.lab.scenes.truth import SceneTruth, truth_path
from cluster.lab.scenes.vocabulary import EVENT_KINDS

TINY = CameraSettings(128, 72, 2.0, "h264", 4.0, 0, 30)


@pytest.fixture(scope="module")
def hour():
    return LongScene(3600, 5)


def visible(footage, at):
    return [actor for actor in footage.scene.actors if actor.state_at(at) is not None]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.floats(60, 900),
    st.floats(8, 60),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_stretches_lie_apart_and_nobody_is_there_in_between(seed, seconds, quiet_s, event_share):
    footage = LongScene(seconds, seed, quiet_s, event_share)
    ends = [0.0, *(episode.end_s for episode in footage.episodes)]
    starts = [*(episode.start_s for episode in footage.episodes), seconds]
    assert all(start - end >= 3.99 for end, start in zip(ends, starts, strict=True))
    for at in footage.quiet_instants:
        assert not [actor for actor in visible(footage, at) if actor.kind != "bag"]
    assert all(0 <= key.t <= seconds for actor in footage.scene.actors for key in actor.keys)
    assert [actor.id for actor in footage.scene.actors] == list(range(len(footage.scene.actors)))


def test_the_same_arguments_give_the_same_hour_and_another_seed_another(hour):
    again = LongScene(3600, 5)
    assert again.scene == hour.scene
    assert LongScene(3600, 6).scene.actors != hour.scene.actors


def test_there_is_more_quiet_than_life_and_everybody_is_seen_for_two_seconds(hour):
    busy = sum(episode.end_s - episode.start_s for episode in hour.episodes)
    assert len(hour.episodes) > 30
    assert busy < 0.5 * hour.seconds
    for actor in hour.scene.actors:
        first, last = visible_span(actor)
        assert actor.kind == "bag" or last - first >= 2.0


def test_no_two_vehicles_are_there_at_once(hour):
    spans = sorted((a.keys[0].t, a.keys[-1].t) for a in hour.scene.actors if a.kind == "vehicle")
    assert all(later[0] > earlier[1] for earlier, later in pairwise(spans))


def test_rare_vehicles_come_once_and_the_only_stop_is_an_event(hour):
    vehicles = [actor for actor in hour.scene.actors if actor.kind == "vehicle"]
    colors = Counter(actor.color for actor in vehicles)
    assert sorted(colors.values())[:2] == [1, 1]
    assert len(colors) == 5
    (stopped,) = [a for a in vehicles if any(key.state == "stopped" for key in a.keys)]
    (event,) = hour.scene.events
    assert (event.kind, event.actors) == ("stopped_vehicle", (stopped.id,))
    middle = (event.start_s + event.end_s) / 2
    assert stopped.state_at(middle).state == "stopped"
    assert stopped.state_at(middle).vx == 0


def test_a_third_of_the_episodes_are_events_of_all_kinds_and_the_needles_stay(hour):
    eventful = LongScene(3600, 5, event_share=1 / 3)
    assert {event.kind for event in eventful.scene.events} == set(EVENT_KINDS)
    assert 0.2 < len(eventful.scene.events) / len(eventful.episodes) < 0.5
    for event in eventful.scene.events:
        at = (event.start_s + event.end_s) / 2
        (episode,) = [each for each in eventful.episodes if each.start_s <= at <= each.end_s]
        assert event in episode.events
    assert len(hour.scene.events) == 1


def test_a_picture_late_in_an_hour_shows_who_is_there(hour):
    renderer = SceneRenderer(hour.scene, 256, 144)
    (event,) = hour.scene.events
    at = (event.start_s + event.end_s) / 2
    (vehicle,) = [each for each in renderer.objects(at) if each.kind == "vehicle"]
    left, top, right, bottom = vehicle.box
    part = np.s_[int(top * 144) : int(bottom * 144), int(left * 256) : int(right * 256)]
    empty = [renderer.picture(moment, 7).astype(int) for moment in hour.quiet_instants[3:5]]
    there = renderer.picture(at, 7).astype(int)
    # Light drifts by some per cent, and leaves sway.
    assert np.abs(empty[0] - empty[1]).mean() < 12
    assert np.abs(there - empty[0])[part].mean() > 2 * np.abs(empty[0] - empty[1])[part].mean()


def test_it_is_encoded_as_other_scenes_are_and_made_once(tmp_path):
    footage = LongScene(60, 3, quiet_s=8, camera=TINY)
    clip = footage.clip(tmp_path)
    assert encode_missing_clips([clip], tmp_path) == 1
    assert encode_missing_clips([clip], tmp_path) == 0
    with av.open(str(clip.path)) as container:
        assert sum(1 for _ in container.decode(video=0)) == 120
    truth = SceneTruth.load(truth_path(clip.path))
    assert truth.seconds == 60
    assert truth.scene_events == footage.scene.events


def test_questions_are_balanced_at_every_moment_and_sorted():
    hour = LongScene(3600, 5, event_share=1 / 3)
    asked = generate_questions(hour, per_kind=16)
    assert Counter(question.kind for question in asked) == dict.fromkeys(
        ("event", "needle", "counting", "order", "multi-turn"), 16
    )
    assert [q.at_s for q in asked] == sorted(q.at_s for q in asked)
    tally = defaultdict(Counter)
    for question in asked:
        if question.kind != "counting":
            tally[question.kind, question.at_s][question.answers] += 1
    assert {len(each) for (kind, _), each in tally.items() if kind == "multi-turn"} == {4}
    assert {len(each) for (kind, _), each in tally.items() if kind != "multi-turn"} == {2}
    assert all(len(set(each.values())) == 1 for each in tally.values())
    counts = Counter(question.answers for question in asked if question.kind == "counting")
    assert len(counts) >= 5
    assert generate_questions(hour, per_kind=16) == asked
    assert generate_questions(hour, per_kind=16, seed=1) != asked


@pytest.mark.parametrize("seed", range(2))
def test_answers_are_those_of_the_footage(seed):
    footage = LongScene(600, seed, quiet_s=15, event_share=1 / 3)
    kind_of = {text: kind for kind in EVENT_KINDS for text in phrasings(kind)}
    asked = generate_questions(footage, per_kind=40)
    assert len({kind_of[q.turns[0]] for q in asked if q.kind == "event"}) > 2
    for question in asked:
        since = question.since_s or 0.0
        there = [
            (actor, span)
            for actor in footage.scene.actors
            if actor.kind != "bag" and since <= (span := visible_span(actor))[0] and span[1] <= question.at_s
        ]
        for text, answer in zip(question.turns, question.answers, strict=True):
            words = text.split()
            if text in kind_of:
                happened = [
                    (event.start_s, event.end_s)
                    for event in footage.scene.events
                    if event.kind == kind_of[text] and since <= event.start_s and event.end_s <= question.at_s
                ]
                assert answer == ("yes" if happened else "no")
                assert set(question.evidence) == set(happened)
            elif "first" in words:
                first = min(there, key=lambda pair: pair[1])[0].kind
                assert answer == first
            elif words[:2] == ["How", "many"]:
                kind = "vehicle" if "vehicles" in words else "person"
                number = sum(actor.kind == kind for actor, _ in there)
                assert answer == ("zero", "one", "two", "three", "four", "five", "six")[number]
                assert len(question.evidence) == number
            else:
                color = words[2] if words[0] == "Did" else words[3]
                matching = [a for a, _ in there if a.kind == "vehicle" and a.color == color]
                if "stop" in words:
                    matching = [a for a in matching if any(key.state == "stopped" for key in a.keys)]
                assert len(matching) == (answer == "yes")
        for start, end in question.evidence:
            assert since <= start < end <= question.at_s


def test_wordings_are_those_that_were_taught():
    footage = LongScene(900, 1, event_share=1 / 3)
    colors = ("red", "blue", "green", "white", "black", "yellow", "grey")
    taught = {text.text for text in memory_questions(footage.scene)}
    forms = {" ".join("*" if word in colors else word for word in text.split()) for text in taught}
    forms |= {"Which came first, a person or a vehicle?", "What was seen first, a vehicle or a person?"}
    forms |= {text for kind in EVENT_KINDS for text in phrasings(kind)}
    asked = generate_questions(footage, per_kind=40)
    assert {" ".join("*" if w in colors else w for w in text.split()) for q in asked for text in q.turns} <= forms


def test_footage_in_which_nothing_happens_is_refused():
    short = next(footage for seed in range(200) if not (footage := LongScene(60, seed, quiet_s=60)).episodes)
    assert short.quiet_instants == (0.0, 60)
    with pytest.raises(ConfigError, match="holds no episode; make it longer"):
        generate_questions(LongScene(60, short.seed, quiet_s=60), per_kind=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": 20}, "at least 60 s"),
        ({"seed": -1}, "at least 0"),
        ({"quiet_s": 1}, "at least 8 s"),
    ],
)
def test_wrong_arguments_say_what_is_wrong(change, message):
    with pytest.raises(ConfigError, match=message):
        LongScene(**{"seconds": 60, "seed": 0, **change})


def test_questions_need_an_answer_for_each_turn_and_a_right_option():
    with pytest.raises(ConfigError, match="2 turns with 1 answers"):
        Question("needle", ("One?", "Two?"), ("yes",), 1.0)
    with pytest.raises(ConfigError, match="option 2 cannot be right"):
        multiple_choice("plot", "Which?", ("this", "that"), 2, 1.0)
    with pytest.raises(ConfigError, match="needs 2 to 10 options"):
        multiple_choice("plot", "Which?", ("this",), 0, 1.0)
    choice = multiple_choice("plot", "Which?", ("this", "that"), 1, 1.0)
    assert choice.turns[0].splitlines()[:3] == ["Which?", "A. this", "B. that"]
    assert choice.answers == ("B",)
    with pytest.raises(ConfigError, match="questions of a kind must be at least 1, not 0"):
        generate_questions(LongScene(60, 0), per_kind=0)
