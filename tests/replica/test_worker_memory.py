"""Questions, their thumbnails, and forgetting on the engine's thread, beside windows, while cameras come and go."""

from __future__ import annotations

import asyncio
import contextlib
import io
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from rpc_serving import serving
from sightline.v1 import memory_pb2, memory_pb2_grpc
from worker_parts import HeldEngine, sample, spec

from cluster import metrics
from cluster.engine.native.engine import NativeEngine
from cluster.errors import NotReadyError, UnavailableError, UnknownCameraError
from cluster.gateway.memory_proxy import MemoryProxy
from cluster.memory.bank import MemoryBank
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import Outcome
from cluster.memory.tiers.stack import TierStack
from cluster.replica.ask_queue import Conversations
from cluster.replica.events import WorkerFrames
from cluster.replica.memory import MemoryDeletions, WorkerMemory
from cluster.replica.memory_service import MemoryServicer
from cluster.replica.thumbnails import ThumbnailStore
from cluster.replica.worker import EngineWorker
from cluster.types import Answer, AskResult, AskSpec, MemorySpec, Moment, StreamSpec, TokenCount
from cluster.wire.answers import AnswerHub
from cluster.wire.channel import ChannelPool, open_channel

WAIT_S = 20
MEMORY = MemorySpec(block_frames=2, organiser="resv", retriever="top_k", retriever_options={"share": 1.0})


class SlowAsks(HeldEngine):
    """Answers wait before each step while ``pause`` is closed; ``stepped`` counts those that were taken."""

    def __init__(self, engine: NativeEngine) -> None:
        super().__init__(engine)
        self.pause = threading.Event()
        self.pause.set()
        self.stepped = 0

    def ask(self, ask: AskSpec):
        run, outer = self._engine.ask(ask), self

        class Run:
            result = property(lambda _: run.result)

            def step(self) -> str | None:
                piece = run.step()
                outer.stepped += 1
                assert outer.pause.wait(WAIT_S)
                return piece

        return Run()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """``s``: seconds on the clock by which cameras are silent, which otherwise stands still."""
    clock = SimpleNamespace(s=time.monotonic())
    for module in ("memory.bank", "memory.eviction", "memory.stream", "replica.memory"):
        monkeypatch.setattr(f"cluster.{module}.time", SimpleNamespace(monotonic=lambda: clock.s))
    return clock


class Silent:
    """Whoever does not listen to the worker."""

    def __init__(self) -> None:
        self.answers: list = []

    def answered(self, answers, *, late) -> None:
        self.answers.extend(answers)

    def batch(self, windows) -> None: ...
    def dropped(self, stream, reason, windows) -> None: ...
    def lost(self, stream, windows) -> None: ...


class Place:
    """A worker whose engine remembers."""

    def __init__(self, model, *lower: Arena) -> None:
        self.tiers = TierStack([Arena(32 * 2**20), *lower])
        self.bank = MemoryBank(self.tiers, default=MEMORY)
        self.engine = SlowAsks(NativeEngine(model, memories=self.bank, max_new_tokens=4))
        self.events = Silent()
        self.worker = EngineWorker(self.engine, self.events)
        self.worker.start()
        self.fed: dict[str, int] = {}

    def open(self, name: str = "a", **changes) -> StreamSpec:
        opened = replace(spec(name, **changes), memory=MEMORY)
        self.worker.open(opened).result(WAIT_S)
        return opened

    def feed(self, count: int, name: str = "a") -> None:
        first = self.fed.get(name, 0)
        for index in range(first, first + count):
            self.worker.offer(sample(name, index)).result(WAIT_S)
        self.fed[name] = first + count
        # What left the windows is put away by threads of the memory's own.
        assert self.bank.wait_written(WAIT_S)

    def ask(self, name: str = "a", text: str = "What happened?", tokens: int = 6) -> Future[AskResult]:
        return self.worker.ask(AskSpec(name, text, max_new_tokens=tokens), lambda _: None, timeout_s=WAIT_S)

    @contextlib.contextmanager
    def under_way(self, name: str = "a") -> Iterator[Future[AskResult]]:
        """A question that has taken its first step, and goes no further within the context."""
        self.engine.pause.clear()
        before = self.engine.stepped
        done = self.ask(name)
        until(lambda: self.engine.stepped > before)
        yield done
        self.engine.pause.set()

    def settled(self, name: str = "a") -> None:
        """Some of its frames are in clusters, and not only waiting for them."""
        until(lambda: self.bank.get_memory(name)[0].counts.settled)

    def idle(self) -> None:
        """All commands were carried out."""
        self.worker.call_on_engine_thread(lambda _: None).result(WAIT_S)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def place(tiny_model) -> Iterator[Place]:
    place = Place(tiny_model)
    yield place
    place.engine.pause.set()
    assert place.worker.stop(WAIT_S)


