"""What training is shown: reproducible, balanced enough, and true."""

import numpy as np
import pytest

from cluster.lab.scenes.questions import phrasings, standing_question
from cluster.lab.scenes.scene import make_scene
from cluster.lab.scenes.vocabulary import EVENT_KINDS, window_label
from cluster.lab.training.examples import (
    Example,
    TowerExamples,
    ValidationExamples,
    WindowExamples,
    label,
    make_questions,
    sample_scene,
    sliding_window_example,
    window_openings,
)
from cluster.lab.training.pruning import LABELS, PrunedFrame, RenderedSample, TokenLabels


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked and answered follows from the script of a scene: its pictures are grey, and nobody looks whether an
    event is seen."""

    def grey(_scene, shape, times, _degradation) -> list[RenderedSample]:
        picture = np.full((shape.height, shape.width, 3), 128, np.uint8)
        return [RenderedSample(second, picture, ()) for second in times]

    monkeypatch.setattr("cluster.lab.training.examples.render_samples", grey)
    monkeypatch.setattr("cluster.lab.scenes.scene.seen_share", lambda _scene, _event: 1.0)


def frames_at(times: list[float], complete: set[int]) -> list[PrunedFrame]:
    """Frames without a token: what windows and labels are made from is their times alone."""
    none = TokenLabels(np.zeros((0, len(LABELS)), np.uint8), np.zeros((0, 2), np.float32), np.zeros(0, bool))
    return [
        PrunedFrame(time, i in complete, np.zeros((0, 2), np.int64), np.zeros((0, 2, 3, 14, 14), np.uint8), none)
        for i, time in enumerate(times)
    ]


def test_an_example_is_made_from_its_number_alone() -> None:
    for make in (TowerExamples("tiny", 3, frames=3), WindowExamples("tiny", 3), ValidationExamples("tiny")):
        one, same = make(11), make(11)
        assert one.scene == same.scene
        assert one.questions == same.questions
        assert all(np.array_equal(a.patches, b.patches) for a, b in zip(one.frames, same.frames, strict=True))


def test_another_seed_and_another_stage_are_other_places(undrawn: None) -> None:
    makes = (WindowExamples("tiny", 3), WindowExamples("tiny", 4), TowerExamples("tiny", 3, frames=1))
    makes += (ValidationExamples("tiny"),)
    assert len({make(number).scene for make in makes for number in range(3)}) == 12


def test_windows_open_at_the_last_complete_frame_before_their_start() -> None:
    frames = frames_at([float(i) for i in range(30)], {0, 3, 11, 19, 27})
    # Windows of 12 frames: that which ends with frame i starts at i + 1 - 12.
    got = window_openings(frames, 12)
    for index in range(30):
        start = max(0, index + 1 - 12)
        assert got[index] == max(c for c in (0, 3, 11, 19, 27) if c <= start)


def test_answers_are_those_of_the_window_that_is_seen(undrawn: None) -> None:
    for number in range(6):
        example = WindowExamples("tiny", 5)(number)
        scene = sample_scene(number, np.random.default_rng([5, 2, number]))
        assert scene.name == example.scene
        asked = [question for question in example.questions if question.kind != "memory"]
        assert asked
        for question in asked:
            first, last = example.frames[question.opening].time_s, example.frames[question.end - 1].time_s + 1.0
            assert (question.answer == "yes") is window_label(scene.events, question.kind, first, last)
            assert question.text in phrasings(question.kind)


def test_scenes_show_every_number_of_kinds_and_each_kind_as_often(undrawn: None) -> None:
    scenes = [sample_scene(number, np.random.default_rng(number)) for number in range(120)]
    shown = [{event.kind for event in scene.events} for scene in scenes]
    assert {len(kinds) for kinds in shown} == {0, 1, 2, 3}
    often = [sum(kind in kinds for kinds in shown) for kind in EVENT_KINDS]
    assert min(often) > 0.5 * max(often)


@pytest.mark.parametrize(
    ("state", "kind"), [("furniture", "left_object"), ("attended", "left_object"), ("sitting", "fall")]
)
def test_what_looks_like_an_event_is_asked_about_in_every_window(state: str, kind: str) -> None:
    scene = next(
        scene
        for scene in (make_scene("train", i, event=None) for i in range(200))
        if any(key.state == state for actor in scene.actors for key in actor.keys)
    )
    frames = frames_at([float(i) for i in range(30)], {0, 8, 16, 24})
    questions = make_questions(scene, frames, window_openings(frames, 20), np.random.default_rng(1))
    ends = {each.end for each in questions}
    assert len(ends) > 5
    assert {each.end for each in questions if each.kind == kind} == ends
    assert all(sum(each.end == end for each in questions) >= 4 for end in ends)
    assert {each.answer for each in questions} == {"no"}


def test_what_only_the_frames_before_a_windows_start_show_is_not_asked(undrawn: None) -> None:
    scene = next(
        scene
        for scene in (make_scene("train", i, event="fight") for i in range(40))
        if 8 < scene.events[0].start_s < 16 and scene.events[0].end_s < 24
    )
    event = scene.events[0]
    # A frame a second; complete ones so rare that the window opens long before its start.
    frames = frames_at([float(i) for i in range(40)], {0})
    end = int(event.end_s) + 1 + 12
    assert window_label(scene.events, "fight", 0.0, float(end)) is True
    assert window_label(scene.events, "fight", float(end - 10), float(end)) is False
    assert label(scene, "fight", frames, 0, end, window=10) is None
    assert label(scene, "fight", frames, 0, end, window=40) is True
    assert label(scene, "fall", frames, 0, end, window=10) is False


def test_contexts_open_at_complete_frames_or_are_refreshed(examples: list[Example]) -> None:
    seen = set()
    for example in [*examples, WindowExamples("tiny", 9)(3)]:
        frame_of = np.repeat(np.arange(len(example.frames)), [len(f.cells) for f in example.frames])
        assert (example.context <= frame_of).all()
        for opening in np.unique(example.context):
            assert example.frames[opening].complete
        for frame in range(len(example.frames)):
            seen.add(len(np.unique(example.context[frame_of == frame])))
    # Some frames, of the last, have tokens of two contexts: reused beside recomputed ones.
    assert seen >= {1, 2}


def test_every_event_is_asked_about_and_both_answers_occur(undrawn: None) -> None:
    make = WindowExamples("tiny", 1)
    answers: dict[str, set[str]] = {kind: set() for kind in EVENT_KINDS}
    memory = 0
    for number in range(36):
        example = make(number)
        for question in example.questions:
            if question.kind == "memory":
                memory += 1
            else:
                answers[question.kind].add(question.answer)
    assert answers == {kind: {"yes", "no"} for kind in EVENT_KINDS}
    assert memory > 10


def test_a_memory_question_sees_all_of_the_past(undrawn: None) -> None:
    asked = [p for n in range(8) for p in WindowExamples("tiny", 1)(n).questions if p.kind == "memory"]
    assert asked
    assert all(question.opening == 0 for question in asked)


def test_validation_asks_the_default_wording_of_its_own_split(undrawn: None) -> None:
    example = ValidationExamples("tiny")(1)
    assert example.scene.startswith("validation-")
    assert {question.text for question in example.questions} == {standing_question(kind) for kind in EVENT_KINDS}
    assert {question.end for question in example.questions} == set(range(4, len(example.frames) + 1, 4))


def test_validation_has_scenes_of_two_events_and_of_none(undrawn: None) -> None:
    asked = [
        {question.kind for question in ValidationExamples("tiny")(n).questions if question.answer == "yes"}
        for n in range(4)
    ]
    assert [len(kinds) for kinds in asked] == [2, 2, 2, 0]


def test_tower_examples_show_objects_more_often_than_the_ground() -> None:
    example = TowerExamples("tiny", 0, frames=12)(3)
    thinned = [frame for frame in example.frames if not frame.complete]
    assert thinned
    covered = np.concatenate([frame.labels.covered for frame in thinned])
    whole = [frame.labels.covered for frame in example.frames if frame.complete]
    if whole:
        assert covered.mean() > np.concatenate(whole).mean()


def test_a_stream_without_tokens_has_questions_all_the_same() -> None:
    scene = make_scene("train", 3, event="fall")
    example = sliding_window_example(
        scene, frames_at([0.2 + i for i in range(30)], {0, 8, 16, 24}), np.random.default_rng(0)
    )
    assert len(example.context) == 0
    assert {question.kind for question in example.questions} >= {"fall", "memory"}
    assert any(question.answer == "yes" for question in example.questions if question.kind == "fall")


@pytest.mark.parametrize("number", range(4))
def test_frames_are_bounded_and_in_order(examples: list[Example], number: int) -> None:
    example = examples[number]
    times = [frame.time_s for frame in example.frames]
    assert times == sorted(times)
    assert example.frames[0].complete
    assert sum(len(frame.cells) for frame in example.frames) <= 1700
