"""A camera that moves between two live replicas: nothing is dropped, whatever the old one does."""

from __future__ import annotations

import asyncio

import pytest
from frame_parts import Replica, sending, serving

from cluster.types.reports import HandedOver, WindowCounters


class Leaving(Replica):
    """Hands over once ``may`` is set; ``saved`` or not."""

    def __init__(self, saved: bool = True) -> None:
        super().__init__()
        self.saved = saved
        self.may = asyncio.Event()
        self.may.set()
        self.handed: list[str] = []

    async def on_hand_over(self, camera: str) -> HandedOver:
        self.handed.append(camera)
        await self.may.wait()
        return HandedOver(self.saved, WindowCounters(done=len(self.frames[camera]), dropped=100))


def fresh(make, index: int):
    return make.sample("gate", index, fresh=True)


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
        await until(lambda: sender.status("gate").windows_done == 4 + 2)
        assert sender.status("gate").windows_dropped == 100, "what the old one settled still counts"
        assert sender.status("gate").dropped == sender.status("gate").lost == 0
        assert (lost, old.closed) == ([], [])
        assert sender.send(make.sample("gate", 6))
        await until(lambda: new.indices() == [4, 5, 6])


async def test_a_window_that_cannot_be_handed_over_is_told_with_what_was_settled(make, until):
    old, new = Leaving(saved=False), Replica()
    async with serving(old) as here, serving(new) as there, sending() as (sender, lost):
        sender.assign(make.spec("gate"), here)
        sender.send(make.sample("gate", 0))
        await until(lambda: old.indices() == [0])
        sender.assign(make.spec("gate"), there, hand_over=True)
        sender.send(fresh(make, 1))
        await until(lambda: new.indices() == [1])
        [event] = lost
        assert (event.camera, event.address, event.settled, event.frames) == ("gate", here, 101, 0)
        await until(lambda: sender.status("gate").windows_done == 1)
        assert sender.status("gate").windows_dropped == 0


async def test_a_replica_that_never_lets_go_holds_nobody_up_for_long(make, until):
    old, new = Leaving(), Replica()
    old.may.clear()
    async with serving(old) as here, serving(new) as there, sending(hand_over_s=0.2) as (sender, lost):
        sender.assign(make.spec("gate"), here)
        sender.send(make.sample("gate", 0))
        await until(lambda: old.indices() == [0])
        sender.assign(make.spec("gate"), there, hand_over=True)
        sender.send(fresh(make, 1))
        await until(lambda: new.indices() == [1])
        assert "did not close the camera in time" in lost[0].reason
        old.may.set()
        sender.send(make.sample("gate", 2))
        await until(lambda: new.indices() == [1, 2])
        assert len(lost) == 1


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


async def test_a_camera_that_is_silent_is_handed_over_without_a_fresh_frame(make, until):
    old, new = Leaving(), Replica()
    async with serving(old) as here, serving(new) as there, sending(fresh_s=0.05) as (sender, lost):
        sender.assign(make.spec("gate"), here)
        sender.send(make.sample("gate", 0))
        await until(lambda: old.indices() == [0])
        sender.assign(make.spec("gate"), there, hand_over=True)
        await until(lambda: new.opened)
        assert not sender.send(make.sample("gate", 1)), "the new one begins with a fresh frame"
        assert sender.send(fresh(make, 2))
        await until(lambda: new.indices() == [2])
        assert (lost, old.indices()) == ([], [0])


async def test_what_is_held_is_bounded(make, until):
    old, new = Leaving(), Replica()
    old.may.clear()
    async with serving(old) as here, serving(new) as there, sending(max_queue=4) as (sender, lost):
        sender.assign(make.spec("gate"), here)
        sender.send(make.sample("gate", 0))
        await until(lambda: old.indices() == [0])
        sender.assign(make.spec("gate"), there, hand_over=True)
        sender.send(fresh(make, 1))
        taken = [sender.send(make.sample("gate", i)) for i in range(2, 8)]
        assert taken == [True] * 3 + [False] * 3
        assert sender.status("gate").dropped == 4 + 3
        assert sender.send(fresh(make, 8))
        old.may.set()
        await until(lambda: new.indices() == [8])
        assert lost == []


@pytest.mark.parametrize("flush", [False, True])
async def test_a_camera_that_ends_on_its_way_ends_at_the_new_replica(make, until, flush):
    old, new = Leaving(), Replica()
    old.may.clear()
    async with serving(old) as here, serving(new) as there, sending() as (sender, _):
        sender.assign(make.spec("gate"), here)
        sender.send(make.sample("gate", 0))
        await until(lambda: old.indices() == [0])
        sender.assign(make.spec("gate"), there, hand_over=True)
        sender.send(fresh(make, 1))
        await until(lambda: old.handed)
        sender.close("gate", flush=flush)
        assert not sender.send(make.sample("gate", 2))
        old.may.set()
        await until(lambda: new.closed == [("gate", flush)])
        assert new.indices() == ([1] if flush else [])
        assert sender.status("gate") is None


async def test_another_replica_than_first_said_gets_the_camera(make, until):
    old, second, third = Leaving(), Replica(), Replica()
    old.may.clear()
    async with serving(old) as here, serving(second) as there, serving(third) as yonder, sending() as (sender, lost):
        sender.assign(make.spec("gate"), here)
        sender.send(make.sample("gate", 0))
        await until(lambda: old.indices() == [0])
        sender.assign(make.spec("gate"), there, hand_over=True)
        sender.send(fresh(make, 1))
        await until(lambda: old.handed)
        assert sender.assign(make.spec("gate"), yonder, hand_over=True)
        old.may.set()
        await until(lambda: third.indices() == [1])
        assert (second.opened, lost) == ([], [])


async def test_a_camera_that_was_never_sent_simply_goes(make, until):
    old, new = Leaving(), Replica()
    async with serving(old) as here, serving(new) as there, sending() as (sender, lost):
        sender.assign(make.spec("gate"), here)
        assert not sender.assign(make.spec("gate"), there, hand_over=True)
        sender.send(make.sample("gate", 0))
        await until(lambda: new.indices() == [0])
        assert (old.handed, lost) == ([], [])
