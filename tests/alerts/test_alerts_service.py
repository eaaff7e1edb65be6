"""Alerting as a whole, with a real receiver: from answers to posts, over restarts, full disks and dead receivers."""

import asyncio
import sqlite3
import threading
import time
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from alert_parts import bodies, configuration, running, told
from sink_parts import Receiver

from cluster import metrics
from cluster.alerts.health import CameraStates
from cluster.alerts.incident import IncidentQuery
from cluster.alerts.service import AlertService
from cluster.alerts.store import AlertStore
from cluster.config import camera_settings
from cluster.errors import NotFoundError, NotReadyError


async def test_from_answers_to_posts(tmp_path, make, until):
    async with Receiver() as receiver, running(configuration(receiver), tmp_path) as service:
        with service.follow() as follower:
            for window, score in enumerate([0.1, 0.9, 0.9, 0.2, 0.2]):
                service.accept_answer(make.answer(window, score))
            await until(lambda: len(receiver.got) == 2)
            assert told(receiver) == [("new", "gate"), ("end", "gate")]
            followed = [await anext(follower), await anext(follower)]
            assert [(event.kind, missed) for event, missed in followed] == [("new", 0), ("end", 0)]
        [incident] = await service.incidents()
        detail = await service.incident(incident.id)
        assert [event.key for event in detail.events] == [body["key"] for body in bodies(receiver)]
        outbox = await service.outbox()
        assert outbox.sinks["ops"].delivered == 2
        assert (outbox.trouble, outbox.lost) == ("", 0)
    with pytest.raises(StopAsyncIteration):
        await anext(follower)


@pytest.mark.parametrize("task", ["dispatcher.heapq.heappop", "timeline_store.TimelineStore.flush"])
async def test_a_task_that_fails_is_told_to_whoever_restarts_the_process(task, tmp_path, make, monkeypatch):
    """For want of memory, for one: without the task, alerts would not be sent, or timelines not be kept, any more."""

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr("cluster.alerts.timeline_store.FLUSH_S", 0.05)
    async with Receiver() as receiver, running(configuration(receiver), tmp_path) as service:
        with monkeypatch.context() as full:
            full.setattr(f"cluster.alerts.{task}", fail)
            for window in (0, 1):
                service.accept_answer(make.answer(window))
            with pytest.raises(MemoryError):
                await asyncio.wait_for(service.run(), 10)


async def test_a_receiver_that_is_away_gets_everything_after_a_restart(tmp_path, make, until):
    """The process that made the alerts is not the one that delivers them."""
    receiver = Receiver()
    async with running(configuration(receiver), tmp_path) as service:
        for window in (0, 1):
            service.accept_answer(make.answer(window))
        await until(lambda: service._dispatcher.status()["ops"].failures > 0)
        assert (await service.outbox()).sinks["ops"].waiting == 1
    async with receiver, running(configuration(receiver), tmp_path) as service:
        await until(lambda: receiver.got)
        # It goes on where it was: one more positive window extends the incident, two negative ones end it.
        for window, score in ((2, 0.9), (3, 0.0), (4, 0.0)):
            service.accept_answer(make.answer(window, score))
        await until(lambda: len(receiver.got) == 2)
    assert told(receiver) == [("new", "gate"), ("end", "gate")]
    assert bodies(receiver)[1]["incident"]["windows"] == 3


async def test_a_camera_that_is_left_out_keeps_what_it_has(tmp_path, make, until):
    async with Receiver() as receiver, running(configuration(receiver), tmp_path) as service:
        settings = tuple(camera_settings(configuration(), each) for each in configuration().cameras)
        both = tuple(make.status(name, life="1") for name in ("gate", "yard"))
        await service.update_cameras(CameraStates(1, settings, both, {}))
        await service.mute("gate", "car", 3600.0, "ann")
        for window in (0, 1):
            service.accept_answer(make.answer(window))
        await until(lambda: len(receiver.got) == 1)
        await service.update_cameras(CameraStates(2, settings[1:], both[1:], {}, {"gate": "1"}))
        service._tracker.tick(service._clock.now())
        assert [each.camera for each in service.open_incidents()] == ["gate"]
        assert [each.camera for each in service.mutes()] == ["gate"]
        await service.update_cameras(CameraStates(3, settings[1:], both[1:], {}))
        assert service.open_incidents() == service.mutes() == []