def test_questions_are_answered_while_windows_go_on(place: Place) -> None:
    place.open()
    place.feed(12)
    place.settled()
    asked = [place.ask(text=f"What happened {number} s ago?") for number in range(3)]
    place.feed(8)
    assert all(done.result(WAIT_S).tokens_read > 0 for done in asked)
    until(lambda: len({answer.window for answer in place.events.answers}) == 10)


def test_the_load_tells_time_on_questions_apart(place: Place) -> None:
    place.open()
    place.feed(12)
    assert place.worker.load().asked_s < 0.2
    with place.under_way() as done:
        time.sleep(0.2)
    done.result(WAIT_S)
    place.idle()
    load = place.worker.load()
    assert 0.2 <= load.asked_s < load.busy_s


def test_a_camera_that_was_closed_ends_its_questions_and_no_others(place: Place) -> None:
    for name in "ab":
        place.open(name)
        place.feed(12, name)
        place.settled(name)
    with place.under_way("a") as first:
        waiting, other = place.ask("a"), place.ask("b")
        place.worker.close("a")
    for done in (first, waiting):
        with pytest.raises(UnavailableError, match="'a' was closed here"):
            done.result(WAIT_S)
    assert other.result(WAIT_S).tokens_read > 0


def test_a_file_that_ended_is_still_asked_about(place: Place) -> None:
    place.open(patient=True)
    place.feed(12)
    with place.under_way() as done:
        place.worker.close("a", flush=True)
        until(lambda: place.worker.depths()["frames"] == 0)
    wanted = done.result(WAIT_S)
    until(lambda: not place.worker.open_streams())
    again = place.ask().result(WAIT_S)
    assert again.tokens_read >= wanted.tokens_read > 0


def test_forgetting_ends_an_answer_under_way_and_not_the_questions_after_it(place: Place) -> None:
    place.open()
    place.feed(12)
    with place.under_way() as done:
        later = place.ask()
        forgotten = place.worker.delete_memory("a", 5.0)
    with pytest.raises(NotReadyError, match="had memory deleted while"):
        done.result(WAIT_S)
    assert forgotten.result(WAIT_S).result(WAIT_S).frames > 0
    answer = later.result(WAIT_S)
    assert answer.newest - answer.oldest <= 6_000_000
    place.worker.delete_memory("a").result(WAIT_S).result(WAIT_S)
    with pytest.raises(NotReadyError, match="has no memory yet"):
        place.ask().result(WAIT_S)
    place.feed(12)
    assert place.ask().result(WAIT_S).oldest >= 12_000_000


class HeldStores(Arena):
    """A tier that stores nothing while ``go`` is unset."""

    def __init__(self) -> None:
        super().__init__(32 * 2**20, name="low")
        self.go = threading.Event()
        self.go.set()

    def store(self, items):
        assert self.go.wait(WAIT_S)
        return super().store(items)


def test_windows_go_on_while_a_tier_rewrites_what_is_forgotten_in_part(tiny_model) -> None:
    low = HeldStores()
    place = Place(tiny_model, low)
    for name in "ab":
        place.open(name)
        place.feed(24, name)
    low.go.clear()
    deletion = place.worker.delete_memory("a", 12.0).result(WAIT_S)
    place.events.answers.clear()
    for index in range(24, 28):
        place.worker.offer(sample("b", index)).result(WAIT_S)
    until(lambda: [answer.stream for answer in place.events.answers] == ["b", "b"])
    # Frames are a second each: the newest, 23, less 12.
    answer = place.ask().result(WAIT_S)
    assert (answer.oldest, answer.newest) == (11_000_000, 23_000_000)
    assert not deletion.done()
    low.go.set()
    assert deletion.result(WAIT_S).frames == 11
    for tier in place.tiers.tiers:
        blocks = [loaded.block for loaded in tier.load(tier.list_blocks("a")[1])]
        frames = [int(each.frame.min()) for each in blocks if each is not None and each.key.dtype != torch.uint8]
        assert frames
        assert min(frames) >= 11
    assert place.worker.stop(WAIT_S)


