"""A replica carries out the controller's orders to forget removed cameras, in every tier, also one that is down."""

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from redis_server import RedisServer
from remembering import MIB, SHORT_S, Site, stream
from waiting import until, until_async

from cluster.control.camera_record import DeletionTracker
from cluster.errors import NotReadyError
from cluster.models.loading import load_model
from cluster.replica.ask_queue import Conversations
from cluster.replica.events import WorkerFrames
from cluster.replica.memory import MemoryDeletions, WorkerMemory
from cluster.replica.thumbnails import ThumbnailStore
from cluster.replica.worker import EngineWorker
from cluster.types import Answer, AskSpec

WAIT_S = 20.0


class Silent:
    """Whoever does not listen to the worker."""

    def answered(self, answers: list[Answer], *, late: bool) -> None: ...
    def batch(self, windows: int) -> None: ...
    def dropped(self, stream: str, reason: str, windows: int) -> None: ...
    def lost(self, stream: str, windows: int) -> None: ...


class Replica:
    """What a replica has to do with memories, without its services."""

    def __init__(self, url: str) -> None:
        torch.set_num_threads(1)
        self.site = Site(load_model("tiny-qwen2_5_vl"), url, deadline_s=SHORT_S)
        self.site.leave()
        self.worker = EngineWorker(self.site.engine, Silent())  # type: ignore[arg-type]
        self.worker.start()
        self.album, self.conversations = ThumbnailStore(), Conversations()
        self.memory = WorkerMemory(self.worker, self.album, self.site.bank, timeout_s=WAIT_S)
        self.forgetting = MemoryDeletions(self.memory, self.conversations, self.site.bank)

    def watch(self, frames: int = 24, life: str = "") -> None:
        self.worker.open(replace(self.site.spec, life=life)).result(WAIT_S)
        for number in range(frames):
            sample = self.site.camera.sample(number)
            self.worker.offer(sample).result(WAIT_S)
            self.memory.add_frame(sample)
        until(lambda: not self.worker.depths()["windows"])
        self.worker.call_on_engine_thread(lambda _: self.site.tend()).result(WAIT_S)

    async def beat(self, removals: DeletionTracker) -> list[str]:
        """As the heartbeat does; returns what is forgotten everywhere."""
        told = sorted(self.forgetting.done)
        finished = removals.confirm("me", told, {"me"})
        self.forgetting.acknowledge(told)
        reported = [report.life for report in self.worker.reports()]
        self.forgetting.schedule(removals.orders_for("me", reported))
        await self.forgetting.wait_until_done()
        return finished


@pytest.fixture
def replica(own_redis: RedisServer) -> Iterator[Replica]:
    own_redis.start()
    replica = Replica(own_redis.url)
    yield replica
    assert replica.worker.stop(WAIT_S)
    replica.site.tiers.close()


async def say(replica: Replica) -> str:
    """Id of a conversation about the camera."""
    async with replica.conversations.begin_turn("cam", "") as conversation:
        replica.conversations.add_turn(conversation, "Why?", "because")
        return conversation.id


def test_memory_pictures_and_conversations_of_a_removed_camera_go(replica: Replica, own_redis: RedisServer) -> None:
    async def run() -> None:
        await say(replica)
        removals = DeletionTracker(1)
        assert await replica.beat(removals) == []
        assert own_redis.names()
        assert [tier.cap("cam") for tier in tiers] == [MIB, MIB]
        removals.add("1", "cam")
        assert await replica.beat(removals) == []
        assert own_redis.names() == set()
        assert "cam" not in replica.album._streams
        assert not replica.conversations._known
        assert replica.worker.open_streams() == []
        assert await replica.beat(removals) == ["1"]
        assert not removals.pending
        # Its decoder learns of it late, and sends frames once more.
        await asyncio.to_thread(replica.watch, life="1")
        assert own_redis.names()
        await replica.beat(removals)
        assert own_redis.names() == set()
        # Cameras have ever new names.
        assert [tier.cap("cam") for tier in tiers] == [tier.limit for tier in tiers] != [MIB, MIB]

    tiers = replica.site.tiers.tiers
    replica.site.spec = stream("cam", cap_bytes=MIB)
    replica.watch(life="1")
    assert replica.album._streams["cam"].nbytes > 0
    asyncio.run(run())


