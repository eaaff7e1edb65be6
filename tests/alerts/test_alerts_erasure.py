"""What scope and age leave of incidents: on the disk byte by byte, at the sinks, and while the disk fails."""

import json
import sqlite3
import time
from dataclasses import replace

import pytest
from alert_parts import bodies, configuration, running, told
from hypothesis import given, settings
from hypothesis import strategies as st
from sink_parts import Receiver

from cluster.alerts.incident import FORGOTTEN, AlertEvent, Changes, Delivery, Erased, ErasureScope, Incident, bare
from cluster.alerts.store import AlertStore
from cluster.errors import NotFoundError, NotReadyError, UnavailableError

NOW = 1_700_000_000.0
SEEN = "a man in a red coat"


def incident(number: int, opened_s: float, ended_s: float | None = None, **fields) -> Incident:
    updated_s = opened_s if ended_s is None else ended_s
    plain = Incident(
        f"{number:016x}", "gate", "question", "person", "warning", 0, 1, 0.9, 2, opened_s, updated_s, ended_s, SEEN
    )
    return replace(plain, events=1, announced_s=opened_s, told_s=updated_s, **fields)


def event(kind, at_s: float, of: Incident) -> AlertEvent:
    return AlertEvent(f"{of.id}-{kind}", kind, at_s, of)


def life(number: int, opened_s: float, ended_s: float | None, *, state="delivered", **fields) -> Changes:
    """An incident with what was told of it."""
    was = incident(number, opened_s, None, **fields)
    events = [event("new", opened_s, was)]
    if ended_s is not None:
        was = incident(number, opened_s, ended_s, **fields)
        events.append(event("end", ended_s, was))
    deliveries = {(each.key, "ops"): Delivery(each, "ops", state) for each in events}
    return Changes(incidents={was.id: was}, events={each.key: each for each in events}, deliveries=deliveries)


def forget(store, camera="gate", before_s=NOW) -> Erased:
    found = store.preview_erasure(ErasureScope(camera, before_s))
    store.write(Changes(erasures={camera: before_s}))
    assert store.preview_erasure(ErasureScope(camera, before_s)) == Erased()
    return found


def on_disk(folder) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def store(tmp_path):
    return AlertStore(tmp_path / "alerts.sqlite")


def test_nothing_of_the_camera_is_left_in_the_file(store, tmp_path):
    store.write(life(1, NOW - 50, NOW - 40))
    store.write(life(2, NOW - 30, NOW - 20, state="dead"))
    store.write(life(3, NOW - 30, NOW - 20, camera="yard", text="a blue van"))
    assert SEEN.encode() in on_disk(tmp_path)
    assert forget(store) == Erased(2, 4)
    left = on_disk(tmp_path)
    assert SEEN.encode() not in left
    assert f"{1:016x}".encode() not in left
    assert b"a blue van" in left
    assert [each.camera for each in store.incidents()] == ["yard"]
    assert store.dead() == []
    assert forget(store) == Erased()


def test_an_end_that_is_owed_is_told_without_what_was_seen(store, tmp_path):
    store.write(life(1, NOW - 50, NOW - 40, state="pending", clip="whole", acknowledged_by="ann"))
    assert forget(store) == Erased(1, 2)
    [pending] = store.load().pending
    assert (pending.event.kind, pending.event.incident.id) == ("end", f"{1:016x}")
    assert pending.event.incident == bare(pending.event.incident)
    assert pending.event.incident.text == ""
    assert SEEN.encode() not in on_disk(tmp_path)
    assert store.incidents() == []
    # It stays until it is told, and no longer.
    forget(store)
    assert len(store.load().pending) == 1
    store.write(Changes(deliveries={(pending.event.key, "ops"): replace(pending, state="delivered")}))
    forget(store, "", NOW - 1000)
    assert store.events_held() == 0


def test_what_went_on_at_that_time_keeps_what_came_later(store):
    ended = life(1, NOW - 50, NOW - 10)
    store.write(ended)
    store.write(life(2, NOW - 50, None))
    store.write(life(3, NOW - 50, None, kind="health", subject="camera-offline", text="no route to host"))
    store.write(life(4, NOW - 15, NOW - 10))
    forget(store, before_s=NOW - 20)
    texts = {int(each.id, 16): each.text for each in store.incidents()}
    assert texts == {1: "", 2: "", 3: "no route to host", 4: SEEN}
    events = store.incident(f"{1:016x}").events
    assert [(each.kind, each.incident.text) for each in events] == [("end", "")]
    assert store.incident(f"{2:016x}").events == []


