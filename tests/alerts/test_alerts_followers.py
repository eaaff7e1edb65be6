"""What followers of incidents are told besides what sinks get: who sees to one, and what became of its clip."""

import asyncio
import json
import sqlite3
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from sink_parts import Receiver

from cluster.alerts.incident import Changes, IncidentQuery
from cluster.alerts.service import FILE, AlertService
from cluster.alerts.store import AlertStore
from cluster.config import load_config
from cluster.errors import NotFoundError, NotReadyError


@asynccontextmanager
async def running(folder, receiver=None, *, clips=True, **alerts):
    sinks = [{"name": "ops", "kind": "webhook", "options": {"url": receiver.url}}] if receiver else []
    body = {"sinks": sinks, "consecutive": 1, "release": 1, "cooldown_s": 0, **alerts}
    questions = [{"id": "person", "text": "?"}]
    body = {"alerts": body, "clips": {"enabled": clips}, "cameras": [{"name": "gate"}], "questions": questions}
    service = AlertService(load_config(None, body), folder)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


async def told(follower, count):
    """``count`` events, and no other after them."""
    events = [(await anext(follower))[0] for _ in range(count)]
    assert not follower._queue
    return events


def short(events):
    return [(event.kind, event.cause, event.incident.clip, event.incident.open) for event in events]


async def test_sinks_are_told_of_who_sees_to_it_and_followers_of_the_clip_as_well(tmp_path, make, until):
    async with Receiver() as receiver, running(tmp_path, receiver) as service:
        with service.follow() as follower:
            service.accept_answer(make.answer(0))
            [new] = await told(follower, 1)
            await service.acknowledge(new.incident.id, "ann")
            await service.set_clip_state(new.incident.id, "part", "the clip is incomplete: it began late")
            service.accept_answer(make.answer(1, 0.0))
            await until(lambda: len(receiver.got) == 3)
            events = await told(follower, 3)
        assert short([new, *events]) == [
            ("new", "", "waiting", True),
            ("update", "acknowledged", "waiting", True),
            ("update", "clip", "part", True),
            ("end", "", "part", False),
        ]
        clip = events[1]
        assert (clip.key, clip.incident.footage_note) == (
            f"{new.incident.id}-clip",
            "the clip is incomplete: it began late",
        )
        assert clip.incident.acknowledged_by == "ann", "an event has all that was so before it"
        sent = [json.loads(body) for _, body in receiver.got]
        assert [(each["event"], each["incident"]["clip"]) for each in sent] == [
            ("new", "waiting"),
            ("update", "waiting"),
            ("end", "part"),
        ]
        detail = await service.incident(new.incident.id)
        assert [(event.kind, event.cause) for event in detail.events] == [
            ("new", ""),
            ("update", "acknowledged"),
            ("end", ""),
        ]
        assert (await service.outbox()).sinks["ops"].delivered == 3


async def test_a_clip_that_cannot_be_had_is_told_after_the_end_too(tmp_path, make):
    async with running(tmp_path) as service:
        with service.follow() as follower:
            service.accept_answer(make.answer(0))
            service.accept_answer(make.answer(1, 0.0))
            new, _ = await told(follower, 2)
            await service.set_clip_state(new.incident.id, "none", "no clip: the disk is full")
            [clip] = await told(follower, 1)
        assert short([clip]) == [("update", "clip", "none", False)]
        assert (await service.incident(new.incident.id)).incident == clip.incident
        await service.set_clip_state("nothing", "whole", "")
        assert not follower._queue


async def test_a_clip_takes_nothing_back_that_came_with_it(tmp_path, make):
    """All in one batch: whoever keeps the newest event's incident has it as it is."""
    async with running(tmp_path) as service:
        with service.follow() as follower:
            service.accept_answer(make.answer(0))
            [new] = await told(follower, 1)
            async with service._flushing:
                settling = asyncio.create_task(service.set_clip_state(new.incident.id, "whole", ""))
                await asyncio.sleep(0)
                acknowledging = asyncio.create_task(service.acknowledge(new.incident.id, "ann"))
                await asyncio.sleep(0)
                service.accept_answer(make.answer(1, 0.0))
            await asyncio.gather(settling, acknowledging)
            events = await told(follower, 3)
        assert short(events) == [
            ("update", "acknowledged", "whole", True),
            ("end", "", "whole", False),
            ("update", "clip", "whole", False),
        ]
        assert (await service.incident(new.incident.id)).incident == events[-1].incident


async def test_acknowledging_twice_is_one_event_and_no_error(tmp_path, make):
    async with running(tmp_path) as service:
        with service.follow() as follower:
            service.accept_answer(make.answer(0))
            [new] = await told(follower, 1)
            for who in ("ann", "bob"):
                assert (await service.acknowledge(new.incident.id, who)).acknowledged_by == "ann"
            await told(follower, 1)
            # Whoever got no answer asks again, and meanwhile it has ended.
            service.accept_answer(make.answer(1, 0.0))
            await told(follower, 1)
            again = await service.acknowledge(new.incident.id, "ann")
            assert (again.acknowledged_by, again.open) == ("ann", False)
            service.accept_answer(make.answer(2))
            service.accept_answer(make.answer(3, 0.0))
            other, _ = await told(follower, 2)
            with pytest.raises(NotReadyError, match="is open"):
                await service.acknowledge(other.incident.id, "ann")