class Clocks:
    """Clocks of a machine that stand until they are moved."""

    def __init__(self):
        self.wall_s, self.steady_s = 1_700_000_000.0, 5_000.0

    def time(self):
        return self.wall_s

    def monotonic(self):
        return self.steady_s

    def go_on(self, seconds):
        self.wall_s += seconds
        self.steady_s += seconds


@pytest.mark.parametrize("step_s", [600.0, -600.0])
async def test_a_clock_that_is_set_makes_no_time_pass(tmp_path, make, monkeypatch, step_s):
    """Durations are those of the monotonic clock, whichever way the other one is set."""
    clocks = Clocks()
    monkeypatch.setattr("cluster.alerts.wall_clock.time", clocks)
    config = configuration(stale_s=60, health={"offline": {"after_s": 30}, "clear_s": 10})
    gate = make.status(windows_per_s=0.1, windows_done=5)
    yard = make.status("yard", state="backoff", reason="no route")

    async with running(config, tmp_path) as service:

        async def after(seconds, *statuses):
            clocks.go_on(seconds)
            settings = tuple(camera_settings(config, each) for each in config.cameras)
            await service.update_cameras(CameraStates(1, settings, statuses, {}))
            return sorted((each.camera, each.subject) for each in service.open_incidents())

        await after(0, gate, yard)
        for window in (0, 1):
            service.accept_answer(make.answer(window))
        person = ("gate", "person")
        assert await after(20, gate, yard) == [person]
        clocks.wall_s += step_s
        assert await after(1, gate, yard) == [person]
        service._tracker.tick(service._clock.now())
        assert await after(1, gate, yard) == [person]
        # 30 s without a picture, as the camera and everybody else sees them.
        assert await after(9, gate, yard) == [person, ("yard", "camera-offline")]
        clocks.wall_s += step_s
        back = replace(yard, state="running", reason="")
        assert await after(1, gate, back) == [person, ("yard", "camera-offline")]
        clocks.wall_s -= step_s
        assert await after(9, gate, back) == [person, ("yard", "camera-offline")]
        assert await after(2, gate, back) == [person]
        clocks.go_on(30)
        service._tracker.tick(service._clock.now())
        assert await after(0, replace(gate, windows_done=6), back) == []


async def test_a_camera_of_long_strides_is_not_silent_between_two_answers(tmp_path, make, monkeypatch):
    clocks = Clocks()
    monkeypatch.setattr("cluster.alerts.wall_clock.time", clocks)
    config = configuration()
    settings = camera_settings(config, config.cameras[0])
    window = settings.window.model_copy(update={"length_s": 600.0, "stride_s": 600.0})
    async with running(config, tmp_path) as service:
        await service.update_cameras(
            CameraStates(1, (settings.model_copy(update={"window": window}),), (make.status(),), {})
        )
        for number in range(2):
            service.accept_answer(
                replace(make.answer(number), start=number * 600_000_000, end=(number + 1) * 600_000_000)
            )
            for _ in range(6):
                clocks.go_on(100.0)
                service._tracker.tick(service._clock.now())
        assert [each.subject for each in service.open_incidents()] == ["person"]


async def test_answers_of_a_removed_camera_that_are_still_under_way_open_nothing(tmp_path, make):
    """Only settings that changed are told: a camera is gone where it has no status any more."""
    config = configuration(None, consecutive=1)
    async with running(config, tmp_path) as service:
        gate = camera_settings(config, "gate")
        await service.update_cameras(CameraStates(1, (gate,), (make.status(),), {}))
        await service.update_cameras(CameraStates(2, (), (), {}))
        service.accept_answer(make.answer(0, 0.9))
        assert service.open_incidents() == []