def test_what_was_forgotten_in_part_is_deleted_before_the_call_ends_though_a_view_reads_it(place: Place) -> None:
    place.open()
    place.feed(24)
    memory, _ = place.bank.get_memory("a")
    view = memory.open_view()
    deletion = place.worker.delete_memory("a", 12.0).result(WAIT_S)
    read = {key.block for key in place.tiers.lowest.list_blocks("a")[1]}
    until(lambda: memory.heads[0][0] is not view.heads[0][0])
    assert not deletion.done()
    memory.close_view(view)
    deletion.result(WAIT_S)
    left = {key.block for key in place.tiers.lowest.list_blocks("a")[1]}
    assert left - read
    assert left == {key.block for key in memory.stored._sizes}
    assert not any(memory.stored._unnamed)


@pytest.mark.parametrize("ago_s", [12.0, None])
def test_pictures_and_answers_of_what_is_forgotten_go_though_a_tier_is_down(
    tiny_model, ago_s: float | None, monkeypatch
) -> None:
    low = HeldStores()
    place, album = Place(tiny_model, low), ThumbnailStore(every_s=1.0)
    memory = WorkerMemory(place.worker, album, timeout_s=WAIT_S, answers=AnswerHub(recent=10))
    tokens = TokenCount(0, 0, 0, 0, 0, 0, 0)
    began_s = time.monotonic()
    for number, given_s in enumerate((-20.0, -5.0)):
        monkeypatch.setattr(
            "cluster.wire.answers.time", SimpleNamespace(monotonic=lambda given_s=given_s: began_s + given_s)
        )
        memory.answers.publish([Answer("a", number, 0, 1, "q", 0.5, True, "", False, tokens)])
    monkeypatch.undo()
    place.open()
    place.feed(24)
    for index in range(24):
        memory.add_frame(sample("a", index))
    low.drop = lambda stream, keys=None: None
    low.put_manifest = lambda stream, manifest: Outcome.RETRY
    with pytest.raises(UnavailableError, match="not deleted in every tier"):
        asyncio.run(memory.delete_memory("a", ago_s))
    assert album.nearest("a", 9_000_000) is None
    assert (album.nearest("a", 12_000_000) is None) == (ago_s is None)
    assert [each.item.window for each in memory.answers._recent] == ([] if ago_s is None else [1])
    assert place.worker.stop(WAIT_S)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize(("ago_s", "oldest"), [(3612.0, 11_000_000), (1800.0, None)])
async def test_what_a_camera_saw_before_it_fell_silent_is_as_old_as_it_is(
    place: Place, clock: SimpleNamespace, ago_s: float, oldest: int | None, closed: bool
) -> None:
    """Of one that was silent for an hour, what was older than half an hour was to be forgotten, and stayed."""
    album = ThumbnailStore(every_s=1.0)
    memory = WorkerMemory(place.worker, album, place.bank, timeout_s=WAIT_S)
    place.open()
    place.feed(24)
    for index in range(24):
        memory.add_frame(sample("a", index))
    if closed:
        place.worker.close("a")
        place.idle()
    clock.s += 3600.0
    await memory.delete_memory("a", ago_s)
    assert (album.nearest("a", 20_000_000) is None) == (oldest is None)
    assert album.nearest("a", 9_000_000) is None
    if oldest is None:
        with pytest.raises(NotReadyError):
            place.ask().result(WAIT_S)
    else:
        answer = place.ask().result(WAIT_S)
        assert (answer.oldest, answer.newest) == (oldest, 23_000_000)