lives = st.tuples(
    st.integers(-100, 0),
    st.one_of(st.none(), st.integers(0, 60)),
    st.sampled_from(["pending", "delivered", "dead"]),
    st.sampled_from(["gate", "yard"]),
    st.sampled_from(["question", "health"]),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(lives, max_size=12), st.integers(-90, 10), st.sampled_from(["gate", ""]))
def test_whatever_there_is_nothing_older_is_left(tmp_path_factory, steps, before, camera):
    folder = tmp_path_factory.mktemp("store")
    store = AlertStore(folder / "alerts.sqlite")
    before_s, expected = NOW + before, set()
    for number, (opened, lasted, state, of, kind) in enumerate(steps):
        ended = None if lasted is None else NOW + opened + lasted
        store.write(life(number, NOW + opened, ended, state=state, camera=of, kind=kind, text=f"<{number}>" * 40))
        gone = camera in ("", of) and ended is not None and ended < before_s
        if not gone:
            expected.add(number)
    forget(store, camera, before_s)
    assert {int(each.id, 16) for each in store.incidents()} == expected
    # In any byte of any file, whatever moved where.
    left = on_disk(folder)
    for number, (_, _, _, of, kind) in enumerate(steps):
        if number not in expected and kind == "question":
            assert f"<{number}>".encode() not in left
        elif of == "yard" and camera == "gate":
            assert f"<{number}>".encode() in left
    for pending in store.load().pending:
        hidden = camera in ("", pending.event.incident.camera) and pending.event.at_s < before_s
        assert not hidden or pending.event.kind == "end" or pending.event.incident.kind == "health"


def test_damaged_files_cannot_be_looked_through_and_go(tmp_path):
    path = tmp_path / "alerts.sqlite"
    path.write_bytes(SEEN.encode() * 1000)
    store = AlertStore(path)
    assert store.damaged is not None
    # By age, not yet; for a camera, at once.
    store.write(Changes(erasures={"": NOW}))
    assert store.damaged.exists()
    store.write(Changes(erasures={"gate": NOW}))
    assert not store.damaged.exists()


# -- the whole of alerting ----------------------------------------------------------------------
def answer(make, window, score=0.9, **fields):
    return replace(make.answer(window, score, **fields), text=SEEN)


async def test_what_goes_on_ends_and_the_sinks_are_told_no_more_than_that(tmp_path, make, until):
    async with Receiver() as receiver, running(configuration(receiver), tmp_path) as service:
        for window in (0, 1):
            for camera in ("gate", "yard"):
                service.accept_answer(answer(make, window, camera=camera))
        await until(lambda: len(receiver.got) == 2)
        gate = next(each for each in service.open_incidents() if each.camera == "gate")
        assert await service.erase_camera("gate") == Erased(1, 1)
        await until(lambda: len(receiver.got) == 3)
        over = bodies(receiver)[-1]
        assert (over["event"], over["incident"]["id"], over["incident"]["reason"]) == ("end", gate.id, FORGOTTEN)
        assert SEEN not in json.dumps(over)
        assert [each.camera for each in await service.incidents()] == ["yard"]
        with pytest.raises(NotFoundError):
            await service.incident(gate.id)
        # Answers that replicas send again are of before; what comes opens another.
        for window in (0, 1, 2):
            service.accept_answer(answer(make, window))
        assert [each.camera for each in service.open_incidents()] == ["yard"]
        service.accept_answer(answer(make, 3))
        assert {each.camera: each.windows for each in service.open_incidents()} == {"yard": 2, "gate": 2}
        assert next(each for each in service.open_incidents() if each.camera == "gate").id != gate.id


async def test_what_a_sink_has_not_taken_is_not_sent_any_more(tmp_path, make, until):
    """Also not by the process after the next restart."""
    receiver = Receiver()
    async with running(configuration(receiver), tmp_path) as service:
        for window, score in enumerate([0.9, 0.9, 0.0, 0.0]):
            service.accept_answer(answer(make, window, score))
        await until(lambda: service._dispatcher.status()["ops"].failures > 0)
        await until(lambda: service._dispatcher.status()["ops"].waiting == 2)
        assert await service.erase_camera("gate") == Erased(1, 2)
        assert service._dispatcher.status()["ops"].waiting == 1
    async with receiver, running(configuration(receiver), tmp_path) as service:
        await until(lambda: len(receiver.got) == 1)
        assert told(receiver) == [("end", "gate")]
        assert SEEN not in json.dumps(bodies(receiver))
        await until(lambda: not service._settled)
        await service._expire()
        assert await service._journal.read(lambda store: store.events_held()) == 0
    assert SEEN.encode() not in on_disk(tmp_path)


