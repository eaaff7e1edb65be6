"""No window goes missing uncounted when video does: the way from packets to answers with holes in it, without Ray."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import replace
from typing import TypeVar

import pytest
from camera_parts import GEOMETRY, WAIT_S, camera_bench
from waiting import until

from cluster.config import CameraEntry, camera_settings
from cluster.control.accounted_video import AccountedVideo
from cluster.decoder.running_camera import RunningCamera
from cluster.engine.simulated import SimulatedEngine
from cluster.lab.bench.window_accounting import CameraWindows, account
from cluster.models.loading import load_shape
from cluster.replica import window_accounting
from cluster.replica.worker import EngineWorker
from cluster.types import MICROSECONDS, Answer, reports
from cluster.types.reports import AccountedSpan, CameraMoment, CameraReport, StreamReport, WindowCounters

STRIDE_S = 2.0

ReportT = TypeVar("ReportT", CameraReport, StreamReport)


class Replica:
    """A replica's frames and its engine thread; the engine takes no time."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.settled = lambda camera: None
        self._lock = threading.Lock()
        engine = SimulatedEngine(load_shape("demo"))
        self.worker = EngineWorker(engine, self, inbox=64)
        self.worker.start()

    def answered(self, answers, *, late) -> None:
        with self._lock:
            self.answers += answers
        self.settled(answers[0].stream)

    def batch(self, windows) -> None: ...
    def dropped(self, stream, reason, windows) -> None: ...
    def lost(self, stream, windows) -> None: ...

    async def on_open(self, spec) -> None:
        await asyncio.wrap_future(self.worker.open(spec))

    async def on_frame(self, sample, arrived_s) -> None:
        await asyncio.wrap_future(self.worker.offer(sample, arrived_s))

    async def on_close(self, camera, flush) -> None:
        self.worker.close(camera, flush=flush)

    async def on_lost(self, cameras) -> None: ...

    def counters(self, camera) -> WindowCounters:
        return self.worker.counts(camera)

    def total(self, name: str) -> int:
        return sum(report.counts.get(name, 0) for report in self.worker.reports())


@pytest.fixture
def bench(clip, monkeypatch):
    # The clip goes much faster than time does: what is missing of it is not taken for a clock that jumped.
    for module in (window_accounting, reports):
        monkeypatch.setattr(module, "CLOCK_JUMP_S", 60.0)
    with camera_bench(clip) as bench:
        yield bench


@pytest.fixture
def replica():
    made = Replica()
    yield made
    assert made.worker.stop(WAIT_S)


def settle(bench, *replicas: Replica) -> None:
    """Everything that was pushed has been decoded, sent, and answered."""
    until(lambda: (lane := bench.sender.status("gate")) and not lane.queued + lane.in_flight, "nothing under way")
    until(lambda: not any(sum(each.worker.depths().values()) for each in replicas), "nothing waits")


def silent(bench, replicas, until_s: float, *before: RunningCamera, found: int = 0) -> int:
    """Windows of ``[0, until_s)`` that were neither answered nor counted, as a load test finds them; ``found``: by the
    controller."""
    ledger = CameraWindows("gate", 0.0, STRIDE_S)
    for replica in replicas:
        for answer in replica.answers:
            ledger.saw(answer, answer.end / MICROSECONDS)
    told = [camera.report().counts for camera in (*before, bench.camera)]
    lost = found + sum(each["windows_lost"] for each in told) + sum(each.total("windows_lost") for each in replicas)
    dropped = sum(each["windows_dropped"] for each in told) + sum(each.total("windows_dropped") for each in replicas)
    seen, most = ledger.seen, ledger.most(until_s)
    account_ = account(ledger.slots(until_s), seen, answered=seen, given_up=dropped + lost, listened=True, most=most)
    assert account_.extra == 0
    assert account_.seen > 3
    assert account_.given_up <= account_.due - account_.seen
    return account_.silent