@pytest.mark.parametrize("step_s", [86_400.0, -86_400.0])
async def test_a_mute_lasts_as_long_whichever_way_the_clock_is_set(tmp_path, monkeypatch, step_s):
    clocks = Clocks()
    monkeypatch.setattr("cluster.alerts.wall_clock.time", clocks)
    async with running(configuration(), tmp_path) as service:
        await service.mute("gate", "", 3600.0, "ann")
        clocks.wall_s += step_s
        clocks.go_on(3500)
        [mute] = service.mutes()
        assert mute.until_s == clocks.wall_s + 100
        await service._flush()
        assert (await service._journal.read(AlertStore.load)).mutes == [mute]
        clocks.go_on(200)
        assert service.mutes() == []


async def test_a_stored_mute_ends_when_it_was_to_where_the_clock_was_not_set_at_start(tmp_path, monkeypatch):
    """A machine without a clock of its own begins in 1970."""
    clocks = Clocks()
    monkeypatch.setattr("cluster.alerts.wall_clock.time", clocks)
    async with running(configuration(), tmp_path) as service:
        [mute] = await service.mute("gate", "", 3600.0, "ann")
    right_s, clocks.wall_s = clocks.wall_s, 10.0
    async with running(configuration(), tmp_path) as service:
        assert service.mutes() == [mute]
        clocks.wall_s = right_s + 60.0
        assert service.mutes() == [mute]
        clocks.go_on(3600.0)
        assert service.mutes() == []


async def test_which_sink_gets_what(tmp_path, make, until):
    grave, here, ends = Receiver(), Receiver(), Receiver()
    sinks = [
        {"name": name, "kind": "webhook", "options": {"url": each.url}, **rule}
        for name, each, rule in (
            ("grave", grave, {"min_severity": "critical"}),
            ("here", here, {"cameras": ["y*"]}),
            ("ends", ends, {"events": ["end"]}),
        )
    ]
    questions = [
        {"id": "person", "text": "?", "severity": "info"},
        {"id": "fire", "text": "?", "severity": "critical", "consecutive": 1},
    ]
    config = configuration(None, questions, sinks=sinks, release=1)
    async with grave, here, ends, running(config, tmp_path) as service:
        for camera in ("gate", "yard"):
            for window, score in enumerate([0.9, 0.9, 0.0]):
                for question in ("person", "fire"):
                    service.accept_answer(make.answer(window, score, camera=camera, question=question))
        await until(lambda: (len(grave.got), len(here.got), len(ends.got)) == (4, 4, 4))
    assert {body["incident"]["subject"] for body in bodies(grave)} == {"fire"}
    assert {body["incident"]["camera"] for body in bodies(here)} == {"yard"}
    assert {body["event"] for body in bodies(ends)} == {"end"}


async def test_a_full_outbox_still_alerts(tmp_path, make, until):
    """No room on disk for what is owed: alerts go out from memory, and it is said."""
    away, here = Receiver(), Receiver()
    sinks = [{"name": each.url[-9:-5], "kind": "webhook", "options": {"url": each.url}} for each in (away, here)]
    config = configuration(None, sinks=sinks, max_events=100, consecutive=1, release=1)
    async with here, running(config, tmp_path) as service:
        for window in range(140):
            service.accept_answer(make.answer(window, 0.9 if window % 2 == 0 else 0.0))
            if window % 10 == 0:
                await asyncio.sleep(0.005)
        await until(lambda: len(here.got) == 140)
        outbox = await service.outbox()
        assert "undelivered alerts" in outbox.trouble
        assert outbox.unwritten > 0
        assert outbox.lost == 0
        # The other receiver comes: everything goes out, and onto the disk.
        async with away:
            await until(lambda: len(away.got) == 140)
            await until(lambda: service._journal.pending_events == 0)
            assert (await service.outbox()).trouble == ""
    keys = [body["key"] for body in bodies(here)]
    assert len(set(keys)) == 140