async def test_what_is_told_of_a_silent_camera_is_as_long_ago_as_it_is(place: Place, clock: SimpleNamespace) -> None:
    """A camera that was offline for an hour: the replayed windows were given Unix times of that hour."""
    memory = WorkerMemory(place.worker, ThumbnailStore(every_s=1.0), place.bank, timeout_s=WAIT_S)
    memory.register_camera(place.open())
    place.feed(24)
    for index in range(24):
        memory.add_frame(sample("a", index))
    clock.s += 3600.0
    async with serving(MemoryServicer(memory)) as address, open_channel(address) as channel:
        stub = memory_pb2_grpc.MemoryStub(channel)
        *_, answered = [each async for each in stub.Ask(memory_pb2.AskRequest(camera="a", text="What?"))]
        *_, window = [each async for each in stub.Replay(memory_pb2.ReplayRequest(camera="a", text="What?"))]
    assert answered.result.newest_age_s == pytest.approx(3600.0, abs=1e-5)
    assert answered.result.moments
    for moment in answered.result.moments:
        assert moment.ago_s == pytest.approx(3600.0 + 23 - moment.start / 1e6, abs=1e-5)
    assert window.ago_s == pytest.approx(3600.0, abs=1e-5)


@pytest.mark.parametrize("ago_s", [None, 12.0])
@pytest.mark.parametrize("written", [False, True])
async def test_a_camera_that_its_replica_has_not_given_away_yet_forgets_there_too(
    tiny_model, ago_s: float | None, written: bool
) -> None:
    """The camera table names the new one: a warm move is under way, or the old one has just closed the camera."""
    low = HeldStores()
    old, new = Place(tiny_model, low), Place(tiny_model, low)
    memories = [WorkerMemory(each.worker, ThumbnailStore(), each.bank, timeout_s=WAIT_S) for each in (old, new)]
    opened = old.open()
    old.feed(24)
    if written:
        low.go.clear()
        old.worker.close("a")
        old.idle()
        threading.Timer(0.2, low.go.set).start()
    async with serving(MemoryServicer(memories[0])) as here, serving(MemoryServicer(memories[1])) as there:

        async def placed(camera: str) -> str:
            return there

        async def replicas() -> list[str]:
            return [here, there]

        proxy = MemoryProxy(placed, ChannelPool(), replicas=replicas)
        async with serving(proxy) as gateway, open_channel(gateway) as channel:
            request = memory_pb2.ForgetRequest(camera="a", before_s=ago_s or 0.0)
            forgotten = await memory_pb2_grpc.MemoryStub(channel).Forget(request)
    if not written:
        assert forgotten.frames >= 11
        old.feed(12)
        assert old.worker.hand_over("a").result(WAIT_S).saved
    new.worker.prepare(opened)
    new.open()
    new.fed["a"] = old.fed["a"]
    new.feed(12)
    status = new.worker.call_on_engine_thread(lambda engine: engine.memory_status("a")).result(WAIT_S)
    assert status.oldest == 1_000_000 * (24 if ago_s is None else 11)
    for each in (old, new):
        assert each.worker.stop(WAIT_S)


def test_windows_go_on_while_a_tier_is_asked_how_much_it_holds(tiny_model) -> None:
    low = HeldStores()
    place = Place(tiny_model, low)
    memory = WorkerMemory(place.worker, ThumbnailStore(), place.bank, timeout_s=WAIT_S)
    place.open()
    place.feed(24)
    counted, go = low.nbytes, threading.Event()

    def late(stream: str | None = None) -> int:
        assert go.wait(WAIT_S)
        return counted(stream)

    low.nbytes = late

    async def run() -> None:
        described = asyncio.create_task(memory.describe("a"))
        await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.wrap_future(place.worker.call_on_engine_thread(lambda _: None)), WAIT_S / 4)
        assert not described.done()
        go.set()
        status = await described
        assert list(status.tier_bytes) == ["recent", "host", "low"]
        assert status.tier_bytes["low"] == counted("a") > 0

    try:
        asyncio.run(run())
    finally:
        go.set()
    assert place.worker.stop(WAIT_S)


def test_no_pictures_are_kept_of_a_camera_without_a_memory(place: Place) -> None:
    album = ThumbnailStore(every_s=1.0)
    memory = WorkerMemory(place.worker, album, timeout_s=WAIT_S)
    opened = place.open()
    memory.register_camera(opened)
    memory.add_frame(sample("a", 0))
    assert album.nearest("a", 0)
    memory.register_camera(replace(opened, memory=None))
    memory.add_frame(sample("a", 1))
    assert album.nearest("a", 0) is album.nearest("a", 1_000_000) is None
    memory.register_camera(opened)
    memory.add_frame(sample("a", 2))
    assert album.nearest("a", 2_000_000)


