"""A camera moves from one live replica to another in the middle of a window, over real sockets and shared tiers."""

import threading

import pytest
from camera_parts import Keeper, camera_bench
from waiting import until

from cluster.memory.bank import MemoryBank
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.replica.events import WorkerFrames
from cluster.replica.memory import WorkerMemory
from cluster.replica.thumbnails import ThumbnailStore
from cluster.replica.worker import EngineWorker
from cluster.types import Answer
from cluster.types.reports import WindowCounters

WAIT_S = 20.0
STRIDE = 2_000_000


@pytest.fixture(scope="module")
def model():
    import torch

    from cluster.models.loading import load_model

    torch.set_num_threads(1)
    return load_model("tiny-qwen2_5_vl")


class Place:
    """A replica without Ray: engine, worker, memories over its own tier and one that all share."""

    def __init__(self, model, shared: Arena | None) -> None:
        from cluster.engine.native.engine import NativeEngine

        tiers = [Arena(32 * 2**20)] + ([] if shared is None else [shared])
        self.bank = MemoryBank(TierStack(tiers))
        self.engine = NativeEngine(model, memories=self.bank)
        self.answers: list[Answer] = []
        self.drops: list[tuple[str, int]] = []
        self.losses = 0
        self.worker = EngineWorker(self.engine, self, per_stream=8)
        self.worker.start()
        self.frames = WorkerFrames(self.worker, WorkerMemory(self.worker, ThumbnailStore(), timeout_s=5.0))

    def answered(self, answers, *, late) -> None:
        self.answers += answers

    def batch(self, windows) -> None:
        pass

    def dropped(self, stream, reason, windows) -> None:
        self.drops.append((str(reason), windows))

    def lost(self, stream, windows) -> None:
        self.losses += windows

    def paused(self) -> threading.Event:
        """Holds the engine's thread up until it is set."""
        go_on = threading.Event()
        self.worker.call_on_engine_thread(lambda _: go_on.wait(WAIT_S))
        return go_on


@pytest.fixture
def places(model):
    made: list[Place] = []

    def place(shared: Arena | None) -> Place:
        made.append(Place(model, shared))
        return made[-1]

    yield place
    assert all(each.worker.stop(WAIT_S) for each in made)


def spans(*moved: Place) -> list[tuple[int, int]]:
    return [(answer.window, answer.end) for place in moved for answer in place.answers]


def test_a_drained_replica_loses_no_window_and_nothing_is_computed_again(clip, places) -> None:
    shared = Arena(64 * 2**20, name="node")
    first, second = places(shared), places(shared)
    with camera_bench(clip, memory={"block_frames": 2}, window={"length_s": 20}) as bench:
        here, there = bench.replica(first.frames), bench.replica(second.frames)
        bench.camera.route(here)
        bench.push(11)
        until(lambda: len(first.answers) >= 4, "answers here")
        bench.camera.route(there, hand_over=True)
        bench.push(10)
        until(
            lambda: len(second.answers) >= 4,
            lambda: (
                "answers there",
                spans(first, second),
                (first.drops, second.drops, second.losses),
                (bench.sender.status("gate"), bench.camera.report()),
            ),
        )
        # Before the frames, whose answers may come at once.
        moved = len(first.answers)
        bench.camera.route(here, hand_over=True)
        bench.push(8)
        until(lambda: len(first.answers) >= moved + 3, "answers where it was")
        status = bench.sender.status("gate")
        report = bench.camera.report()
    told = sorted(spans(first, second))
    assert [window for window, _ in told] == list(range(len(told)))
    assert [end for _, end in told] == [told[0][1] + STRIDE * number for number in range(len(told))]
    assert (first.drops, second.drops, first.losses, second.losses) == ([], [], 0, 0)
    # Counters go on over moves; what was answered last is known with the next acknowledgement.
    assert len(told) - 3 <= status.windows.done + status.windows.gated <= len(told)
    assert (report.counts["windows_lost"], report.counts["windows_dropped"]) == (0, 0)
    # The first window at the new place rests on what the old one had computed.
    assert second.answers[0].tokens.reused > 0
    # Beside new frames nothing was encoded: the anchor that a move brings, and what came since the last window.
    assert second.answers[0].tokens.encoded < second.answers[0].tokens.kept


def test_windows_that_wait_are_answered_before_the_camera_leaves(clip, places) -> None:
    shared = Arena(64 * 2**20, name="node")
    first, second = places(shared), places(shared)
    with camera_bench(clip, memory={"block_frames": 2}, window={"length_s": 20}) as bench:
        bench.camera.route(bench.replica(first.frames))
        bench.push(6)
        until(lambda: len(first.answers) >= 2, "answers here")
        go_on = first.paused()
        bench.push(4)
        bench.camera.route(bench.replica(second.frames), hand_over=True)
        bench.push(5)
        until(lambda: bench.sender.status("gate").in_flight > 0, "frames that are held")
        assert second.worker.open_streams() == []
        go_on.set()
        until(lambda: len(second.answers) >= 2, "answers there")
    told = spans(first, second)
    assert [window for window, _ in told] == list(range(len(told)))
    assert first.worker.open_streams() == []


def test_without_a_shared_tier_the_window_in_the_making_is_counted_as_lost(clip, places) -> None:
    first, second = places(None), places(None)
    with camera_bench(clip, memory={"block_frames": 2}, window={"length_s": 20}) as bench:
        bench.camera.route(bench.replica(first.frames))
        bench.push(9)
        until(lambda: len(first.answers) >= 3, "answers here")
        bench.camera.route(bench.replica(second.frames), hand_over=True)
        bench.push(9)
        until(lambda: len(second.answers) >= 3, "answers there")
        until(lambda: bench.camera.report().counts["windows_lost"] == 1, "the loss")
    assert second.answers[0].window == 0
    assert (first.drops, second.drops, first.losses, second.losses) == ([], [], 0, 0)


def test_a_replica_that_died_is_not_asked_to_hand_over(clip, places) -> None:
    second = places(None)
    keeper = Keeper()
    with camera_bench(clip) as bench:
        bench.camera.route(bench.replica(keeper))
        bench.push(7)
        until(lambda: len(keeper.frames) >= 5, "frames here")
        # For longer than a stride nobody gets frames: nothing comes in place of the window that was open.
        bench.camera.route(None)
        bench.push(4)
        bench.camera.route(bench.replica(second.frames), hand_over=False)
        bench.push(7)
        until(lambda: len(second.answers) >= 2, "answers there")
        assert bench.camera.report().counts["windows_lost"] >= 1


def test_counters_of_a_camera_that_nobody_knows_are_none(places) -> None:
    place = places(None)
    assert place.frames.counters("gate") == WindowCounters()
    left = place.worker.hand_over("gate").result(WAIT_S)
    assert (left.saved, left.counters.done) == (False, 0)