async def test_a_restart_on_a_full_disk_still_ends_what_was_announced(tmp_path, make, monkeypatch, until):
    async with Receiver() as receiver:
        config = configuration(receiver)
        async with running(config, tmp_path) as service:
            for camera in ("gate", "yard"):
                for window in (0, 1):
                    service.accept_answer(make.answer(window, camera=camera))
            await until(lambda: len(receiver.got) == 2)
        opening = AlertStore._open
        monkeypatch.setattr(AlertStore, "_open", full_disk)
        async with running(config, tmp_path) as service:
            assert "disk is full" in (await service.outbox()).trouble
            # The yard's goes on as another one, since nobody can know of the first.
            for window in (3, 4):
                service.accept_answer(make.answer(window, camera="yard"))
            await until(lambda: len(receiver.got) == 3)
            monkeypatch.setattr(AlertStore, "_open", opening)
            await service._journal.probe()
            await until(lambda: len(receiver.got) == 4)
            service.accept_answer(make.answer(2, 0.0))
            service.accept_answer(make.answer(3, 0.0))
            await until(lambda: len(receiver.got) == 5)
    ids = [(body["event"], body["incident"]["id"]) for body in bodies(receiver)]
    first = {body["incident"]["camera"]: body["incident"]["id"] for body in bodies(receiver)[:2]}
    assert ids[3:] == [("end", first["yard"]), ("end", first["gate"])]
    assert ids[2][1] != first["yard"]


def full_disk(*_):
    raise sqlite3.OperationalError("database or disk is full")


async def test_a_disk_that_takes_nothing_is_noticed_before_an_alert_needs_it(tmp_path, monkeypatch, until):
    monkeypatch.setattr("cluster.alerts.service.PROBE_S", 0.0)
    async with running(configuration(None), tmp_path) as service:

        async def refuse(on: int) -> None:
            """SQLite itself refuses to write."""
            await service._journal.read(lambda store: store._db.execute(f"PRAGMA query_only = {on}").fetchall())

        await refuse(1)
        await until(lambda: "readonly" in service._journal.trouble)
        assert "readonly" in (await service.outbox()).trouble
        await refuse(0)
        await until(lambda: not service._journal.trouble)


async def test_dead_letters_are_shown_and_sent_again(tmp_path, make, until):
    async with Receiver() as receiver, running(configuration(receiver), tmp_path) as service:
        receiver.reply = lambda request: 401
        service.accept_answer(make.answer(0))
        service.accept_answer(make.answer(1))
        await until(lambda: service._dispatcher.status()["ops"].dead == 1)
        await until(lambda: not service._settled)
        [letter] = (await service.outbox(10)).dead
        assert (letter.sink, letter.state) == ("ops", "dead")
        assert "answered 401" in letter.error
        receiver.reply = lambda request: 204
        assert await service.resend("another") == 0
        assert await service.resend("ops", letter.event.key) == 1
        await until(lambda: told(receiver) == [("new", "gate")])
        await until(lambda: not service._settled)
        assert (await service.outbox(10)).dead == []


async def test_a_caller_that_leaves_takes_no_alert_with_it(tmp_path, make, monkeypatch, until):
    """Whoever changes something writes what cameras have changed meanwhile as well; gRPC cancels whoever leaves."""
    disk, writing = threading.Event(), AlertStore.write
    monkeypatch.setattr(AlertStore, "write", lambda store, changes: (disk.wait(5.0), writing(store, changes)))
    async with Receiver() as receiver, running(configuration(receiver), tmp_path) as service:
        muting = asyncio.create_task(service.mute("yard", "", 3600.0, "ann"))
        for window in (0, 1):
            service.accept_answer(make.answer(window))
        await until(lambda: service._journal.pending_events == 1)
        muting.cancel()
        receiver.reply = lambda request: 401
        disk.set()
        await until(lambda: service._dispatcher.status()["ops"].dead == 1)
        await until(lambda: not service._settled and not service._flushing.locked())
        receiver.reply = lambda request: 204
        disk.clear()
        resending = asyncio.create_task(service.resend())
        await until(lambda: service._journal._writing is not None)
        resending.cancel()
        disk.set()
        await until(lambda: told(receiver) == [("new", "gate")])