async def test_a_disk_that_does_not_write_loses_neither_end_nor_clip(tmp_path, make, until):
    """The file says that the incident is open, and cannot be told otherwise yet."""
    async with running(tmp_path) as service:
        service._journal._deadline_s = 0.2
        service.accept_answer(make.answer(0))
        [incident] = service.open_incidents()
        await service._flush()
        with service.follow() as follower:
            other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            service.accept_answer(make.answer(1, 0.0))
            await until(lambda: service._journal.trouble)
            await service.set_clip_state(incident.id, "whole", "")
            assert short(await told(follower, 2)) == [("end", "", "waiting", False), ("update", "clip", "whole", False)]
            other.execute("ROLLBACK")
            other.close()
        await until(lambda: not service._journal.trouble and not service._journal.unwritten(incident.id))
        found = (await service.incident(incident.id)).incident
        assert (found.open, found.clip) == (False, "whole")


@pytest.mark.parametrize("ahead_s", [0.0, 300.0])
async def test_clips_that_nobody_makes_any_more_are_told_not_to_come(tmp_path, make, monkeypatch, ahead_s):
    """Alerting was restarted: of what is too long ago nothing is held, and what is recent is made again. Also where the
    clock was ahead before."""
    async with running(tmp_path) as service:
        clock = SimpleNamespace(time=lambda: time.time() + ahead_s, monotonic=time.monotonic)
        monkeypatch.setattr("cluster.alerts.wall_clock.time", clock)
        service.accept_answer(make.answer(0))
        [old] = service.open_incidents()
        await service._flush()
    monkeypatch.undo()
    # More are newer than a list of incidents has.
    kept = AlertStore(tmp_path / FILE)
    ended = replace(old, ended_s=old.opened_s, opened_s=old.opened_s + 0.001, clip="whole")
    kept.write(Changes(incidents={each: replace(ended, id=each) for each in map(str, range(1001))}))
    kept.close()
    now_s = time.time()
    async with running(tmp_path) as service:
        with service.follow() as follower:
            assert [each.id for each in await service.pending_clips(old.opened_s)] == [old.id]
            assert await service.pending_clips(now_s + 600 + ahead_s) == []
            [clip] = await told(follower, 1)
        assert (clip.incident.clip, clip.cause) == ("none", "clip")
        assert clip.incident.footage_note == "no clip: alerting was not running"


async def test_where_no_clips_can_be_kept_none_are_promised(tmp_path, make):
    async with running(tmp_path, clips=False) as service:
        service.accept_answer(make.answer(0))
        assert [(each.clip, each.clip_url, each.snapshot_url) for each in service.open_incidents()] == [("", "", "")]


async def test_what_changes_in_one_batch_is_told_each_by_itself(tmp_path, make):
    async with running(tmp_path) as service:
        with service.follow() as follower:
            service.accept_answer(make.answer(0))
            [new] = await told(follower, 1)
            async with service._flushing:
                settling = asyncio.create_task(service.set_clip_state(new.incident.id, "whole", ""))
                reviewing = asyncio.create_task(service.review(new.incident.id, "confirmed", "ann"))
                await asyncio.sleep(0)
            await asyncio.gather(settling, reviewing)
            events = await told(follower, 2)
        assert [event.cause for event in events] == ["clip", "review"]
        assert all((each.incident.clip, each.incident.verdict) == ("whole", "confirmed") for each in events)


async def test_a_verdict_is_kept_with_who_and_when_and_told_to_followers_alone(tmp_path, make, until):
    """Of one that goes on, and of one that has ended; it outlives a restart."""
    async with Receiver() as receiver, running(tmp_path, receiver) as service:
        with service.follow() as follower:
            service.accept_answer(make.answer(0))
            [new] = await told(follower, 1)
            began_s = time.time()
            await service.review(new.incident.id, "rejected", "ann")
            service.accept_answer(make.answer(1, 0.0))
            rejected, end = await told(follower, 2)
            assert (rejected.kind, rejected.cause, rejected.incident.verdict) == ("update", "review", "rejected")
            assert (end.kind, end.incident.verdict) == ("end", "rejected")
            found = await service.review(new.incident.id, "confirmed", "bob")
            [confirmed] = await told(follower, 1)
            assert confirmed.key != rejected.key
            assert (found.verdict, found.reviewed_by, found.open) == ("confirmed", "bob", False)
            assert found.reviewed_s is not None
            assert began_s <= found.reviewed_s <= time.time()
        await until(lambda: len(receiver.got) == 2)
        assert [json.loads(body)["event"] for _, body in receiver.got] == ["new", "end"]
        assert [event.cause for event in (await service.incident(found.id)).events] == ["", ""]
        with pytest.raises(NotFoundError):
            await service.review("nothing", "confirmed", "ann")
    async with running(tmp_path) as service:
        assert [each.id for each in await service.incidents(IncidentQuery(verdict="confirmed"))] == [found.id]
        assert await service.incidents(IncidentQuery(verdict="rejected")) == []
        assert await service.incidents(IncidentQuery(verdict="unreviewed")) == []
        assert (await service.review(found.id, "", "ann")).verdict == ""
        assert [each.id for each in await service.incidents(IncidentQuery(verdict="unreviewed"))] == [found.id]
