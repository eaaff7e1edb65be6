"""Other questions in mid-window: answered as if they had been asked from the start, with nothing computed anew."""

import pytest

from cluster.engine.native import NativeEngine
from cluster.types import Question

ASKED = (Question("q", "Is anyone climbing the fence?"),)
OTHER = (Question("car", "Is there a car?", 0.7), Question("q", "Is anyone climbing the fence?", 0.9))


def test_the_window_goes_on_and_the_answers_are_those_of_an_engine_that_was_always_asked_them(
    engine, model, make_camera, make_spec, run
) -> None:
    camera = make_camera(kept=0.5)
    samples = [camera.sample(i) for i in range(12)]
    engine.admit(make_spec(questions=ASKED))
    assert {answer.question for answer in run(engine, samples[:7])} == {"q"}
    engine.admit(make_spec(questions=OTHER, priority="critical"))
    changed = run(engine, samples[7:])
    always = NativeEngine(model, max_new_tokens=4)
    always.admit(make_spec(questions=OTHER))
    right = [answer for answer in run(always, samples) if answer.window >= 3]
    assert [(a.window, a.question) for a in changed] == [(a.window, a.question) for a in right]
    assert changed[0].tokens.reused > 0
    for mine, others in zip(changed, right, strict=True):
        assert mine.score == pytest.approx(others.score, abs=1e-5)
        assert mine.tokens == others.tokens


def test_a_threshold_alone_changes_what_is_positive(engine, make_camera, make_spec, run) -> None:
    camera = make_camera(kept=0.5)
    for threshold in (1e-9, 1 - 1e-9):
        engine.admit(make_spec(questions=(Question("q", ASKED[0].text, threshold),)))
        begin = 0 if threshold < 0.5 else 2
        [answer] = run(engine, [camera.sample(begin), camera.sample(begin + 1)])
        assert answer.positive is (threshold < 0.5)