async def test_what_people_do(tmp_path, make, until):
    async with Receiver() as receiver, running(configuration(receiver), tmp_path) as service:
        await service.mute("yard", "", 3600, "ann")
        for camera in ("gate", "yard"):
            for window in (0, 1):
                service.accept_answer(make.answer(window, camera=camera))
        await until(lambda: len(receiver.got) == 1)
        gate = next(each for each in await service.incidents(IncidentQuery(only_open=True)) if each.camera == "gate")
        await service.acknowledge(gate.id, "bob")
        await until(lambda: len(receiver.got) == 2)
        assert bodies(receiver)[1]["incident"]["acknowledged_by"] == "bob"
        with pytest.raises(NotReadyError):
            await service.acknowledge("nothing", "bob")
        with pytest.raises(NotFoundError, match="there is no incident 'nothing'"):
            await service.incident("nothing")
    # All of it is known after a restart.
    async with running(configuration(), tmp_path) as service:
        assert [(mute.camera, mute.subject, mute.by) for mute in service.mutes()] == [("yard", "*", "ann")]
        states = {each.camera: (each.acknowledged_by, each.muted) for each in await service.incidents()}
        assert states == {"gate": ("bob", False), "yard": ("", True)}
        for _ in range(2):
            assert await service.unmute("yard", "") == []


async def test_cameras_states_and_settings(tmp_path, make, until):
    """A camera that was removed, one that was added, one that is offline."""
    config = configuration(health={"offline": {"after_s": 0.05}})
    gate, yard = (camera_settings(config, name) for name in ("gate", "yard"))
    async with running(config, tmp_path) as service:
        for window in (0, 1):
            service.accept_answer(make.answer(window, camera="yard"))
        away = make.status(state="backoff", reason="no route to host")
        await service.update_cameras(CameraStates(7, (gate,), (away,), {}))
        assert service.version == 7
        await asyncio.sleep(0.1)
        await service.update_cameras(CameraStates(7, (), (away,), {}))
        await until(lambda: service.open_incidents()[0].camera == "gate")
        [incident] = service.open_incidents()
        assert (incident.subject, incident.severity) == ("camera-offline", "critical")
        found = {each.camera: each.reason for each in await service.incidents()}
        assert found["yard"] == "the camera was removed"
        # Answers of a camera that was removed are none of ours.
        for window in (2, 3):
            service.accept_answer(make.answer(window, camera="yard"))
        assert len(service.open_incidents()) == 1
        await service.update_cameras(CameraStates(8, (gate, yard), (away, make.status("yard")), {}))
        for window in (4, 5):
            service.accept_answer(make.answer(window, camera="yard"))
        assert len(service.open_incidents()) == 2


async def test_a_camera_that_is_added_again_begins_anew_and_its_windows_count(tmp_path, make, until):
    """Removed and added between two looks: the same window numbers and times, incidents and mutes of another camera."""
    config = configuration(cooldown_s=3600.0)
    gate = camera_settings(config, "gate")
    async with running(config, tmp_path) as service:
        await service.update_cameras(CameraStates(1, (gate,), (make.status(life="a"),), {}))
        await service.mute("gate", "", 3600.0, "me")
        await service.mute("*", "covered-lens", 3600.0, "me")
        for window in range(6):
            service.accept_answer(replace(make.answer(window), incarnation="first"))
        [old] = service.open_incidents()
        await service.update_cameras(CameraStates(2, (gate,), (make.status(life="b"),), {}))
        assert service.open_incidents() == []
        # Also writes what has changed.
        await service.mute("yard", "", 3600.0, "me")
        assert [(each.id, each.reason) for each in await service.incidents()] == [(old.id, "the camera was removed")]
        assert {(mute.camera, mute.subject) for mute in service.mutes()} == {("*", "covered-lens"), ("yard", "*")}
        for window in (0, 1):
            service.accept_answer(replace(make.answer(window), incarnation="second"))
        [new] = service.open_incidents()
        assert (new.start, new.windows) == (0, 2)


