"""The engine thread: order, batches, drops, patience, failures and health, with the real engine."""

import itertools
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
from waiting import until
from worker_parts import sample, spec

from cluster.errors import CapacityError, ConfigError, DeviceError, UnavailableError, UnknownCameraError
from cluster.replica.worker import EngineWorker
from cluster.types import AskSpec, Question
from cluster.types.reports import WindowCounters

WAIT_S = 20


class Recorder:
    """What the worker told, and a way to wait for it."""

    def __init__(self) -> None:
        self.answers: list = []
        self.drops: Counter = Counter()
        self.losses: Counter = Counter()
        self.batches: list[int] = []
        self._news = threading.Condition()

    def _tell(self, change) -> None:
        with self._news:
            change()
            self._news.notify_all()

    def answered(self, answers, *, late) -> None:
        self._tell(lambda: self.answers.extend(answers))

    def batch(self, windows) -> None:
        self._tell(lambda: self.batches.append(windows))

    def dropped(self, stream, reason, windows) -> None:
        self._tell(lambda: self.drops.update({(stream, str(reason)): windows}))

    def lost(self, stream, windows) -> None:
        self._tell(lambda: self.losses.update({stream: windows}))

    def wait(self, condition) -> None:
        with self._news:
            assert self._news.wait_for(lambda: condition(self), WAIT_S), vars(self)

    def windows(self, stream: str) -> list[int]:
        return [answer.window for answer in self.answers if answer.stream == stream]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def start(held_engine, recorder):
    workers = []

    def start(**options) -> EngineWorker:
        worker = EngineWorker(held_engine, recorder, **options)
        worker.start()
        workers.append(worker)
        return worker

    yield start
    held_engine.gate.set()
    assert all(worker.stop(WAIT_S) for worker in workers)


def feed(worker: EngineWorker, stream: str, count: int, first: int = 0) -> None:
    for index in range(first, first + count):
        worker.offer(sample(stream, index)).result(WAIT_S)