@pytest.mark.parametrize("how", ["handed over", "handed over to nobody", "surrendered", "abandoned"])
def test_a_replica_that_let_a_camera_go_has_nothing_of_it_alone(
    replica: Replica, own_redis: RedisServer, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever deletes its memory asks the replica that has it: what the tiers share is there, the rest must be gone."""
    monkeypatch.setattr("cluster.replica.events.ORPHAN_S", -1.0)

    async def run() -> None:
        frames = WorkerFrames(replica.worker, replica.memory, deletions=replica.forgetting)
        conversation = await say(replica)
        assert replica.site.tiers.usage("cam")["host"] > 0
        if how == "handed over":
            assert (await frames.on_hand_over("cam")).saved
        elif how == "handed over to nobody":
            # The decoder that asked for it dies, and its call with it.
            asked = asyncio.create_task(frames.on_hand_over("cam"))
            await asyncio.sleep(0)
            asked.cancel()
            await asyncio.wait([asked])
            await until_async(lambda: not frames._leaving)
        elif how == "surrendered":
            await replica.forgetting.surrender_all(replica.worker)
        else:
            await frames.on_lost(["cam"])
            frames.close_orphans(time.monotonic())
            await until_async(lambda: not frames._leaving)
        assert replica.worker.open_streams() == []
        assert replica.site.tiers.usage("cam")["host"] == 0
        assert replica.site.tiers.usage("cam")["redis"] > 0
        assert "cam" not in replica.album._streams
        with pytest.raises(NotReadyError):
            async with replica.conversations.begin_turn("cam", conversation):
                pass
        # It comes back, as the camera it was.
        await asyncio.to_thread(replica.watch)
        assert (await replica.memory.describe("cam")).frames > held

    replica.watch()
    held = replica.site.bank.memory_reports()["cam"].frames
    asyncio.run(run())


def test_a_camera_that_is_opened_again_before_it_could_leave_keeps_its_pictures(replica: Replica) -> None:
    async def run() -> None:
        frames = WorkerFrames(replica.worker, replica.memory, deletions=replica.forgetting)
        held, free = threading.Event(), threading.Event()
        replica.worker.call_on_engine_thread(lambda _: (held.set(), free.wait(WAIT_S)))
        await asyncio.to_thread(held.wait)
        leaves = asyncio.create_task(frames.on_hand_over("cam"))
        await asyncio.sleep(0.01)
        again = replica.worker.open(replica.site.spec)
        free.set()
        assert not (await leaves).saved
        assert again.done()
        assert "cam" in replica.album._streams

    replica.watch()
    asyncio.run(run())


def test_an_order_is_carried_out_when_the_tier_that_was_down_is_back(replica: Replica, own_redis: RedisServer) -> None:
    async def run() -> None:
        removals = DeletionTracker(1)
        removals.add("1", "cam")
        own_redis.freeze()
        for _ in range(3):
            assert await replica.beat(removals) == []
        assert [*removals.pending] == ["1"]
        # A camera of this name that was added meanwhile is not forgotten again and again.
        await asyncio.to_thread(replica.watch, life="2")
        frames = replica.site.bank.memory_reports()["cam"].frames
        await replica.beat(removals)
        assert replica.site.bank.memory_reports()["cam"].frames == frames > 0
        own_redis.thaw()
        until(lambda: replica.site.tiers.lowest.state().up)
        replica.worker.call_on_engine_thread(lambda _: replica.site.tend()).result(WAIT_S)
        assert await replica.beat(removals) == ["1"]
        assert not removals.pending
        assert (await replica.memory.describe("cam")).frames == frames

    replica.watch(life="1")
    before = own_redis.names()
    asyncio.run(run())
    replica.worker.call_on_engine_thread(lambda _: replica.site.recovered()).result(WAIT_S)
    assert before
    assert own_redis.client.exists("sightline:kv:manifest:cam"), "what the new one saw is there"


def test_another_camera_of_the_name_keeps_what_it_remembers(replica: Replica, own_redis: RedisServer) -> None:
    """A replica that was down when the first one was removed is told when there is a new one, here or elsewhere."""

    async def run() -> None:
        removals = DeletionTracker(2, {"1": "cam"})
        for step in ("open here", "open elsewhere"):
            frames = (await replica.memory.describe("cam")).frames
            replica.forgetting.schedule(removals.orders_for("me"))
            await replica.forgetting.wait_until_done()
            assert replica.forgetting.done == {"1"}
            assert own_redis.client.exists("sightline:kv:manifest:cam"), step
            assert replica.worker.open_streams() == (["cam"] if step == "open here" else [])
            assert bool(replica.site.tiers.usage("cam")["host"]) is (step == "open here")
            assert (await replica.memory.describe("cam")).frames == frames > 0
            replica.forgetting.acknowledge(["1"])
            frames_service = WorkerFrames(replica.worker, replica.memory)
            await frames_service.on_hand_over("cam")
        removals.add("2", "cam")
        replica.forgetting.schedule(removals.orders_for("me"))
        await replica.forgetting.wait_until_done()
        assert own_redis.names() == set()

    replica.watch(life="2")
    asyncio.run(run())


def test_a_new_camera_gets_nothing_of_an_earlier_one_before_that_is_deleted(replica: Replica) -> None:
    """Its decoder may be faster than the order to delete the earlier one's memory, which spares it then."""

    async def run() -> None:
        frames = WorkerFrames(replica.worker, replica.memory, deletions=replica.forgetting)
        replica.forgetting.open_camera(replace(replica.site.spec, life="1"))
        conversation = await say(replica)
        await frames.on_open(replace(replica.site.spec, life="2"))
        assert "cam" not in replica.album._streams
        with pytest.raises(NotReadyError):
            async with replica.conversations.begin_turn("cam", conversation):
                pass
        with pytest.raises(NotReadyError):
            replica.worker.ask(AskSpec("cam", "Why?"), lambda _: None, timeout_s=WAIT_S).result(WAIT_S)
        await asyncio.to_thread(replica.watch, life="2")
        seen = (await replica.memory.describe("cam")).frames
        replica.forgetting.schedule({"1": "cam"})
        await replica.forgetting.wait_until_done()
        assert replica.worker.open_streams() == ["cam"]
        assert "cam" in replica.album._streams
        assert (await replica.memory.describe("cam")).frames == seen > 0

    replica.watch(life="1")
    asyncio.run(run())