@pytest.mark.parametrize("closed", [None, False, True])
def test_a_removed_camera_is_forgotten_however_far_its_decoder_is(place: Place, closed: bool | None) -> None:
    place.open(patient=bool(closed))
    place.feed(12)
    if closed is not None:
        place.worker.close("a", flush=closed)
        until(lambda: not place.worker.open_streams())
        assert place.tiers.usage("a")["host"] > 0
    with place.under_way() as done:
        waiting = place.ask()
        removed = place.worker.remove_camera("a", "")
    removed.result(WAIT_S)
    for each in (done, waiting):
        with pytest.raises(UnknownCameraError, match="'a' was removed"):
            each.result(WAIT_S)
    assert place.tiers.usage("a") == {"host": 0}
    assert place.tiers.manifest("a")[1] is None
    assert place.bank.streams() == []
    assert place.worker.reports() == []
    with pytest.raises(NotReadyError):
        place.ask().result(WAIT_S)
    # What its decoder sends before it hears of it is refused, and closing what is gone is harmless.
    with pytest.raises(UnknownCameraError):
        place.worker.offer(sample("a", 12))
    place.worker.close("a")
    place.idle()
    assert place.tiers.manifest("a")[1] is None
    # One of the same name begins with nothing.
    place.fed.clear()
    place.open()
    place.feed(10)
    until(lambda: place.bank.memory_reports()["a"].frames)
    assert place.worker.call_on_engine_thread(lambda engine: engine.memory_status("a")).result(WAIT_S).frames < 10


def test_a_memory_without_a_lower_tier_stays_only_where_its_camera_may_come_back(place: Place) -> None:
    memory = WorkerMemory(place.worker, ThumbnailStore(), timeout_s=WAIT_S)
    deletions = MemoryDeletions(memory, Conversations(), place.bank)
    for name in ("a", "b"):
        place.open(name)
        place.feed(16, name)
    place.worker.close("a")
    place.idle()
    assert place.bank.wait_written(WAIT_S)
    for elsewhere in (False, True):
        for name in ("a", "b"):
            asyncio.run(deletions.leave_camera(name, elsewhere=elsewhere))
        assert (place.tiers.usage("a")["host"] == 0) == elsewhere
        # It is open: it has come back meanwhile.
        assert place.tiers.usage("b")["host"] > 0
    assert place.ask("b").result(WAIT_S).tokens_read > 0


def test_removing_a_camera_that_was_never_here_is_harmless(place: Place) -> None:
    place.worker.remove_camera("elsewhere", "").result(WAIT_S)
    assert place.worker.reports() == []


def test_an_engine_without_memory_lets_a_removed_camera_go(engine, tiny_model) -> None:
    worker = EngineWorker(engine, Silent())
    worker.start()
    worker.open(spec("a")).result(WAIT_S)
    worker.remove_camera("a", "").result(WAIT_S)
    assert worker.open_streams() == []
    with pytest.raises(NotReadyError):
        worker.delete_memory("a").result(WAIT_S)
    assert worker.stop(WAIT_S)
    with pytest.raises(UnavailableError, match="stopping"):
        worker.ask(AskSpec("a", "Why?"), lambda _: None, timeout_s=1)


def test_a_camera_nobody_knows_or_that_saw_nothing_says_so(place: Place) -> None:
    with pytest.raises(NotReadyError, match="has no memory: nothing was recorded since its memory was deleted"):
        place.ask("nobody").result(WAIT_S)
    place.open()
    with pytest.raises(NotReadyError, match="has no memory yet"):
        place.ask().result(WAIT_S)


def test_no_question_stops_the_engine(place: Place) -> None:
    """The service refuses most of these; the engine survives them all."""
    place.open()
    place.feed(12)
    place.settled()
    for text in ("", " ", "why " * 1500, "\ufffd\x00🚗" * 50):
        assert place.ask(text=text, tokens=2).result(WAIT_S).tokens_read > 0, text[:8]
        place.feed(2)
        place.worker.check()
        assert place.ask().result(WAIT_S).tokens_read > 0, text[:8]