@pytest.mark.parametrize("seed", range(2))
def test_packets_that_are_lost_on_the_way(bench, replica, seed) -> None:
    bench.camera.route(bench.replica(replica))
    draw = random.Random(seed)
    bench.push(6)
    for _ in range(6):
        # Some at random, and for as long as several windows.
        bench.skip(draw.uniform(0.1, 7))
        bench.push(draw.uniform(1, 6))
    bench.push(8)
    settle(bench, replica)
    assert replica.total("windows_lost") > 0
    assert silent(bench, [replica], max(answer.end for answer in replica.answers) / MICROSECONDS) == 0


def test_a_decoder_that_dies_and_one_that_takes_over_later(bench, replica) -> None:
    address = bench.replica(replica)
    bench.camera.route(address)
    bench.push(7)
    settle(bench, replica)
    dead = bench.camera
    bench.skip(9)
    entry = CameraEntry.model_validate({"name": "gate"})
    bench.loop.run(bench.sender.stop(0.0), WAIT_S)
    bench.sender = bench.loop.run(bench._sender(), WAIT_S)
    bench.camera = RunningCamera(camera_settings(bench.config, entry), GEOMETRY, bench.sender, bench.config, None)
    bench.reopen()
    bench.camera.route(address)
    bench.push(12)
    settle(bench, replica)
    assert dead._pipeline.stop(WAIT_S)
    assert replica.total("windows_lost") >= 4, "9 seconds are four strides of 2"
    assert silent(bench, [replica], max(answer.end for answer in replica.answers) / MICROSECONDS) == 0


def in_real_time(report: ReportT, now_s: float) -> ReportT:
    """As of a camera that took as long as its clip lasts, from 0 on everybody's clock."""

    def moment(at: CameraMoment) -> CameraMoment:
        return replace(at, at_s=at.pts / MICROSECONDS)

    span = report.accounted
    assert span is not None
    span = AccountedSpan(moment(span.begin), moment(span.end))
    return replace(report, accounted=span, now_s=now_s)


@pytest.mark.parametrize("away_s", [0.0, 9.0])
@pytest.mark.parametrize("both", [True, False])
def test_a_decoder_that_dies_with_its_replica(bench, replica, away_s, both) -> None:
    """The controller alone is left to know; it counts nothing where the replica lives on."""
    video = AccountedVideo()
    bench.camera.route(bench.replica(replica))
    bench.push(7)
    settle(bench, replica)
    dead = bench.camera
    video.add_decoder(in_real_time(dead.report(), 7.0), 7.0)
    [report] = replica.worker.reports()
    assert video.add_replica(in_real_time(report, 7.0), 7.0, STRIDE_S) == 0
    # What neither has told of any more, though the replica answers some of it.
    bench.push(5)
    settle(bench, replica)
    bench.skip(away_s)
    bench.loop.run(bench.sender.stop(0.0), WAIT_S)
    assert dead._pipeline.stop(WAIT_S)
    told = len(replica.answers)
    bench.sender = bench.loop.run(bench._sender(), WAIT_S)
    entry = CameraEntry.model_validate({"name": "gate"})
    bench.camera = RunningCamera(camera_settings(bench.config, entry), GEOMETRY, bench.sender, bench.config, None)
    bench.reopen()
    other = Replica()
    try:
        bench.camera.route(bench.replica(other if both else replica))
        bench.push(12)
        settle(bench, replica, other)
        video.add_decoder(in_real_time(bench.camera.report(), 40.0), 40.0)
        [report] = (other if both else replica).worker.reports()
        lost = video.add_replica(in_real_time(report, 40.0), 40.0, STRIDE_S)
        if not both:
            assert lost == 0
        else:
            # Nobody knows of the windows that were answered after the last report.
            late = [answer for answer in replica.answers[:told] if answer.end > 7 * MICROSECONDS]
            lost -= len({answer.end for answer in late})
            assert away_s == 0 or lost >= 4, "9 seconds are four strides of 2"
        last_s = max(answer.end for answer in (*replica.answers, *other.answers)) / MICROSECONDS
        assert silent(bench, [replica, other], last_s, found=lost) == 0
    finally:
        assert other.worker.stop(WAIT_S)


