"""When answers stand, and when they must not."""

from dataclasses import replace

import numpy as np
import pytest

from cluster.control.demand import Demand, work
from cluster.control.ladder import default
from cluster.types import Answer, Question


@pytest.fixture
def night(make_camera):
    return make_camera(still=True)


@pytest.fixture
def gated_spec(make_spec):
    return make_spec(static_gate=True, max_idle_s=6.0)


def gated(answers: list[Answer]) -> list[bool]:
    return [answer.gated for answer in answers]


def test_a_still_camera_costs_nothing_but_looks_again_in_time(engine, night, gated_spec, run) -> None:
    engine.admit(gated_spec)
    answers = run(engine, [night.sample(i) for i in range(16)])
    # Two windows to begin with, then at most 4.05 s on one answer: two strides, and the next is computed. The camera's
    # name (its CRC-32) takes off 0.977 of a third of 6 s.
    assert gated(answers) == [False, False, True, True, False, True, True, False]
    assert [answer.window for answer in answers] == list(range(8))
    standing = [answer for answer in answers if answer.gated]
    assert all(answer.tokens.computed == answer.tokens.encoded == 0 for answer in standing)
    assert all(a.tokens.kept == a.tokens.reused + a.tokens.refreshed + a.tokens.new for a in answers)
    assert answers[2].score == answers[1].score
    assert (answers[2].start, answers[2].end) == (0, 6_000_000)
    assert engine.stats.gated == 0


def test_cameras_that_became_quiet_together_are_computed_at_different_times(make_spec) -> None:
    stand = np.array([make_spec(f"camera-{number}", max_idle_s=60.0).idle_s for number in range(1000)])
    assert stand.min() > 40.0
    assert stand.max() <= 60.0
    assert (np.histogram(stand, 10, (40.0, 60.0))[0] > 50).all()


def test_motion_ends_it_at_once_and_skipped_windows_do_not_hide_it(engine, night, gated_spec, run) -> None:
    engine.admit(gated_spec)
    assert gated(run(engine, [night.sample(i) for i in range(6)])) == [False, False, True]
    moving = replace(night.sample(6), activity=0.1)
    engine.push(moving)
    skipped = engine.push(night.sample(7))
    assert len(skipped) == 1
    # Window 3 is never stepped; window 4 has only still frames of its own, but not since the last computed one.
    (answer,) = run(engine, [night.sample(8), night.sample(9)])
    assert (answer.window, answer.gated) == (4, False)
    assert gated(run(engine, [night.sample(i) for i in (10, 11)])) == [True]


def test_a_standing_answer_is_given_again_after_another_camera_s_window_failed(
    engine, night, gated_spec, make_camera, make_spec, run, monkeypatch
) -> None:
    engine.admit(gated_spec)
    run(engine, [night.sample(i) for i in range(4)])
    engine.admit(make_spec("moving"))
    moving = make_camera(stream="moving")
    requests = [request for i in (0, 1) for request in engine.push(moving.sample(i))]
    requests += [request for i in (4, 5) for request in engine.push(night.sample(i))]

    def fail(_work) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as broken:
        broken.setattr(engine, "_compute", fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            engine.step(requests)
    answers = [answer for request in requests for answer in engine.step([request])]
    assert [(answer.stream, answer.gated) for answer in answers] == [("moving", False), ("cam", True)]


def test_an_anchor_counts_as_any_other_frame(engine, night, gated_spec, run) -> None:
    """Anchors of a quiet camera let its answers stand; one in which something appeared does not."""
    engine.admit(gated_spec)
    run(engine, [night.sample(i) for i in range(4)])
    quiet = [replace(night.sample(i), anchor=True) for i in (4, 5)]
    assert gated(run(engine, quiet)) == [True]
    assert gated(run(engine, [replace(night.sample(6), anchor=True, activity=0.02), night.sample(7)])) == [False]
    assert gated(run(engine, [night.sample(i) for i in (8, 9)])) == [True]


@pytest.mark.parametrize("still", [0, 1, 2, 3])
def test_a_window_after_gated_ones_computes_their_anchors_and_no_more(engine, make_camera, gated_spec, run, still):
    """Windows of four strides, of two frames each, of which the first is an anchor; and what scheduling assumes."""
    engine.admit(replace(gated_spec, max_idle_s=60.0))
    night = make_camera(still=True, anchor_every=2)
    samples = [night.sample(i) for i in range(4 + 2 * still)]
    assert gated(run(engine, samples)) == [False, False] + [True] * still
    own = [replace(night.sample(4 + 2 * still), activity=0.1), night.sample(5 + 2 * still)]
    assert (own[0].anchor, own[1].tokens) == (True, 0)
    (answer,) = run(engine, own)
    whole = own[0].tokens
    assert not answer.gated
    assert answer.tokens.encoded == whole * (1 + still)
    camera = Demand(
        "cam", window_s=8.0, stride_s=2.0, fps=2.0, temporal=2, frame_tokens=whole, kept=0.0, anchor_interval_s=2.0
    )
    assert work(camera, default().rungs[0], gated=still).encoded == pytest.approx(answer.tokens.encoded)


def test_other_questions_a_fresh_start_or_no_gate_are_computed(engine, night, gated_spec, run) -> None:
    engine.admit(gated_spec)
    assert gated(run(engine, [night.sample(i) for i in range(6)]))[-1]
    engine.admit(replace(gated_spec, questions=(Question("q", "Is there a fire or smoke?"),)))
    assert gated(run(engine, [night.sample(i) for i in (6, 7)])) == [False]
    fresh = [replace(night.sample(i), fresh=i == 8) for i in range(8, 14)]
    assert gated(run(engine, fresh)) == [False, False, True]
    engine.admit(replace(gated_spec, static_gate=False))
    assert gated(run(engine, [night.sample(i) for i in (14, 15)])) == [False]


def test_frames_wait_as_pixels_and_leave_unencoded(engine, night, make_spec, run) -> None:
    engine.admit(make_spec(static_gate=True, max_idle_s=1000.0))
    run(engine, [night.sample(i) for i in range(4)])
    most = 0
    for index in range(4, 60):
        (*_,) = run(engine, [night.sample(index)])
        most = max(most, engine.memory_bytes("cam"))
    stream = engine._streams["cam"]
    assert all(frame.tokens is None for frame in stream.frames)
    assert stream.windows_since_fresh == 2
    assert len(stream.frames) <= 12
    assert most <= stream.kv.nbytes + 12 * night.sample(0).patches.nbytes + 100_000


def test_motion_that_came_and_left_unseen_still_counts(engine, night, make_spec, run) -> None:
    engine.admit(make_spec(static_gate=True, max_idle_s=1000.0))
    assert gated(run(engine, [night.sample(i) for i in range(6)])) == [False, False, True]
    engine.push(replace(night.sample(6), activity=0.1))
    for index in range(7, 27):
        engine.push(night.sample(index))
    assert all(not frame.moving for frame in engine._streams["cam"].frames)
    assert gated(run(engine, [night.sample(27)])) == [False]