def test_a_question_under_way_ends_when_the_worker_stops(place: Place) -> None:
    place.open()
    place.feed(12)
    with place.under_way() as done:
        stopping = threading.Thread(target=place.worker.stop, args=(WAIT_S,))
        stopping.start()
        time.sleep(0.05)
    stopping.join(WAIT_S)
    with pytest.raises(UnavailableError, match="stopping"):
        done.result(WAIT_S)


def test_after_a_failed_gpu_the_next_process_continues_the_window_of_the_tier(place: Place, tiny_model) -> None:
    opened = place.open()
    place.feed(12)
    until(lambda: len(place.events.answers) == 6)
    assert place.bank.wait_written(WAIT_S)
    assert place.bank.get_memory("a")[0].counts.windows_not_saved == 0
    place.engine.lost = "CUDA error: an illegal memory access was encountered"
    with contextlib.suppress(UnknownCameraError):
        for index in (12, 13):
            place.worker.offer(sample("a", index)).result(WAIT_S)

    def broken() -> bool:
        with contextlib.suppress(RuntimeError):
            place.worker.check()
            return False
        return True

    until(broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        place.worker.check()
    following = NativeEngine(tiny_model, memories=MemoryBank(place.tiers))
    following.admit(opened)
    (request,) = [each for index in (14, 15) for each in following.push(sample("a", index))]
    (answer,) = following.step([request])
    # Of what came before, that part has KV which was written before the GPU failed.
    assert request.window == 7
    assert answer.tokens.reused + answer.tokens.refreshed > 0
    assert answer.tokens.new == answer.tokens.encoded


def test_a_window_larger_than_an_eighth_of_the_cap_is_not_saved_and_said_to_be(
    place: Place, tiny_model, caplog: pytest.LogCaptureFixture
) -> None:
    opened = replace(spec("a"), memory=replace(MEMORY, cap_bytes=32 * 2**10))
    place.worker.open(opened).result(WAIT_S)
    for _ in range(6):
        place.feed(4)
    memory, _ = place.bank.get_memory("a")
    assert memory.counts.windows_not_saved > 1
    said = [record.getMessage() for record in caplog.records if "is not saved" in record.getMessage()]
    assert len(said) == 1
    window = place.engine.memory_bytes("a")
    assert "more than an eighth of memory.cap = 32 KiB" in said[0]
    assert window > memory.max_window_bytes
    following = NativeEngine(tiny_model, memories=MemoryBank(place.tiers))
    following.admit(opened)
    assert following.memory_bytes("a") == 0, "it begins anew"


class Away(Arena):
    """A tier that all replicas share, whose manifests cannot be read while it is away."""

    away = False

    def manifest(self, stream: str) -> tuple[Outcome, bytes | None]:
        return (Outcome.RETRY, None) if self.away else super().manifest(stream)


class Replica:
    """One whose camera's frames have a number and a grey level each."""

    def __init__(self, model, tier: Arena) -> None:
        self.place = Place(model, tier)
        self.memory = WorkerMemory(self.place.worker, ThumbnailStore(every_s=1.0), self.place.bank, timeout_s=WAIT_S)
        self.frames = WorkerFrames(self.place.worker, self.memory)
        # Numbers of the frames that left the window, in order.
        self.left: list[int] = []
        self.engine = self.place.engine._engine
        accept = self.place.bank.accept_chunk
        self.engine._kv_sink = lambda chunk: (self.left.append(chunk.index), accept(chunk))
        self.open()

    def open(self) -> None:
        camera = replace(spec("a"), memory=replace(MEMORY, compressor="none", cap_bytes=2**23))
        asyncio.run(self.frames.on_open(camera))

    def watch(self, first: int, stop: int, pts: int, *, gap: bool = False) -> None:
        """Frames of these numbers, a second each from ``pts`` on; the first is fresh, or follows a ``gap``."""

        async def run() -> None:
            for number in range(first, stop):
                seen = sample("a", number, fresh=number == first and not gap, start=pts - first * SECOND)
                seen = replace(seen, gap=number == first and gap, patches=np.full_like(seen.patches, 5 + 6 * number))
                await self.frames.on_frame(seen, time.monotonic())
                until(lambda: not self.place.worker.depths()["windows"])

        asyncio.run(run())
        self.place.idle()
        assert self.place.bank.wait_written(WAIT_S)

    def shown(self, start: int) -> int | None:
        """Number of the frame on the thumbnail of a moment of a second."""
        (file,) = asyncio.run(self.memory.pictures("a", [Moment(start, start + SECOND, 1.0)]))
        return round((np.asarray(Image.open(io.BytesIO(file))).mean() - 5) / 6) if file else None

    def check(self, first: int) -> None:
        """Frames in memory and window from number ``first`` on have their own thumbnails."""
        times = list(self.place.bank.get_memory("a")[0].log.times)
        assert times == sorted(set(times))
        held = dict(zip(self.left, times[-len(self.left) :], strict=True))
        held |= {frame.index: frame.memory_time for frame in self.engine._streams["a"].frames}
        assert {number: self.shown(at) for number, at in held.items() if number >= first} == {
            number: number for number in held if number >= first
        }
        assert max(held) > max(self.left) > min(held) + 2
        # Answers are about these times.
        for number in (first + 1, max(self.left), max(self.left) + 1):
            ask = AskSpec("a", "Why?", span=(held[number], held[number] + 1), max_new_tokens=1)
            (moment,) = self.place.worker.ask(ask, lambda _: None, timeout_s=WAIT_S).result(WAIT_S).moments
            assert (moment.start, moment.end) == (held[number], held[number] + SECOND)


SECOND = 1_000_000


@pytest.fixture
def replica(tiny_model) -> Iterator[Callable[[Arena], Replica]]:
    made: list[Replica] = []

    def make(tier: Arena) -> Replica:
        made.append(Replica(tiny_model, tier))
        return made[-1]

    yield make
    assert all(each.place.worker.stop(WAIT_S) for each in made)


def test_moments_show_their_own_frames_after_a_clock_restarted_several_times(replica) -> None:
    here = replica(Away(64 * 2**20, name="node"))
    # The last frame of an odd number is in no window, and never remembered.
    for number in range(4):
        here.watch(7 * number, 7 * number + 7, number * SECOND)
        if number == 1:
            here.place.worker.close("a")
            here.open()
    here.check(0)


@pytest.mark.parametrize(
    ("how", "clock"),
    [("handed over", "goes on"), ("killed", "restarts"), ("tier away", "goes on"), ("tier away", "restarts")],
)
def test_moments_show_their_own_frames_after_a_move_or_a_restart(replica, how: str, clock: str) -> None:
    tier = Away(64 * 2**20, name="node")
    here = replica(tier)
    here.watch(0, 7, 1000 * SECOND)
    here.watch(7, 14, 3 * SECOND)
    if how != "killed":
        assert asyncio.run(here.frames.on_hand_over("a")).saved
    tier.away = how == "tier away"
    there = replica(tier)
    there.watch(14, 21, 20 * SECOND if clock == "goes on" else 2 * SECOND, gap=clock == "goes on")
    there.check(14)
    tier.away = False
    there.watch(21, 28, 0)
    memory, _ = there.place.bank.get_memory("a")
    assert memory.restored
    assert memory.frames > len(there.left)
    there.check(14)


@pytest.mark.parametrize("standing", [False, True])
def test_windows_of_a_replay_count_as_no_questions(standing) -> None:
    """Neither those that are answered nor those of which nothing is left."""
    results = [NotReadyError("nothing is left"), AskResult("a", "", (), 0, 0, 0, 0, 0, 0.1, 0.2)]

    def begin(*_: object, **__: object) -> Future[AskResult]:
        done: Future[AskResult] = Future()
        result = results.pop(0)
        done.set_exception(result) if isinstance(result, Exception) else done.set_result(result)
        return done

    async def ask() -> None:
        async for _ in WorkerMemory(SimpleNamespace(ask=begin), ThumbnailStore(), timeout_s=1.0).ask(
            AskSpec("a", "Why?", standing=standing)
        ):
            pass

    before = [metrics.asks.labels(name)._value.get() for name in ("failed", "answered")]
    with pytest.raises(NotReadyError):
        asyncio.run(ask())
    asyncio.run(ask())
    after = [metrics.asks.labels(name)._value.get() for name in ("failed", "answered")]
    assert [new - old for new, old in zip(after, before, strict=True)] == ([0, 0] if standing else [1, 1])
