"""What is computed of a window before it ends; the conformance matrix has that results are the same."""

import time
from types import SimpleNamespace

import pytest
import torch

from cluster.engine.native import NativeEngine
from cluster.errors import NotFiniteError
from cluster.memory import writer
from cluster.memory.bank import MemoryBank
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.types import FrameSample, MemorySpec


@pytest.fixture
def engine(engine: NativeEngine) -> NativeEngine:
    """Every frame is worth a pass."""
    engine.ahead_rows = 1, 1
    return engine


def settle(engine: NativeEngine) -> int:
    """Compute all that is known; number of passes."""
    passes = 0
    while engine.prefill_ahead():
        passes += 1
    return passes


def drive(engine: NativeEngine, samples: list) -> list:
    answers = []
    for sample in samples:
        for request in engine.push(sample):
            answers += engine.step([request])
        settle(engine)
    return answers


def push_and_settle(engine: NativeEngine, sample: FrameSample) -> int:
    assert not engine.push(sample)
    return settle(engine)


def scores(answers: list) -> list[float]:
    return [answer.score for answer in answers]


def test_frames_have_kv_before_their_window_ends(engine, make_camera, make_spec) -> None:
    camera = make_camera()
    engine.admit(make_spec(stride_s=4.0))
    for index in range(3):
        engine.push(camera.sample(index))
        assert settle(engine) == 1
        assert [frame.has_kv for frame in engine._streams["cam"].frames] == [True] * (index + 1)
    assert settle(engine) == 0


def test_what_the_next_window_refreshes_is_computed_after_the_answer(engine, make_camera, make_spec) -> None:
    camera = make_camera(kept=1.0)
    engine.admit(make_spec(refresh="all"))
    for index in range(9):
        for request in engine.push(camera.sample(index)):
            engine.step([request])
    assert settle(engine) > 0
    stream = engine._streams["cam"]
    number = stream.clock.number
    assert stream.progress is not None
    assert stream.progress.window == number
    assert all((frame.computed[0] == number).all() for frame in stream.frames)
    (request,) = engine.push(camera.sample(9))
    (answer,) = engine.step([request])
    # From 2 s, where the window opens, to 8 s: six tokens a second.
    assert (answer.tokens.refreshed, answer.tokens.new) == (36, 12)
    assert engine.stats.windows[0].tokens == answer.tokens


def test_a_window_stepped_again_after_scores_that_were_no_numbers_reuses_nothing(
    engine, make_camera, make_spec, monkeypatch
) -> None:
    """It was counted as below nothing, which metrics refuse, so that its camera was started anew."""
    camera = make_camera(kept=1.0)
    engine.admit(make_spec(stride_s=4.0))
    assert [push_and_settle(engine, camera.sample(index)) for index in range(3)] == [1, 1, 1]
    (request,) = engine.push(camera.sample(3))
    logits = engine.model.logits
    monkeypatch.setattr(engine.model, "logits", lambda hidden: logits(hidden).fill_(float("nan")))
    with pytest.raises(NotFiniteError):
        engine.step([request])
    monkeypatch.undo()
    (answer,) = engine.step([request])
    assert (answer.tokens.reused, answer.tokens.refreshed, answer.tokens.new) == (0, 18, 6)


def test_few_rows_wait_for_more(engine, make_camera, make_spec) -> None:
    """A frame has six tokens."""
    engine.ahead_rows = 13, 100
    camera = make_camera(kept=1.0)
    engine.admit(make_spec(stride_s=8.0))
    assert [push_and_settle(engine, camera.sample(index)) for index in range(7)] == [0, 0, 1, 0, 0, 1, 0]


def test_the_window_that_ends_soonest_is_first(engine, make_camera, make_spec) -> None:
    for name, stride_s in (("late", 8.0), ("soon", 4.0)):
        engine.admit(make_spec(name, stride_s=stride_s))
        engine.push(make_camera(stream=name).sample(0))
    assert engine.prefill_ahead()
    assert engine._streams["soon"].frames[0].has_kv
    assert not engine._streams["late"].frames[0].has_kv
    assert settle(engine) == 1
    assert engine._streams["late"].frames[0].has_kv


def test_nothing_is_computed_while_the_answer_may_stand(engine, make_camera, make_spec) -> None:
    night, day = make_camera(still=True), make_camera()
    engine.admit(make_spec(static_gate=True, stride_s=4.0, max_idle_s=60.0))
    drive(engine, [night.sample(index) for index in range(9)])
    stream = engine._streams["cam"]
    assert not stream.frames[-1].has_kv
    # Somebody comes.
    assert push_and_settle(engine, day.sample(9)) > 0
    assert stream.frames[-1].has_kv


def test_patient_cameras_are_left_for_their_step(engine, make_camera, make_spec) -> None:
    engine.admit(make_spec(patient=True))
    engine.push(make_camera().sample(0))
    assert settle(engine) == 0


@pytest.mark.parametrize("policy", ["anchors", "all"])
def test_a_move_takes_the_progress_along(engine, model, make_camera, make_spec, policy) -> None:
    camera = make_camera(kept=0.5)
    samples = [camera.sample(index) for index in range(20)]
    spec = make_spec(stride_s=4.0, refresh=policy)
    engine.admit(spec)
    expected = drive(engine, samples)
    here, there = NativeEngine(model), NativeEngine(model)
    here.ahead_rows = there.ahead_rows = 1, 1
    here.admit(spec)
    answers = drive(here, samples[:14])
    there.import_stream(spec, here.export_stream("cam"))
    answers += drive(there, samples[14:])
    assert scores(answers) == pytest.approx(scores(expected))
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]


