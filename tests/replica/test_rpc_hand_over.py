"""A camera that moves between two live replicas: nothing is dropped, whatever the old one does."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from frame_parts import Replica, sending, serving

from cluster.types.reports import HandOverResult, WindowCounters


class Leaving(Replica):
    """Hands over once ``may`` is set; ``saved`` or not."""

    def __init__(self, saved: bool = True) -> None:
        super().__init__()
        self.saved = saved
        self.may = asyncio.Event()
        self.may.set()
        self.handed: list[str] = []

    async def on_hand_over(self, camera: str) -> HandOverResult:
        self.handed.append(camera)
        await self.may.wait()
        return HandOverResult(self.saved, WindowCounters(done=len(self.frames[camera]), dropped=100))


def fresh(make, index: int):
    return make.sample("gate", index, fresh=True)


@asynccontextmanager
async def moving(make, until, *, held: bool = True, saved: bool = True, **options):
    """A camera of one frame at ``old``, told to move to ``new``; ``held``: the old one does not let go yet."""
    old, new = Leaving(saved), Replica()
    if held:
        old.may.clear()
    async with serving(old) as here, serving(new) as there, sending(**options) as (sender, lost):
        sender.assign(make.spec("gate"), here)
        sender.send(make.sample("gate", 0))
        await until(lambda: old.indices() == [0])
        sender.assign(make.spec("gate"), there, hand_over=True)
        yield SimpleNamespace(old=old, new=new, here=here, there=there, sender=sender, lost=lost)


async def test_frames_before_the_fresh_one_go_to_the_old_replica_and_the_rest_waits(make, until):
    old, new = Leaving(), Replica()
    old.may.clear()
    async with serving(old) as here, serving(new) as there, sending() as (sender, lost):
        assert not sender.assign(make.spec("gate"), here)
        assert all(sender.send(make.sample("gate", i)) for i in range(3))
        await until(lambda: old.indices() == [0, 1, 2])
        assert sender.assign(make.spec("gate"), there, hand_over=True)
        assert sender.send(make.sample("gate", 3)), "it was on its way already"
        assert all(sender.send(sample) for sample in (fresh(make, 4), make.sample("gate", 5)))
        await until(lambda: old.handed == ["gate"])
        assert old.indices() == [0, 1, 2, 3]
        assert new.opened == [], "the new one must not look for a window that is still written"
        old.may.set()
        await until(lambda: new.indices() == [4, 5])
        await until(lambda: sender.status("gate").windows.done == 4 + 2)
        assert sender.status("gate").windows.dropped == 100, "what the old one settled still counts"
        assert sender.status("gate").dropped == sender.status("gate").lost == 0
        assert (lost, old.closed) == ([], [])
        assert sender.send(make.sample("gate", 6))
        await until(lambda: new.indices() == [4, 5, 6])


async def test_a_window_that_cannot_be_handed_over_is_told_with_what_was_settled(make, until):
    async with moving(make, until, held=False, saved=False) as it:
        it.sender.send(fresh(make, 1))
        await until(lambda: it.new.indices() == [1])
        [event] = it.lost
        assert (event.camera, event.address, event.settled, event.frames) == ("gate", it.here, 101, 0)
        await until(lambda: it.sender.status("gate").windows.done == 1)
        assert it.sender.status("gate").windows.dropped == 0


async def test_a_replica_that_never_lets_go_holds_nobody_up_for_long(make, until):
    async with moving(make, until, hand_over_s=0.2) as it:
        it.sender.send(fresh(make, 1))
        await until(lambda: it.new.indices() == [1])
        assert "did not close the camera in time" in it.lost[0].reason
        it.old.may.set()
        it.sender.send(make.sample("gate", 2))
        await until(lambda: it.new.indices() == [1, 2])
        assert len(it.lost) == 1


async def test_the_old_replica_dies_in_the_middle(make, until):
    old, new = Leaving(), Replica()
    old.may.clear()
    async with serving(new) as there, sending() as (sender, lost):
        async with serving(old) as here:
            sender.assign(make.spec("gate"), here)
            sender.send(make.sample("gate", 0))
            await until(lambda: old.indices() == [0])
            sender.assign(make.spec("gate"), there, hand_over=True)
            sender.send(fresh(make, 1))
            await until(lambda: old.handed)
            assert new.opened == []
        await until(lambda: new.indices() == [1])
        assert [event.settled for event in lost] == [1]


async def test_a_connection_that_breaks_before_the_fresh_frame_ends_the_hand_over_and_no_other_camera_notices(
    make, until
):
    old, again, new = Leaving(), Leaving(), Replica()
    async with serving(new) as there, sending(fresh_s=600.0) as (sender, lost):
        async with serving(old) as here:
            for camera in ("gate", "yard"):
                sender.assign(make.spec(camera), here)
                assert sender.send(make.sample(camera, 0))
            await until(lambda: sender.status("gate").windows.done == sender.status("yard").windows.done == 1)
            assert sender.assign(make.spec("gate"), there, hand_over=True)
        await until(lambda: new.opened)
        assert {each.camera: each.settled for each in lost} == {"gate": 1, "yard": None}
        lost.clear()
        async with serving(again, port=int(here.rpartition(":")[2])):
            assert sender.send(make.sample("yard", 1, fresh=True))
            await until(lambda: again.indices("yard") == [1])
            assert sender.send(make.sample("yard", 2))
            await until(lambda: again.indices("yard") == [1, 2])
        assert [spec.stream for spec in again.opened] == ["yard"]
        assert {each.camera for each in lost} <= {"yard"}
        assert sender.send(fresh(make, 3))
        await until(lambda: new.indices() == [3])


async def test_a_camera_that_is_silent_is_handed_over_without_a_fresh_frame(make, until):
    async with moving(make, until, held=False, fresh_s=0.05) as it:
        await until(lambda: it.new.opened)
        assert not it.sender.send(make.sample("gate", 1)), "the new one begins with a fresh frame"
        assert it.sender.send(fresh(make, 2))
        await until(lambda: it.new.indices() == [2])
        assert (it.lost, it.old.indices()) == ([], [0])


async def test_what_is_held_is_bounded(make, until):
    async with moving(make, until, max_queue=4) as it:
        it.sender.send(fresh(make, 1))
        taken = [it.sender.send(make.sample("gate", i)) for i in range(2, 8)]
        assert taken == [True] * 3 + [False] * 3
        assert it.sender.status("gate").dropped == 4 + 3
        assert it.sender.send(fresh(make, 8))
        it.old.may.set()
        await until(lambda: it.new.indices() == [8])
        assert it.lost == []


@pytest.mark.parametrize("flush", [False, True])
async def test_a_camera_that_ends_on_its_way_ends_at_the_new_replica(make, until, flush):
    async with moving(make, until) as it:
        it.sender.send(fresh(make, 1))
        await until(lambda: it.old.handed)
        it.sender.close("gate", flush=flush)
        assert not it.sender.send(make.sample("gate", 2))
        it.old.may.set()
        await until(lambda: it.new.closed == [("gate", flush)])
        assert it.new.indices() == ([1] if flush else [])
        assert it.sender.status("gate") is None


async def test_a_specification_that_changes_on_the_way_is_the_new_replicas(make, until):
    async with moving(make, until) as it:
        it.sender.send(fresh(make, 1))
        await until(lambda: it.old.handed)
        assert it.sender.assign(make.spec("gate", window_s=16.0), it.there, hand_over=True)
        it.old.may.set()
        await until(lambda: it.new.indices() == [1])
        assert [spec.window_s for spec in it.new.opened] == [16.0]
        assert [spec.window_s for spec in it.old.opened] == [40.0]


async def test_another_replica_than_first_said_gets_the_camera(make, until):
    third = Replica()
    async with moving(make, until) as it, serving(third) as yonder:
        it.sender.send(fresh(make, 1))
        await until(lambda: it.old.handed)
        assert it.sender.assign(make.spec("gate"), yonder, hand_over=True)
        it.old.may.set()
        await until(lambda: third.indices() == [1])
        assert (it.new.opened, it.lost) == ([], [])


async def test_a_camera_that_was_never_sent_simply_goes(make, until):
    old, new = Leaving(), Replica()
    async with serving(old) as here, serving(new) as there, sending() as (sender, lost):
        sender.assign(make.spec("gate"), here)
        assert not sender.assign(make.spec("gate"), there, hand_over=True)
        sender.send(make.sample("gate", 0))
        await until(lambda: new.indices() == [0])
        assert (old.handed, lost) == ([], [])