def test_every_window_of_an_idle_engine_is_answered_in_order(start, recorder) -> None:
    worker = start()
    worker.open(spec("a")).result(WAIT_S)
    for index in range(9):
        worker.offer(sample("a", index)).result(WAIT_S)
        recorder.wait(lambda r, index=index: len(r.answers) >= (index + 1) // 2)
    assert recorder.windows("a") == [0, 1, 2, 3]
    assert worker.counts("a") == WindowCounters(done=4, closed=4, end=8_000_000)
    [report] = worker.reports()
    assert report.counts["windows_done"] == 4
    assert report.counts["tokens_full"] >= report.counts["tokens_kept"] > 0
    assert [a.question for a in report.last_answers] == ["q"]
    assert report.latency_s > 0


def test_frames_are_computed_before_their_window_ends(start, recorder, engine) -> None:
    engine.ahead_rows = 1, 1000
    worker = start()
    worker.open(spec("a", stride_s=4.0)).result(WAIT_S)
    for index in range(3):
        feed(worker, "a", 1, index)
        until(lambda: all(frame.has_kv for frame in engine._streams["a"].frames))
    feed(worker, "a", 1, 3)
    recorder.wait(lambda r: r.answers)
    [answer] = recorder.answers
    assert answer.tokens.new == answer.tokens.encoded == 16


def test_what_fails_before_a_window_ends_is_computed_at_its_end(start, recorder, held_engine, engine, caplog) -> None:
    engine.ahead_rows = 1, 1000
    tried = []

    def broken() -> bool:
        tried.append(engine)
        raise RuntimeError("out of luck")

    held_engine.prefill_ahead = broken
    worker = start()
    worker.open(spec("a")).result(WAIT_S)
    feed(worker, "a", 2)
    recorder.wait(lambda r: r.answers)
    assert tried
    assert "prefilling open windows failed" in caplog.text
    worker.check()


def test_work_ahead_of_a_window_is_part_of_its_time(start, recorder, held_engine) -> None:
    slept = iter([0.5])

    def slow() -> bool:
        time.sleep(next(slept, 0.0))
        return False

    held_engine.prefill_ahead = slow
    worker = start()
    worker.open(spec("a")).result(WAIT_S)
    feed(worker, "a", 2)
    recorder.wait(lambda r: r.answers)
    until(lambda: worker._estimator.expected_s("a") > 0)
    assert worker._estimator.expected_s("a") >= 0.5
    assert worker.load().busy_s >= 0.5


def test_closing_with_flush_answers_the_rest_and_frees_the_stream(start, recorder, engine) -> None:
    worker = start()
    worker.open(spec("a")).result(WAIT_S)
    feed(worker, "a", 3)
    worker.close("a", flush=True)
    until(lambda: not worker.open_streams())
    assert recorder.windows("a") == [0, 1]
    assert engine.memory_bytes() == 0
    assert worker.reports()[0].counts["windows_done"] == len(recorder.windows("a")), "its last word is kept"
    with pytest.raises(UnknownCameraError):
        worker.offer(sample("a", 5))


def test_closing_without_flush_discards_at_once(start, recorder, engine) -> None:
    worker = start()
    worker.open(spec("a")).result(WAIT_S)
    feed(worker, "a", 1)
    worker.close("a")
    until(lambda: not worker.open_streams())
    assert engine.memory_bytes() == 0
    assert not recorder.answers


def test_counts_go_on_when_a_camera_comes_back(start, recorder) -> None:
    worker = start()
    for _ in range(2):
        worker.open(spec("a")).result(WAIT_S)
        feed(worker, "a", 3)
        recorder.wait(lambda r: r.answers)
        assert worker.counts("a").done == 1
        recorder.answers.clear()
        worker.close("a")
        until(lambda: not worker.open_streams())
    assert worker.reports()[0].counts["windows_done"] == 2


def test_cameras_closed_long_ago_are_reported_in_turn(start, monkeypatch) -> None:
    worker, names = start(), [f"gone-{number}" for number in range(10)]
    for name in names:
        worker.open(spec(name)).result(WAIT_S)
        worker.close(name)
    worker.open(spec("here")).result(WAIT_S)
    monkeypatch.setattr("cluster.replica.worker.REPEATED", 4)
    assert {report.camera for report in worker.reports()} == {*names, "here"}, "closed within the last minute"
    monkeypatch.setattr("cluster.replica.worker.RECENT_S", 0.0)
    told = [[report.camera for report in worker.reports()] for _ in range(5)]
    assert [sorted(each)[-1] for each in told] == ["here"] * 5
    assert {len(each) for each in told} == {5}
    gone = Counter(name for each in told for name in each if name != "here")
    assert gone == dict.fromkeys(names, 2), "20 reports of 10 cameras"
    worker.open(spec("gone-3")).result(WAIT_S)
    assert sum(report.camera == "gone-3" for _ in range(5) for report in worker.reports()) == 5


def incarnations(recorder: Recorder, stream: str) -> list[str]:
    return [answer.incarnation for answer in recorder.answers if answer.stream == stream]


def test_windows_of_every_opening_are_numbered_in_an_incarnation_of_their_own(start, recorder) -> None:
    worker = start()
    found = []
    for _ in range(2):
        worker.open(spec("a")).result(WAIT_S)
        feed(worker, "a", 3)
        worker.open(spec("a", window_s=2.0)).result(WAIT_S)
        feed(worker, "a", 2, first=3)
        recorder.wait(lambda r: len(r.answers) == 2)
        assert recorder.windows("a") == [0, 1]
        found.append(set(incarnations(recorder, "a")))
        recorder.answers.clear()
        worker.close("a")
        until(lambda: not worker.open_streams())
    assert [len(each) for each in found] == [1, 1], "other settings are no other opening"
    assert len(found[0] | found[1] | {""}) == 3


def test_a_camera_of_another_life_goes_on_with_nothing_of_the_one_before(start, recorder) -> None:
    """Removed and added again; its old decoder has not closed it, or its memory is not forgotten yet."""
    worker = start()
    worker.open(spec("a", life="one")).result(WAIT_S)
    feed(worker, "a", 3)
    recorder.wait(lambda r: len(r.answers) == 1)
    worker.open(spec("a", life="two")).result(WAIT_S)
    assert worker.counts("a") == WindowCounters()
    feed(worker, "a", 3)
    recorder.wait(lambda r: len(r.answers) == 2)
    assert recorder.windows("a") == [0, 0]
    assert [answer.end for answer in recorder.answers] == [2_000_000] * 2
    assert len(set(incarnations(recorder, "a"))) == 2
    [report] = worker.reports()
    assert (report.life, report.counts["windows_done"]) == ("two", 1)
    worker.close("a")
    until(lambda: not worker.open_streams())
    worker.open(spec("a", life="three")).result(WAIT_S)
    [report] = worker.reports()
    assert (report.life, report.counts) == ("three", {})


def test_answers_to_a_question_that_was_reworded_are_no_last_answers_any_more(start, recorder) -> None:
    worker = start()
    both = (Question("q", "Is anyone there?"), Question("r", "Is a car there?"))
    worker.open(replace(spec("a"), questions=both)).result(WAIT_S)
    feed(worker, "a", 3)
    recorder.wait(lambda r: len(r.answers) == 2)
    reworded = (Question("q", "Is anyone on the roof?"), Question("r", "Is a car there?"))
    worker.open(replace(spec("a"), questions=reworded)).result(WAIT_S)
    assert [last.question for last in worker.reports()[0].last_answers] == ["r"]


def test_slow_engine_drops_the_oldest_windows_and_counts_them(start, held_engine, recorder) -> None:
    worker = start(per_stream=1)
    worker.open(spec("a")).result(WAIT_S)
    held_engine.gate.clear()
    feed(worker, "a", 2)
    assert held_engine.entered.wait(WAIT_S)
    pending = [worker.offer(sample("a", index)) for index in range(2, 10)]
    with pytest.raises(CapacityError, match="8 frames waiting"):
        worker.offer(sample("a", 10))
    assert worker.depths()["frames"] == 8, "memory is bounded by the inbox"
    held_engine.gate.set()
    for future in pending:
        future.result(WAIT_S)
    recorder.wait(lambda r: r.windows("a")[-1:] == [4])
    assert recorder.drops == {("a", "replaced"): 3}
    assert recorder.windows("a") == [0, 4]
    assert worker.counts("a") == WindowCounters(done=2, dropped=3, closed=5, end=10_000_000)


def test_patient_camera_is_held_back_instead(start, held_engine, recorder) -> None:
    worker = start(per_stream=1)
    worker.open(spec("file", patient=True)).result(WAIT_S)
    held_engine.gate.clear()
    feed(worker, "file", 2)
    assert held_engine.entered.wait(WAIT_S)
    pending = [worker.offer(sample("file", index)) for index in range(2, 10)]
    held_engine.gate.set()
    for future in pending:
        future.result(WAIT_S)
    recorder.wait(lambda r: len(r.answers) == 5)
    assert recorder.windows("file") == [0, 1, 2, 3, 4]
    assert not recorder.drops


def test_gated_windows_are_no_part_of_a_batch(start, recorder) -> None:
    worker = start()
    worker.open(spec("a", static_gate=True)).result(WAIT_S)
    for index in range(8):
        worker.offer(replace(sample("a", index), activity=0.0)).result(WAIT_S)
        recorder.wait(lambda r, index=index: len(r.answers) >= (index + 1) // 2)
    assert [answer.gated for answer in recorder.answers] == [False, False, True, True]
    assert recorder.batches == [1, 1]


def test_windows_of_many_cameras_are_answered_together(start, held_engine, recorder) -> None:
    # A step that the gate holds up takes long; the next one is to hold as many windows all the same.
    worker = start(max_batch=3, step_budget_s=60.0)
    for name in "abcde":
        worker.open(spec(name)).result(WAIT_S)
    held_engine.gate.clear()
    feed(worker, "a", 2)
    assert held_engine.entered.wait(WAIT_S)
    pending = [worker.offer(sample(name, index)) for name in "bcde" for index in range(2)]
    held_engine.gate.set()
    for future in pending:
        future.result(WAIT_S)
    recorder.wait(lambda r: len(r.answers) == 5)
    assert recorder.batches == [1, 3, 1]
    assert held_engine.batches[1:] == [[("b", 0), ("c", 0), ("d", 0)], [("e", 0)]]


def test_fresh_frame_waits_for_windows_it_would_forget_and_counts_the_one_it_cuts_short(
    start, held_engine, recorder
) -> None:
    worker = start()
    worker.open(spec("a")).result(WAIT_S)
    held_engine.gate.clear()
    feed(worker, "a", 2)
    assert held_engine.entered.wait(WAIT_S)
    pending = [worker.offer(sample("a", index)) for index in (2, 3, 4)]
    pending.append(worker.offer(sample("a", 40, fresh=True)))
    held_engine.gate.set()
    for future in pending:
        future.result(WAIT_S)
    recorder.wait(lambda r: r.losses)
    assert recorder.windows("a") == [0, 1]
    assert recorder.losses == {"a": 1}
    assert worker.reports()[0].counts["windows_lost"] == 1


@pytest.mark.parametrize(("dropped", "lost"), [(0, 4), (3, 1)])
def test_windows_of_video_that_never_came_are_lost_but_for_those_the_decoder_counted(
    start, recorder, dropped, lost
) -> None:
    worker = start()
    worker.open(spec("a")).result(WAIT_S)
    feed(worker, "a", 4)
    worker.offer(replace(sample("a", 12, fresh=True), windows_dropped=dropped)).result(WAIT_S)
    worker.offer(sample("a", 13)).result(WAIT_S)
    recorder.wait(lambda r: len(r.answers) == 3)
    assert recorder.losses == {"a": lost}
    assert worker.reports()[0].counts["windows_lost"] == lost


def test_a_camera_that_nobody_brings_back_loses_the_window_in_the_making(start, recorder) -> None:
    worker = start()
    worker.open(spec("a")).result(WAIT_S)
    feed(worker, "a", 3)
    worker.close("a", abandoned=True)
    until(lambda: not worker.open_streams())
    assert recorder.losses == {"a": 1}


def test_a_process_that_stood_still_answers_nothing_before_it_knows_whose_its_cameras_are(
    start, recorder, held_engine, engine
) -> None:
    worker = start(absent_s=0.5)
    held_engine.gate.clear()
    for name in ("a", "b"):
        worker.open(spec(name)).result(WAIT_S)
    worker.confirm_ownership()
    for name, index in itertools.product(("a", "b"), range(3)):
        worker.offer(sample(name, index))
    assert held_engine.entered.wait(WAIT_S)
    # One step is under way, and more frames come: as after a stop of the whole process.
    time.sleep(0.6)
    held_engine.gate.set()
    until(lambda: held_engine.batches)
    waiting = worker.offer(sample("a", 3))
    time.sleep(0.2)
    assert (recorder.answers, len(held_engine.batches)) == ([], 1)
    assert not waiting.done()
    worker.release_all().result(WAIT_S)
    with pytest.raises(UnknownCameraError):
        waiting.result(WAIT_S)
    assert worker.open_streams() == []
    assert engine.memory_bytes() == 0
    worker.confirm_ownership()
    worker.open(spec("a")).result(WAIT_S)
    worker.confirm_ownership()
    feed(worker, "a", 4)
    recorder.wait(lambda r: len(r.answers) >= 2)
    # Whoever has the cameras now has counted the windows of that step as lost.
    assert [(answer.stream, answer.window) for answer in recorder.answers] == [("a", 0), ("a", 1)]
    assert recorder.drops == recorder.losses == Counter()


def test_a_process_that_stood_still_and_still_owns_its_cameras_answers_every_window_once(
    start, recorder, held_engine
) -> None:
    worker = start(absent_s=0.5)
    held_engine.gate.clear()
    worker.open(spec("a")).result(WAIT_S)
    worker.confirm_ownership()
    for index in range(2):
        worker.offer(sample("a", index))
    assert held_engine.entered.wait(WAIT_S)
    time.sleep(0.6)
    held_engine.gate.set()
    until(lambda: held_engine.batches)
    worker.confirm_ownership()
    recorder.wait(lambda r: r.answers)
    feed(worker, "a", 2, first=2)
    recorder.wait(lambda r: len(r.answers) >= 2)
    assert recorder.windows("a") == [0, 1]
    assert worker.counts("a") == WindowCounters(done=2, closed=2, end=4_000_000)


def test_frames_the_engine_cannot_use_are_refused(start) -> None:
    worker = start()
    worker.open(spec("a")).result(WAIT_S)
    feed(worker, "a", 2)
    with pytest.raises(ValueError, match="pts"):
        worker.offer(sample("a", 1)).result(WAIT_S)


def test_camera_the_engine_cannot_hold_is_refused(start) -> None:
    worker = start()
    with pytest.raises(ConfigError):
        worker.open(spec("a", refresh="no-such-policy")).result(WAIT_S)
    assert worker.open_streams() == []


def test_one_camera_that_fails_costs_the_others_nothing(start, held_engine, recorder) -> None:
    worker = start()
    for name in ("good", "bad"):
        worker.open(spec(name)).result(WAIT_S)
    held_engine.poison = {"bad"}
    held_engine.gate.clear()
    feed(worker, "good", 2)
    assert held_engine.entered.wait(WAIT_S)
    pending = [worker.offer(sample("bad", index, fresh=index == 2)) for index in (2, 3)]
    pending += [worker.offer(sample("good", index)) for index in (2, 3)]
    held_engine.gate.set()
    for future in pending:
        future.result(WAIT_S)
    recorder.wait(lambda r: len(r.windows("good")) == 2 and r.drops)
    assert recorder.drops == {("bad", "failed"): 1}
    with pytest.raises(ValueError, match="out of luck"):
        worker.offer(sample("bad", 7)).result(WAIT_S)
    held_engine.poison = set()
    for index in range(8, 12):
        worker.offer(sample("bad", index, fresh=index == 8)).result(WAIT_S)
    recorder.wait(lambda r: r.windows("bad"))
    worker.check()
    assert len(set(incarnations(recorder, "bad"))) == 1


def test_a_frame_that_the_engine_fails_on_costs_the_other_cameras_nothing(start, held_engine, engine, recorder) -> None:
    bad = [2]

    def push(made):
        if made.stream == "bad" and made.index in bad:
            raise RuntimeError("out of luck")
        return engine.push(made)

    held_engine.push = push
    worker = start()
    for name in ("good", "bad"):
        worker.open(spec(name)).result(WAIT_S)
        feed(worker, name, 2)
    with pytest.raises(RuntimeError, match="out of luck"):
        worker.offer(sample("bad", 2)).result(WAIT_S)
    feed(worker, "good", 2, first=2)
    worker.offer(replace(sample("bad", 3, fresh=False), gap=True)).result(WAIT_S)
    recorder.wait(lambda r: r.windows("good") == r.windows("bad") == [0, 1])
    worker.check()


def test_health_fails_when_every_window_fails(start, held_engine, recorder) -> None:
    worker = start()
    held_engine.poison = {"a"}
    worker.open(spec("a")).result(WAIT_S)
    worker.check()
    for attempt in range(3):
        for index in range(2):
            worker.offer(sample("a", index + 10 * attempt, fresh=index == 0)).result(WAIT_S)
        recorder.wait(lambda r, attempt=attempt: r.drops["a", "failed"] == attempt + 1)
    until(lambda: worker._steps.failures == 3)
    with pytest.raises(RuntimeError, match="failed on every window"):
        worker.check()


def test_health_fails_when_the_engine_is_stuck_or_dead(start, held_engine) -> None:
    worker = start(stall_s=0.05)
    worker.open(spec("a")).result(WAIT_S)
    held_engine.gate.clear()
    feed(worker, "a", 2)
    assert held_engine.entered.wait(WAIT_S)
    time.sleep(0.1)
    with pytest.raises(RuntimeError, match="no progress"):
        worker.check()
    held_engine.gate.set()
    assert worker.stop(WAIT_S)
    with pytest.raises(RuntimeError, match="died"):
        worker.check()


def in_a_step_that_fails(start, held_engine) -> EngineWorker:
    """A worker whose GPU is lost in the step it is in, as soon as the engine's gate is opened."""
    worker = start()
    worker.open(spec("a")).result(WAIT_S)
    held_engine.lost = "CUDA error: an illegal memory access was encountered"
    held_engine.gate.clear()
    feed(worker, "a", 2)
    assert held_engine.entered.wait(WAIT_S)
    return worker


def test_a_failed_gpu_ends_the_engine_at_once_and_says_why(start, held_engine) -> None:
    worker = in_a_step_that_fails(start, held_engine)
    asked = worker.ask(AskSpec("a", "Who is there?"), lambda _: None, timeout_s=600)
    held_engine.gate.set()
    with pytest.raises(UnavailableError, match="the replica is stopping"):
        asked.result(WAIT_S)
    until(lambda: not worker._thread.is_alive())
    with pytest.raises(RuntimeError, match="illegal memory access"):
        worker.check()
    assert held_engine.batches == []


@pytest.mark.parametrize("call", ["hand_over", "evict"])
def test_a_gpu_that_fails_as_a_camera_leaves_ends_the_engine(start, held_engine, call) -> None:
    def fail(stream, **options) -> None:
        raise DeviceError("CUDA error: an illegal memory access was encountered")

    setattr(held_engine, call, fail)
    worker = start()
    worker.open(spec("a")).result(WAIT_S)
    if call == "hand_over":
        worker.hand_over("a")
    else:
        with pytest.raises(DeviceError):
            worker.remove_camera("a", "").result(WAIT_S)
    until(lambda: not worker._thread.is_alive())
    with pytest.raises(RuntimeError, match="illegal memory access"):
        worker.check()


def test_who_waits_for_an_engine_thread_that_has_ended_is_told_so(start, held_engine) -> None:
    worker = in_a_step_that_fails(start, held_engine)
    waiting = [worker.offer(sample("a", 2)), worker.call_on_engine_thread(lambda _: None)]
    held_engine.gate.set()
    until(lambda: not worker._thread.is_alive())
    later = [worker.open(spec("b")), worker.hand_over("a"), worker.delete_memory("a"), worker.remove_camera("a", "")]
    for done in [*waiting, *later]:
        with pytest.raises(UnavailableError, match="the replica is stopping"):
            done.result(WAIT_S)
    with pytest.raises(UnavailableError, match="the replica is stopping"):
        worker.offer(sample("a", 3))


def test_a_camera_that_the_engine_cannot_open_is_refused_and_others_go_on(start, recorder, engine, held_engine) -> None:
    def admit(spec) -> None:
        if spec.stream == "bad":
            raise RuntimeError("out of luck")
        engine.admit(spec)

    held_engine.admit = admit
    worker = start()
    with pytest.raises(RuntimeError, match="out of luck"):
        worker.open(spec("bad")).result(WAIT_S)
    worker.open(spec("a")).result(WAIT_S)
    feed(worker, "a", 2)
    recorder.wait(lambda r: r.answers)
    assert worker.open_streams() == ["a"]


def test_latency_counts_from_when_the_last_frame_came_off_the_wire(start, recorder) -> None:
    worker = start()
    worker.open(spec("a")).result(WAIT_S)
    worker.offer(sample("a", 0)).result(WAIT_S)
    worker.offer(sample("a", 1), time.monotonic() - 3.0).result(WAIT_S)
    recorder.wait(lambda r: r.answers)
    assert recorder.answers[0].timing.latency_s >= recorder.answers[0].timing.queue_s >= 3.0


def test_critical_windows_are_answered_before_others_that_waited_longer(start, held_engine, recorder) -> None:
    worker = start(max_batch=1)
    worker.open(spec("first")).result(WAIT_S)
    for name, priority in (("b", "background"), ("n", "normal"), ("c", "critical")):
        worker.open(spec(name, priority=priority)).result(WAIT_S)
    held_engine.gate.clear()
    feed(worker, "first", 2)
    assert held_engine.entered.wait(WAIT_S)
    pending = [worker.offer(sample(name, index)) for name in "bnc" for index in range(2)]
    held_engine.gate.set()
    for future in pending:
        future.result(WAIT_S)
    recorder.wait(lambda r: len(r.answers) == 4)
    assert [batch[0][0] for batch in held_engine.batches] == ["first", "c", "n", "b"]


def test_a_step_holds_no_more_than_its_budget(start, held_engine, recorder) -> None:
    worker = start(max_batch=8, step_budget_s=1e-9)
    for name in "abcd":
        worker.open(spec(name)).result(WAIT_S)
    feed(worker, "a", 2)
    recorder.wait(lambda r: r.answers)
    held_engine.entered.clear()
    held_engine.gate.clear()
    feed(worker, "a", 2, first=2)
    assert held_engine.entered.wait(WAIT_S)
    pending = [worker.offer(sample(name, index)) for name in "bcd" for index in range(2)]
    held_engine.gate.set()
    for future in pending:
        future.result(WAIT_S)
    recorder.wait(lambda r: len(r.answers) == 5)
    assert recorder.batches == [1] * 5


def test_a_priority_that_does_not_exist_is_refused(start) -> None:
    worker = start()
    with pytest.raises(ConfigError, match="urgent"):
        worker.open(spec("a", priority="urgent")).result(WAIT_S)
    assert worker.open_streams() == []


def test_load_is_the_time_on_windows_and_what_waits(start, recorder, held_engine) -> None:
    worker = start(max_batch=1)
    assert (worker.load().busy_s, worker.load().backlog_s) == (0, 0)
    for name in "abc":
        worker.open(spec(name)).result(WAIT_S)
        feed(worker, name, 2)
    recorder.wait(lambda r: len(r.answers) == 3)
    held_engine.entered.clear()
    held_engine.gate.clear()
    worker.offer(sample("a", 2)).result(WAIT_S)
    pending = [worker.offer(sample(name, index)) for name, index in (("a", 3), ("b", 2), ("b", 3), ("c", 2), ("c", 3))]
    assert held_engine.entered.wait(WAIT_S)
    under_way = worker.load()
    # A step under way counts as far as it has come.
    until(lambda: worker.load().busy_s > under_way.busy_s)
    held_engine.entered.clear()
    held_engine.gate.set()
    for future in pending:
        future.result(WAIT_S)
    recorder.wait(lambda r: len(r.answers) == 6)
    until(lambda: worker.load().backlog_s == 0)
    assert worker.load().busy_s > under_way.busy_s


def test_a_window_that_waits_is_backlog(start, recorder, held_engine) -> None:
    worker = start(max_batch=1)
    for name in "ab":
        worker.open(spec(name)).result(WAIT_S)
        feed(worker, name, 2)
    recorder.wait(lambda r: len(r.answers) == 2)

    def both_at_once(_engine) -> None:
        held_engine.gate.clear()
        pending.extend(worker.offer(sample(name, index)) for name in "ab" for index in (2, 3))

    pending: list = []
    held_engine.entered.clear()
    worker.call_on_engine_thread(both_at_once).result(WAIT_S)
    assert held_engine.entered.wait(WAIT_S)
    waits = worker.load().backlog_s
    held_engine.gate.set()
    recorder.wait(lambda r: len(r.answers) == 4)
    assert waits > 0
    assert worker.load().backlog_s == 0