def test_a_shorter_stride_ends_windows_before_frames_that_have_kv(engine, model, make_camera, make_spec, run) -> None:
    """Answers are those of an engine that computes nothing ahead, and so are counts behind what it has computed."""
    camera, answers = make_camera(kept=0.5), []
    for each in (engine, NativeEngine(model)):
        each.admit(make_spec(stride_s=8.0))
        run(each, [camera.sample(index) for index in range(14)])
        if each is engine:
            assert settle(each) > 0
        each.admit(make_spec(refresh="budget"))
        answers.append(run(each, [camera.sample(index) for index in range(14, 20)]))
        assert len(each._streams["cam"].kv) == each.pool.used
    ahead, alone = answers
    assert [answer.end // 1_000_000 for answer in ahead] == [10, 12, 14, 16, 18, 20]
    computed = [[(answer.tokens.kept, answer.tokens.computed) for answer in each[1:]] for each in answers]
    assert computed[0] == computed[1]
    assert scores(ahead) == pytest.approx(scores(alone), abs=1e-5)


def test_another_policy_refreshes_again(engine, make_camera, make_spec) -> None:
    camera = make_camera()
    engine.admit(make_spec(refresh="none"))
    drive(engine, [camera.sample(index) for index in range(13)])
    engine.admit(make_spec(refresh="all"))
    settle(engine)
    (request,) = engine.push(camera.sample(13))
    (answer,) = engine.step([request])
    assert answer.tokens.reused == 0


def test_a_window_that_is_skipped_is_like_any_earlier_one(engine, model, make_camera, make_spec) -> None:
    camera = make_camera()
    answers = {}
    for ahead in (False, True):
        fresh = NativeEngine(model)
        fresh.ahead_rows = 1, 1
        fresh.admit(make_spec(refresh="all"))
        answers[ahead] = []
        for index in range(20):
            for request in fresh.push(camera.sample(index)):
                if request.window not in (2, 5, 6):
                    answers[ahead] += fresh.step([request])
            if ahead:
                settle(fresh)
    assert scores(answers[True]) == pytest.approx(scores(answers[False]), abs=1e-5)


def test_at_most_two_passes_wait_for_the_device(engine, make_camera, make_spec, monkeypatch) -> None:
    done: list[str] = []

    class Event:
        def __init__(self) -> None:
            self.number = sum(name.startswith("given") for name in done)
            done.append(f"given {self.number}")

        def synchronize(self) -> None:
            done.append(f"waited {self.number}")

    passes = engine._passes_ahead
    monkeypatch.setattr(passes, "_events", True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(record_event=Event))
    engine.admit(make_spec(stride_s=8.0))
    camera = make_camera(kept=1.0)
    for index in range(4):
        assert push_and_settle(engine, camera.sample(index)) == 1
    assert done == ["given 0", "given 1", "waited 0", "given 2", "waited 1", "given 3"]


def test_memories_are_written_while_the_engine_waits_for_the_device(model, make_camera, make_spec, monkeypatch) -> None:
    """Most of the time of a busy GPU's engine; jobs that paused in it, too, would end one piece a second."""
    engine = NativeEngine(model, memories=MemoryBank(TierStack([Arena(2**26)])))
    engine.ahead_rows = 1, 1
    engine.admit(make_spec(memory=MemorySpec()))
    jobs, paused = engine.memories.writer, []
    run, wait, tolist = engine._run, engine._passes_ahead.wait, torch.Tensor.tolist

    def noted(name, call):
        return lambda *given: (paused.append((name, jobs._stepping)), call(*given))[1]

    monkeypatch.setattr(engine, "_run", noted("runs", run))
    monkeypatch.setattr(engine._passes_ahead, "wait", noted("waits", wait))
    read = noted("reads", tolist)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda part: (read if part.dtype == torch.float64 else tolist)(part))
    camera = make_camera()
    assert drive(engine, [camera.sample(index) for index in range(2)])
    assert set(paused) == {("waits", False), ("runs", True), ("reads", False)}
    monkeypatch.setattr(writer, "PATIENCE_S", 0.2)
    began = time.monotonic()
    with jobs.engine_step():
        with jobs.engine_waits():
            jobs.yield_to_engine()
        assert time.monotonic() - began < 0.2
        jobs.yield_to_engine()
    assert time.monotonic() - began >= 0.2
    jobs.yield_to_engine()


def test_a_failure_is_left_for_the_step(engine, make_camera, make_spec, monkeypatch) -> None:
    camera = make_camera()
    engine.admit(make_spec())
    drive(engine, [camera.sample(index) for index in range(12)])
    run = engine._run
    monkeypatch.setattr(engine, "_run", lambda plans: 1 / 0)
    engine.push(camera.sample(12))
    with pytest.raises(ZeroDivisionError):
        engine.prefill_ahead()
    monkeypatch.setattr(engine, "_run", run)
    assert settle(engine) == 0
    (request,) = engine.push(camera.sample(13))
    (answer,) = engine.step([request])
    twin = NativeEngine(engine.model)
    twin.admit(make_spec())
    expected = [a for i in range(14) for r in twin.push(camera.sample(i)) for a in twin.step([r])]
    assert answer.score == pytest.approx(expected[-1].score, abs=1e-5)
    assert answer.tokens == expected[-1].tokens
    # The windows after it are computed ahead again.
    engine.push(camera.sample(14))
    assert settle(engine) > 0
