"""Conversations: bounded in number, in turns and in time, one question after the other."""

import asyncio

import pytest

from cluster.errors import CapacityError, NotReadyError
from cluster.replica.ask_queue import Conversations


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


async def say(conversations, id="", text="q", camera="gate"):
    async with conversations.begin_turn(camera, id) as conversation:
        conversations.add_turn(conversation, text, text.upper())
        return conversation


async def test_the_last_turns_are_kept():
    conversations = Conversations(turns=3)
    begun = await say(conversations, text="a")
    for text in "bcde":
        await say(conversations, begun.id, text)
    assert list(begun.turns) == [("c", "C"), ("d", "D"), ("e", "E")]


async def test_an_hour_without_a_question_ends_it():
    clock = Clock()
    conversations = Conversations(idle_s=3600, clock=clock)
    kept, left = await say(conversations), await say(conversations)
    clock.now = 3000.0
    await say(conversations, kept.id)
    clock.now = 3601.0
    assert await say(conversations, kept.id) is kept
    with pytest.raises(NotReadyError, match=f"there is no conversation '{left.id}', or it is over"):
        await say(conversations, left.id)
    assert len(conversations._known) == 1


async def test_the_one_used_longest_ago_makes_room():
    conversations = Conversations(limit=3)
    a, b, c = [await say(conversations) for _ in range(3)]
    await say(conversations, a.id)
    await say(conversations)
    assert len(conversations._known) == 3
    for kept in (a, c):
        await say(conversations, kept.id)
    with pytest.raises(NotReadyError):
        await say(conversations, b.id)


async def test_one_with_a_question_under_way_stays():
    conversations = Conversations(limit=2)
    a, b = await say(conversations), await say(conversations)
    async with conversations.begin_turn("gate", a.id):
        await say(conversations, b.id)
        await say(conversations)
        assert len(conversations._known) == 2
    assert await say(conversations, a.id) is a
    with pytest.raises(NotReadyError):
        await say(conversations, b.id)


async def test_one_that_was_never_answered_is_not_kept():
    conversations = Conversations()
    with pytest.raises(RuntimeError):
        async with conversations.begin_turn("gate", ""):
            raise RuntimeError
    assert len(conversations._known) == 0


async def test_forgetting_ends_one_that_waits(until):
    conversations = Conversations()
    a = await say(conversations)
    async with conversations.begin_turn("gate", a.id) as first:
        waiting = asyncio.create_task(say(conversations, a.id))
        await until(lambda: a.users == 2)
        with pytest.raises(CapacityError, match="has a question waiting already"):
            await say(conversations, a.id)
        conversations.end_camera("yard")
        assert list(first.turns) == [("q", "Q")]
        conversations.end_camera("gate")
        conversations.add_turn(first, "late", "LATE")
        assert not first.turns
    with pytest.raises(NotReadyError, match="or it is over"):
        await waiting
    assert len(conversations._known) == 0


async def test_one_that_gives_up_waiting_lets_the_next_one_wait(until):
    conversations = Conversations()
    a = await say(conversations)
    async with conversations.begin_turn("gate", a.id):
        waiting = asyncio.create_task(say(conversations, a.id))
        await until(lambda: a.users == 2)
        waiting.cancel()
        await asyncio.wait({waiting})
        next_one = asyncio.create_task(say(conversations, a.id, "n"))
        await until(lambda: a.users == 2)
    assert list((await next_one).turns) == [("q", "Q"), ("n", "N")]
