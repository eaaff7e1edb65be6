"""An engine that is not there for a while: its windows wait, and after some steps the replica counts as broken."""

import threading
import time

import pytest
from waiting import until
from worker_parts import sample, spec

from cluster.errors import UnavailableError
from cluster.replica import steps as module
from cluster.replica.worker import MAX_FAILURES, EngineWorker
from cluster.types.reports import WindowCounters

WAIT_S = 20


class AbsentEngine:
    """The real engine, whose core is away for the next ``absences`` steps; before a step it waits for ``gate``."""

    def __init__(self, engine) -> None:
        self._engine = engine
        self.absences = 0
        self.steps: list[list[tuple[str, int]]] = []
        self.gate = threading.Event()
        self.gate.set()

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def step(self, requests, following=()):
        assert self.gate.wait(WAIT_S)
        self.steps.append([(request.stream, request.window) for request in requests])
        if self.absences:
            self.absences -= 1
            raise UnavailableError("the engine core has died; it must be restarted")
        return self._engine.step(requests, following)


class Log:
    """What the worker told."""

    def __init__(self) -> None:
        self.answers, self.drops, self.losses = [], [], []

    def answered(self, answers, *, late) -> None:
        self.answers += [(answer.stream, answer.window) for answer in answers]

    def batch(self, windows) -> None:
        pass

    def dropped(self, stream, reason, windows) -> None:
        self.drops.append((stream, str(reason), windows))

    def lost(self, stream, windows) -> None:
        self.losses.append((stream, windows))


@pytest.fixture
def absent(engine, monkeypatch):
    monkeypatch.setattr(module, "REST_S", 0.02)
    return AbsentEngine(engine)


@pytest.fixture
def start(absent):
    log, workers = Log(), []

    def start(**options) -> tuple[EngineWorker, Log]:
        worker = EngineWorker(absent, log, **options)
        worker.start()
        workers.append(worker)
        return worker, log

    yield start
    absent.gate.set()
    assert all(worker.stop(WAIT_S) for worker in workers)


def feed(worker: EngineWorker, stream: str, first: int, count: int) -> None:
    for index in range(first, first + count):
        worker.offer(sample(stream, index)).result(WAIT_S)


def test_windows_wait_for_an_engine_that_comes_back_and_none_is_lost(start, absent) -> None:
    worker, log = start()
    absent.absences = MAX_FAILURES - 1
    for name in "ab":
        worker.open(spec(name)).result(WAIT_S)
    absent.gate.clear()
    feed(worker, "a", 0, 2)
    for index in range(2):
        worker.offer(sample("b", index))
    absent.gate.set()
    until(lambda: len(log.answers) == 2)
    worker.check()
    for index in range(2, 4):
        worker.offer(sample("a", index)).result(WAIT_S)
    until(lambda: ("a", 1) in log.answers)
    assert (log.drops, log.losses) == ([], [])
    assert worker.counts("a") == WindowCounters(done=2, closed=2, end=4_000_000)
    assert len(absent.steps) >= MAX_FAILURES + 1
    absent.absences = MAX_FAILURES - 1
    feed(worker, "a", 4, 2)
    until(lambda: ("a", 2) in log.answers)
    worker.check()


def test_what_waits_is_bounded_and_what_leaves_is_counted(start, absent) -> None:
    worker, log = start(per_stream=2)
    absent.absences = 10**6
    worker.open(spec("a", window_s=60.0)).result(WAIT_S)
    feed(worker, "a", 0, 10)
    until(lambda: worker.counts("a").dropped == 3)
    assert log.drops == [("a", "replaced", 1)] * 3
    assert worker.depths()["windows"] == 2
    # The heartbeat says why, for as long as it is so.
    assert worker.load().trouble == "the engine core has died; it must be restarted"
    absent.absences = 0
    until(lambda: log.answers == [("a", 3), ("a", 4)])
    assert worker.load().trouble == ""
    assert worker.counts("a") == WindowCounters(done=2, dropped=3, closed=5, end=10_000_000)
    assert log.losses == []


def test_an_engine_that_stays_away_is_told_as_broken(start, absent) -> None:
    worker, log = start()
    worker.open(spec("a", window_s=60.0)).result(WAIT_S)
    absent.absences = 10**6
    feed(worker, "a", 0, 2)
    until(lambda: len(absent.steps) >= MAX_FAILURES)
    with pytest.raises(RuntimeError, match="the engine failed on every window of its last"):
        until(worker.check)
    assert log.answers == []
    assert worker.counts("a") == WindowCounters(closed=1, end=2_000_000)
    absent.absences = 0
    until(lambda: log.answers == [("a", 0)])
    worker.check()


def test_it_rests_between_two_steps_and_still_takes_frames(start, absent, monkeypatch) -> None:
    monkeypatch.setattr(module, "REST_S", 3600)
    worker, _ = start()
    worker.open(spec("a", window_s=60.0)).result(WAIT_S)
    absent.absences = 1
    feed(worker, "a", 0, 2)
    until(lambda: absent.steps)
    feed(worker, "a", 2, 1)
    # A fresh frame would make the engine forget what waits: it stays where it is, and nothing turns in circles for it.
    waits = worker.offer(sample("a", 3, fresh=True))
    worker.open(spec("b")).result(WAIT_S)
    busy_s = worker.load().busy_s
    time.sleep(0.2)
    assert worker.load().busy_s - busy_s < 0.1
    assert not waits.done()
    assert len(absent.steps) == 1
