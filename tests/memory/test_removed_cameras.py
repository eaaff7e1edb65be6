"""A replica carries out the controller's orders to forget removed cameras, in every tier, also one that is down."""

import asyncio
import time
from collections.abc import Iterator

import pytest
import torch
from redis_server import RedisServer
from remembering import SHORT_S, Site
from waiting import until, until_async

from cluster.control.camera_record import DeletionTracker
from cluster.errors import NotReadyError
from cluster.models import load_model
from cluster.replica.ask_queue import Conversations
from cluster.replica.events import WorkerFrames
from cluster.replica.memory import MemoryDeletions, WorkerMemory
from cluster.replica.thumbnails import ThumbnailStore
from cluster.replica.worker import EngineWorker
from cluster.types import Answer

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
        self.memory = WorkerMemory(self.worker, self.album, timeout_s=WAIT_S)
        self.forgetting = MemoryDeletions(self.memory, self.conversations, self.site.bank)

    def watch(self, frames: int = 24) -> None:
        self.worker.open(self.site.spec).result(WAIT_S)
        for number in range(frames):
            sample = self.site.camera.sample(number)
            self.worker.offer(sample).result(WAIT_S)
            self.memory.add_frame(sample)
        until(lambda: not self.worker.depths()["windows"])
        self.worker.call_on_engine_thread(lambda _: self.site.tend()).result(WAIT_S)

    async def beat(self, removals: DeletionTracker, *cameras: str) -> list[str]:
        """As the heartbeat does, with the cameras there are; returns what is forgotten everywhere."""
        told = sorted(self.forgetting.done)
        finished = removals.confirm("me", told, {"me"}).done
        self.forgetting.acknowledge(told)
        reported = [report.camera for report in self.worker.reports()]
        self.forgetting.schedule(removals.orders_for("me", reported, cameras))
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
        removals.add("cam")
        assert await replica.beat(removals) == []
        assert own_redis.names() == set()
        assert "cam" not in replica.album._streams
        assert len(replica.conversations) == 0
        assert replica.worker.open_streams() == []
        assert await replica.beat(removals) == ["cam"]
        assert removals.pending_cameras == []
        # Its decoder learns of it late, and sends frames once more.
        await asyncio.to_thread(replica.watch)
        assert own_redis.names()
        await replica.beat(removals)
        assert own_redis.names() == set()

    replica.watch()
    assert replica.album._streams["cam"].nbytes > 0
    asyncio.run(run())


@pytest.mark.parametrize("how", ["handed over", "surrendered", "abandoned"])
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


def test_an_order_is_carried_out_when_the_tier_that_was_down_is_back(replica: Replica, own_redis: RedisServer) -> None:
    async def run() -> None:
        removals = DeletionTracker(1)
        removals.add("cam")
        own_redis.freeze()
        for _ in range(3):
            assert await replica.beat(removals) == []
        assert removals.pending_cameras == ["cam"]
        # A camera of this name that was added meanwhile is not forgotten again and again.
        await asyncio.to_thread(replica.watch)
        frames = replica.site.bank.memory_reports()["cam"].frames
        await replica.beat(removals, "cam")
        assert replica.site.bank.memory_reports()["cam"].frames == frames > 0
        own_redis.thaw()
        until(lambda: replica.site.tiers.lowest.state().up)
        replica.worker.call_on_engine_thread(lambda _: replica.site.tend()).result(WAIT_S)
        await replica.beat(removals, "cam")
        assert await replica.beat(removals, "cam") == ["cam"]
        assert removals.pending_cameras == []
        assert (await replica.memory.describe("cam")).frames == frames

    replica.watch()
    before = own_redis.names()
    asyncio.run(run())
    replica.worker.call_on_engine_thread(lambda _: replica.site.recovered()).result(WAIT_S)
    assert before
    assert own_redis.client.exists("sightline:kv:manifest:cam"), "what the new one saw is there"


def test_another_camera_of_the_name_keeps_what_is_shared(replica: Replica, own_redis: RedisServer) -> None:
    """Another replica was down when the first camera was removed, and learns of it when there is a new one."""

    async def run() -> None:
        removals = DeletionTracker(2, {"cam": True})
        for step in ("open here", "open elsewhere"):
            frames = (await replica.memory.describe("cam")).frames
            replica.forgetting.schedule(removals.orders_for("me", cameras=["cam"]))
            await replica.forgetting.wait_until_done()
            assert replica.forgetting.done == {"cam"}
            assert own_redis.client.exists("sightline:kv:manifest:cam"), step
            assert replica.worker.open_streams() == (["cam"] if step == "open here" else [])
            assert bool(replica.site.tiers.usage("cam")["host"]) is (step == "open here")
            assert (await replica.memory.describe("cam")).frames == frames > 0
            replica.forgetting.acknowledge(["cam"])
            frames_service = WorkerFrames(replica.worker, replica.memory)
            await frames_service.on_hand_over("cam")
        # Nobody has its name any more.
        replica.forgetting.schedule(removals.orders_for("me"))
        await replica.forgetting.wait_until_done()
        assert own_redis.names() == set()

    replica.watch()
    asyncio.run(run())