async def test_age_goes_the_same_way(tmp_path, make, until):
    """Nothing older than alerts.retention is kept or sent, also where nothing else happens, and it is counted."""
    receiver = Receiver()
    async with running(configuration(receiver), tmp_path) as service:
        service._config = service._config.model_copy(update={"retention": 1.0})
        for window, score in enumerate([0.9, 0.9, 0.0, 0.0]):
            service.accept_answer(answer(make, window, score))
        await until(lambda: service._dispatcher.status()["ops"].failures > 0)
        [ended] = await service.incidents()
        await until(lambda: time.time() > ended.ended_s + 1)
        service._expire_s = 0.0
        await until(lambda: SEEN.encode() not in on_disk(tmp_path))
        assert await service.incidents() == []
        assert (await service.outbox()).lost == 1
        [waiting] = [each for lane in service._dispatcher._lanes.values() for q in lane._queues.values() for each in q]
        assert (waiting.event.kind, waiting.event.incident.text) == ("end", "")


async def test_dead_letters_are_forgotten_and_not_sent_again(tmp_path, make, until):
    async with Receiver() as receiver, running(configuration(receiver), tmp_path) as service:
        receiver.reply = lambda request: 401
        for window, score in enumerate([0.9, 0.9, 0.0, 0.0]):
            service.accept_answer(answer(make, window, score))
        await until(lambda: service._dispatcher.status()["ops"].dead == 2)
        await until(lambda: not service._settled)
        await service.erase_camera("gate")
        assert (await service.outbox(10)).dead == []
        assert await service.resend() == 0


async def test_one_that_is_under_way_is_not_tried_again(tmp_path, make, until):
    async with Receiver() as receiver, running(configuration(receiver), tmp_path) as service:
        asked = []

        def reply(request):
            asked.append(request)
            return 503 if len(asked) < 3 else 204

        receiver.reply = reply
        for window in (0, 1):
            service.accept_answer(answer(make, window))
        await until(lambda: asked)
        await service.erase_camera("gate")
        await until(lambda: service._dispatcher.status()["ops"].waiting == 0)
        assert told(receiver)[-1] == ("end", "gate")


async def test_a_disk_that_takes_nothing_is_an_error_and_it_is_done_later(tmp_path, make, until, monkeypatch):
    broken = []
    write = AlertStore.write

    def full(self, changes):
        if broken:
            raise sqlite3.OperationalError("disk I/O error")
        write(self, changes)

    monkeypatch.setattr(AlertStore, "write", full)
    async with running(configuration(), tmp_path) as service:
        for window, score in enumerate([0.9, 0.9, 0.0, 0.0]):
            service.accept_answer(answer(make, window, score))
        await service._flush()
        broken.append(True)
        with pytest.raises(
            UnavailableError, match="the incidents of camera 'gate' are not erased yet: cannot write alerts to disk"
        ):
            await service.erase_camera("gate")
        broken.clear()
        service.accept_answer(make.answer(9, camera="yard"))
        await service._flush()
        await until(lambda: service._journal.trouble == "")
        assert await service.erase_camera("gate") == Erased()
    assert SEEN.encode() not in on_disk(tmp_path)


async def test_a_clip_that_settles_later_brings_nothing_back(tmp_path, make):
    async with running(configuration(), tmp_path) as service:
        for window, score in enumerate([0.9, 0.9, 0.0, 0.0]):
            service.accept_answer(answer(make, window, score))
        await service._flush()
        [ended] = await service.incidents()
        await service.erase_camera("gate")
        await service.set_clip_state(ended.id, "whole", "")
        with pytest.raises(NotReadyError):
            await service.acknowledge(ended.id, "ann")
        assert await service.incidents() == []


async def test_what_was_recorded_while_the_clock_was_ahead_is_forgotten_too(tmp_path, make):
    ahead_s = time.time() + 3600.0
    store = AlertStore(tmp_path / "alerts.sqlite")
    store.write(life(1, ahead_s, ahead_s + 10))
    store.close()
    async with running(configuration(), tmp_path) as service:
        assert await service.erase_camera("gate") == Erased(1, 2)
        for window in (0, 1):
            service._tracker.add_answer(make.answer(window), ahead_s + 20)
        await service._flush()
        assert (await service.erase_camera("gate")).incidents == 1
        assert await service.incidents() == []
    assert SEEN.encode() not in on_disk(tmp_path)
