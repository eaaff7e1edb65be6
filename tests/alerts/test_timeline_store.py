"""What cameras answered and were, by the minute: through alerting, over restarts, and gone when it is to be gone."""

import asyncio
import random
import sqlite3
import threading
import time
from dataclasses import replace

import pytest
from alert_parts import configuration

from cluster.alerts import timeline_store
from cluster.alerts.health import CameraStates
from cluster.alerts.service import TIMELINES, AlertService
from cluster.alerts.timeline_store import BIN_S, HOUR_S, STEPS, TimelineStore
from cluster.errors import UnavailableError

HALF = 0.5 / STEPS + 1e-6
NOON = 1_700_000_000 // HOUR_S * HOUR_S + 0.0


async def read(store, camera="gate", since_s=NOON - HOUR_S, until_s=NOON + 2 * HOUR_S):
    return await store.read(camera, since_s, until_s)


async def test_minutes_hold_what_was_answered_in_them_whenever_it_is_written(tmp_path):
    """Against lists of the same windows; written again and again, late windows of the hour before included."""
    dice = random.Random(3)
    store = TimelineStore(tmp_path / "t.sqlite")
    expected = {}
    for _ in range(400):
        at_s = NOON + dice.uniform(-1800, 1800)
        score, level, positive = dice.random(), dice.choice([0.0, dice.random()]), dice.random() < 0.5
        store.add_window("gate", "person", at_s, score, level, positive)
        expected.setdefault(at_s // 60 * 60, []).append((score, level, positive))
        if dice.random() < 0.05:
            await store.flush()
    found = (await read(store)).scores["person"]
    assert [each.at_s for each in found] == sorted(expected)
    for each in found:
        scores, levels, positives = zip(*expected[each.at_s], strict=True)
        assert each.highest == pytest.approx(max(scores), abs=HALF)
        assert each.level == pytest.approx(max(levels), abs=HALF)
        assert (each.windows, each.positives) == (len(scores), sum(positives))
    assert (await read(store, since_s=NOON, until_s=NOON + 60)).scores["person"][0].at_s >= NOON - 60
    assert (await read(store, "yard")).scores == {}
    await store.stop()


async def test_states_are_kept_where_they_change_and_begin_with_what_was_so(tmp_path, make):
    store = TimelineStore(tmp_path / "t.sqlite")
    quiet = make.status()
    for second, status in (
        (0, quiet),
        (1, quiet),
        (2, replace(quiet, gaps=1)),
        (900, replace(quiet, gaps=4)),
        (901, replace(quiet, gaps=4, rung="stride")),
        (902, replace(quiet, gaps=4, rung="stride", state="backoff")),
    ):
        store.add_statuses([status], NOON + second)
    told = [(each.at_s - NOON, each.state, each.rung, each.gaps) for each in (await read(store)).states]
    assert told == [
        (0, "running", "full", 0),
        (900, "running", "full", 4),
        (901, "running", "stride", 4),
        (902, "backoff", "stride", 4),
    ]
    later = await read(store, since_s=NOON + 901.5)
    assert [each.at_s - NOON for each in later.states] == [901, 902]
    # A camera that is removed leaves nothing; another of its name begins anew.
    store.add_window("gate", "person", NOON, 0.9, 0.9, True)
    store.add_window("yard", "person", NOON, 0.9, 0.9, True)
    store.add_statuses([quiet], NOON + 1000, {"gate"})
    left = await read(store)
    assert (left.scores, [each.at_s - NOON for each in left.states]) == ({}, [1000])
    assert (await read(store, "yard")).scores
    await store.stop()


@pytest.mark.parametrize("now", ["running", "backoff"])
async def test_a_state_from_before_the_clock_was_set_back_does_not_come_again(tmp_path, make, now):
    """Lost at 13:00, back or not ten minutes later, when the clock says 12:10: at 13:05 it is not lost, if it is back,
    and at 12:11 it is, if not."""
    store = TimelineStore(tmp_path / "t.sqlite")
    for at_s, state in ((NOON, "running"), (NOON + HOUR_S, "backoff"), (NOON + 600, now)):
        store.add_statuses([replace(make.status(), state=state)], at_s)
    found = (await read(store)).states
    assert [(each.at_s, each.state) for each in found] == [(NOON, "running"), (NOON + 600, now)]


async def test_it_goes_with_its_age(tmp_path, monkeypatch):
    """Rows are searched for it once an hour."""
    searched = []
    expire = timeline_store._expire
    monkeypatch.setattr(timeline_store, "_expire", lambda *given: searched.append(given) or expire(*given))
    store = TimelineStore(tmp_path / "t.sqlite", keep_s=2 * HOUR_S)
    for hour in range(6):
        for minute in range(3):
            store.add_window("gate", "person", NOON + hour * HOUR_S + minute * BIN_S, 0.9, 0.9, True)
            await store.flush()
    assert len(searched) == 6
    hours = {(each.at_s - NOON) // HOUR_S for each in (await read(store, until_s=NOON + 9 * HOUR_S)).scores["person"]}
    assert hours == {2, 3, 4, 5}
    await store.stop()


async def test_a_disk_that_fails_loses_nothing_of_the_last_hours(tmp_path):
    store = TimelineStore(tmp_path / "t.sqlite")
    store.add_window("gate", "person", NOON, 0.9, 0.9, True)
    await store.flush()
    other = sqlite3.connect(tmp_path / "t.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store.add_window("gate", "person", NOON, 0.2, 0.0, False)
    with pytest.raises(UnavailableError, match="timelines are unavailable"):
        await store.flush()
    store.add_window("gate", "person", NOON, 0.3, 0.0, False)
    other.execute("ROLLBACK")
    other.close()
    [found] = (await read(store)).scores["person"]
    assert (found.windows, found.positives) == (3, 1)
    await store.stop()
    # A file that is no database begins anew.
    (tmp_path / "t.sqlite").write_bytes(b"nonsense" * 1000)
    for side in ("-wal", "-shm"):
        (tmp_path / f"t.sqlite{side}").unlink(missing_ok=True)
    again = TimelineStore(tmp_path / "t.sqlite")
    assert (await read(again)).scores == {}
    await again.stop()


@pytest.mark.parametrize("table", ["scores", "states"])
async def test_damaged_pages_begin_anew(tmp_path, make, table):
    path = tmp_path / "t.sqlite"
    store = TimelineStore(path)
    store.add_window("gate", "person", NOON, 0.5, 0.0, False)
    await store.flush()
    await store.stop()
    with sqlite3.connect(path) as db:
        [(page,)] = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,))
    db.close()
    with path.open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\xa5" * 4096)
    store = TimelineStore(path)
    store.add_window("gate", "person", NOON + 60, 0.25, 0.0, False)
    store.add_statuses([make.status()], NOON)
    found = await read(store)
    assert [each.at_s for each in found.scores["person"]] == [NOON + 60]
    assert (len(found.states), store.trouble) == (1, "")
    await store.stop()


def hung(store):
    """The store's disk hangs until the event is set."""
    ends = threading.Event()
    store._thread.submit(ends.wait, 60)
    return ends


async def test_a_reader_that_gives_up_takes_no_minute_along(tmp_path, make):
    store = TimelineStore(tmp_path / "t.sqlite")
    store.add_window("gate", "person", NOON, 0.5, 0.0, False)
    store.add_statuses([make.status()], NOON)
    ends = hung(store)
    reading = [asyncio.create_task(read(store)) for _ in range(3)]
    await asyncio.sleep(0.05)
    # Comes while the others are being written.
    store.add_window("gate", "person", NOON + 1, 0.5, 0.0, False)
    for task in reading[:2]:
        task.cancel()
    await asyncio.wait(reading[:2])
    ends.set()
    for found in (await reading[2], await read(store)):
        assert [each.windows for each in found.scores["person"]] == [2]
        assert [each.state for each in found.states] == ["running"]
    await store.stop()


async def test_a_hung_disk_is_not_waited_for(tmp_path, make, monkeypatch):
    monkeypatch.setattr(timeline_store, "DEADLINE_S", 0.2)
    monkeypatch.setattr(timeline_store, "MOST_STATES", 50)
    store = TimelineStore(tmp_path / "t.sqlite")
    store.add_window("gate", "person", NOON, 0.5, 0.0, False)
    ends = hung(store)
    for call in (read(store), store.delete("yard", NOON), read(store)):
        with pytest.raises(UnavailableError, match="the disk does not answer"):
            await asyncio.wait_for(call, 30)
    for second in range(500):
        store.add_statuses([make.status(state="running" if second % 2 else "backoff")], NOON + second)
    assert len(store._states) == 50
    ends.set()
    found = await read(store)
    assert [each.windows for each in found.scores["person"]] == [1]
    assert [each.at_s for each in found.states] == [NOON + second for second in range(450, 500)]
    ends = hung(store)
    store.add_window("gate", "person", NOON, 0.5, 0.0, False)
    await asyncio.wait_for(store.stop(), 30)
    ends.set()


async def test_looks_at_a_hung_disk_do_not_pile_up(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline_store, "DEADLINE_S", 0.02)
    store = TimelineStore(tmp_path / "t.sqlite")
    ends = hung(store)
    for second in range(20):
        store.add_window("gate", "person", NOON + second, 0.5, 0.0, False)
        with pytest.raises(UnavailableError):
            await read(store)
    assert sum(task.get_name() == "write timelines" for task in asyncio.all_tasks()) == 1
    monkeypatch.setattr(timeline_store, "DEADLINE_S", 30.0)
    ends.set()
    assert [each.windows for each in (await read(store)).scores["person"]] == [20]
    await store.stop()


async def test_a_deleted_camera_does_not_come_back_with_a_writing_that_failed(tmp_path, make):
    folder = tmp_path / "box"
    folder.mkdir()
    path = folder / "t.sqlite"
    path.mkdir()
    store = TimelineStore(path)
    for camera in ("gate", "yard"):
        store.add_window(camera, "person", NOON, 0.5, 0.0, False)
    ends = hung(store)
    writing = asyncio.create_task(store.flush())
    await asyncio.sleep(0.05)
    store.add_statuses([], NOON, removed={"gate"})
    deleting = asyncio.create_task(store.delete("yard", NOON + HOUR_S))
    await asyncio.sleep(0.05)
    ends.set()
    await asyncio.wait([writing, deleting])
    assert isinstance(writing.exception(), UnavailableError)
    path.rmdir()
    await store.delete("yard", NOON + HOUR_S)
    assert (await read(store)).scores == (await read(store, "yard")).scores == {}
    await store.stop()


async def test_alerting_records_levels_over_restarts_and_erases_them(tmp_path, make):
    """A level is the lowest score of two windows in a row: those that touch each other, repeats left out."""
    config = configuration()

    async def bins(service):
        return (await service.timelines.read("gate", 0.0, 4e9)).scores.get("person", [])

    service = AlertService(config, tmp_path)
    await service.start()
    try:
        for window, score in ((0, 0.7), (0, 0.7), (1, 0.0), (2, 0.9), (2, 0.9), (9, 0.95)):
            service.accept_answer(make.answer(window, score))
        [found] = await bins(service)
        assert (found.windows, found.positives, found.level) == (4, 3, 0.0)
        assert not service.open_incidents()
        service.accept_answer(make.answer(10, 0.6))
        service.accept_answer(make.answer(11, 0.8))
        [incident] = service.open_incidents()
        assert (incident.level, incident.score) == (0.6, 0.95)
        assert max(each.level for each in await bins(service)) == pytest.approx(0.6, abs=HALF)
        service.accept_answer(make.answer(12, 0.85))
        assert service.open_incidents()[0].level == 0.8
    finally:
        await service.stop()
    service = AlertService(config, tmp_path)
    await service.start()
    try:
        assert max(each.level for each in await bins(service)) == pytest.approx(0.8, abs=HALF)
        states = CameraStates(1, (), (make.status(life="a"),), {})
        await service.update_cameras(states)
        assert (await service.timelines.read("gate", 0.0, 4e9)).states[0].state == "running"
        await service.erase_camera("gate")
        assert await bins(service) == []
    finally:
        await service.stop()
    assert b"person" not in (tmp_path / TIMELINES).read_bytes()


async def test_a_line_of_cameras_is_removed_at_once(tmp_path, make):
    """Camera by camera it took half a second of alerting's event loop, and a flush of the disk for each."""
    store = TimelineStore(tmp_path / "t.sqlite")
    names = [f"km-{number}" for number in range(4000)]
    for name in names:
        for question in ("person", "train"):
            store.add_window(name, question, NOON, 0.5, 0.5, True)

    def seconds(*removed: str) -> float:
        began_s = time.thread_time()
        store.add_statuses([], NOON, removed=set(removed))
        return time.thread_time() - began_s

    # Of alerting's event loop, for cameras without rows: one after the other, 2,000 would take 2,000 times as long.
    others = [f"other-{number}" for number in range(2000)]
    assert min(seconds(*others) for _ in range(5)) < 200 * min(seconds(name) for name in others[:50])
    store.add_statuses([replace(make.status(), name="km-3999")], NOON, removed=set(names[:2000]))
    found = [await read(store, name) for name in ("km-0", "km-1", "km-1999", "km-2000", "km-3999")]
    assert [len(each.scores) for each in found] == [0, 0, 0, 2, 2]
    store.add_statuses([], NOON, removed=set(names[2000:3000]))
    assert [(await read(store, name)).scores.keys() for name in ("km-2000", "km-2999")] == [set(), set()]
    assert (await read(store, "km-3000")).scores.keys() == {"person", "train"}
    await store.stop()