@pytest.mark.parametrize(("life", "mutes"), [("a", ["*", "gate"]), ("b", ["*"])])
async def test_a_camera_that_was_added_again_while_alerting_was_away_is_another_one(tmp_path, make, life, mutes):
    config = configuration()
    async with running(config, tmp_path) as service:
        await service.update_cameras(CameraStates(1, (camera_settings(config, "gate"),), (make.status(life="a"),), {}))
        await service.mute("gate", "", 3600.0, "me")
        await service.mute("*", "covered-lens", 3600.0, "me")
    service = AlertService(config, tmp_path)
    await service.start({"gate": "a"})
    try:
        await service.update_cameras(CameraStates(1, (camera_settings(config, "gate"),), (make.status(life=life),), {}))
        assert sorted(mute.camera for mute in service.mutes()) == mutes
    finally:
        await service.stop()


async def test_answers_of_a_camera_nobody_has_told_of_yet_are_not_lost(tmp_path, make):
    async with running(configuration(), tmp_path) as service:
        for window in (0, 1):
            service.accept_answer(make.answer(window, camera="added-while-it-ran"))
        assert [incident.camera for incident in service.open_incidents()] == ["added-while-it-ran"]


async def test_answers_that_were_lost_on_the_way_are_counted(tmp_path, make):
    before = metrics.answers_missed._value.get()
    async with running(configuration(), tmp_path) as service:
        service.accept_answer(make.answer(3), 3)
        # Of a replica that had the camera before.
        service.accept_answer(replace(make.answer(2), incarnation="before", age_s=20.0))
        assert (await service.outbox()).answers_missed == 4
    assert metrics.answers_missed._value.get() - before == 4


async def test_lists_go_on_without_the_disk(tmp_path, make):
    """What is open is known by heart."""
    blocked = tmp_path / "box"
    blocked.write_text("")
    async with running(configuration(), blocked) as service:
        for window in (0, 1):
            service.accept_answer(make.answer(window))
        [incident] = await service.incidents()
        assert incident.camera == "gate"
        assert "cannot be opened" in (await service.outbox()).trouble


async def test_answers_that_are_sent_again_after_a_restart_are_in_the_timeline_once(make, tmp_path):
    """Also those that were part of no incident."""
    for _ in range(2):
        async with running(configuration(), tmp_path) as service:
            for window in range(6):
                service.accept_answer(make.answer(window, 0.1))
            timeline = await service.timelines.read("gate", time.time() - 300, time.time() + 60)
            assert sum(each.windows for each in timeline.scores["person"]) == 6


async def test_an_answer_need_not_wait_until_thousands_of_cameras_are_checked(tmp_path, make):
    async with running(configuration(), tmp_path) as service:
        statuses = tuple(make.status(f"cam-{number}") for number in range(3000))
        looking = asyncio.create_task(service.update_cameras(CameraStates(1, (), statuses, {})))
        checked = []
        while not looking.done():
            await asyncio.sleep(0)
            checked.append(len(service._health._cameras))
        assert max(after - before for before, after in pairwise(checked)) <= 200
        assert checked[-1] == 3000


async def test_a_disk_with_little_room_is_told_before_it_is_full(tmp_path, monkeypatch):
    room = SimpleNamespace(free=0)
    monkeypatch.setattr("shutil.disk_usage", lambda _: room)
    async with running(configuration(None), tmp_path) as service:
        assert (await service.outbox()).disk == "", "nobody has looked"
        for free, told in ((4_900_000_000, "less than 5 GB are free"), (5_100_000_000, "")):
            room.free = free
            await service._journal.probe()
            outbox = await service.outbox()
            assert (outbox.free_bytes, outbox.trouble, outbox.disk.partition(";")[0]) == (free, "", told)