@pytest.mark.parametrize(
    ("before_s", "away_s", "missing_s"),
    [(7, 0, 0), (8, 0, 0), (8, 1, 0), (9, 2, 0), (7, 5, 0), (8, 5, 0), (7, 0, 9), (8, 3, 9)],
)
def test_a_replica_that_dies(bench, replica, before_s, away_s, missing_s) -> None:
    """``missing_s``: its camera is away for as long."""
    bench.camera.route(bench.replica(replica))
    bench.push(before_s)
    settle(bench, replica)
    until(lambda: bench.sender.status("gate").windows.done == len(replica.answers), "every answer acknowledged")
    other = Replica()
    try:
        bench.camera.route(None)
        bench.push(away_s)
        bench.skip(missing_s)
        bench.camera.route(bench.replica(other))
        bench.push(9)
        settle(bench, other)
        last_s = max(answer.end for answer in other.answers) / MICROSECONDS
        assert silent(bench, [replica, other], last_s) == 0
    finally:
        assert other.worker.stop(WAIT_S)


@pytest.mark.parametrize("told_of_death", [True, False])
def test_a_replica_whose_death_is_noticed_late(bench, replica, told_of_death) -> None:
    """Frames that wait for a lost connection are no windows in flight."""
    bench.camera.route(bench.replica(replica))
    bench.push(7)
    settle(bench, replica)
    before = bench.camera.report().counts["windows_lost"]
    bench.loop.run(bench._servers.pop().stop(0.0), WAIT_S)
    until(lambda: bench._lost, "the loss to be noticed")
    # More than the queue holds, twice over.
    bench.push(80)
    if told_of_death:
        bench.camera.route(None)
        bench.push(5)
    other = Replica()
    try:
        bench.camera.route(bench.replica(other))
        bench.push(9)
        settle(bench, other)
        assert silent(bench, [replica, other], max(answer.end for answer in other.answers) / MICROSECONDS) == 0
        counts = bench.camera.report().counts
        assert 1 <= counts["windows_lost"] - before <= 3
        assert counts["windows_dropped"] >= 38
    finally:
        assert other.worker.stop(WAIT_S)


def lost_when_it_dies(bench, replica) -> int:
    """Windows that the decoder counts as lost when the camera goes on at another replica; none is silent."""
    before = bench.camera.report().counts["windows_lost"]
    other = Replica()
    try:
        bench.camera.route(None)
        bench.push(2)
        bench.camera.route(bench.replica(other))
        bench.push(9)
        settle(bench, other)
        assert silent(bench, [replica, other], max(answer.end for answer in other.answers) / MICROSECONDS) == 0
        return bench.camera.report().counts["windows_lost"] - before
    finally:
        assert other.worker.stop(WAIT_S)


def test_a_slow_replica_that_dies_later_has_its_lost_windows_counted_once(bench, replica) -> None:
    bench.camera.route(bench.replica(replica))
    bench.push(7)
    settle(bench, replica)
    frames = replica.on_frame
    released = asyncio.Event()

    async def blocked(sample, arrived_s) -> None:
        await released.wait()
        await frames(sample, arrived_s)

    replica.on_frame = blocked
    bench.push(100)
    bench.loop.loop.call_soon_threadsafe(released.set)
    settle(bench, replica)
    bench.push(8)
    settle(bench, replica)
    assert lost_when_it_dies(bench, replica) <= 3


def test_a_broken_connection_to_a_replica_that_dies_later_costs_its_windows_once(bench, replica) -> None:
    address = bench.replica(replica)
    bench.camera.route(address)
    bench.push(7)
    settle(bench, replica)
    frames = replica.on_frame

    async def never(sample, arrived_s) -> None:
        await asyncio.Event().wait()

    replica.on_frame = never
    bench.push(6)
    until(lambda: bench.sender.status("gate").in_flight >= 5, "frames on their way")
    replica.on_frame = frames
    bench.loop.run(bench._servers.pop().stop(0.0), WAIT_S)
    bench.replica(replica, port=int(address.rpartition(":")[2]))
    until(lambda: bench._lost and not bench.sender.status("gate").unreachable, "the same replica again")
    bench.push(9)
    settle(bench, replica)
    assert replica.total("windows_lost") >= 2
    assert lost_when_it_dies(bench, replica) <= 1, "of the window that was open"
