"""The outbox on disk: what survives, what is trimmed, full and hung and damaged disks, kill -9."""

import asyncio
import contextlib
import itertools
import math
import signal
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from cluster.alerts.incident import OTHER_DELIVERIES, Changes, Delivery, ErasureScope, IncidentQuery, Mute
from cluster.alerts.journal import Journal
from cluster.alerts.store import VERSION, AlertStore, incident_of
from cluster.errors import CapacityError, ConfigError, UnavailableError

NOW = 1_700_000_000.0


@pytest.fixture
def path(tmp_path):
    return tmp_path / "box" / "alerts.sqlite"


def told(event, *sinks, state="pending") -> Changes:
    deliveries = {(event.key, sink): Delivery(event, sink, state) for sink in sinks}
    return Changes(incidents={event.incident.id: event.incident}, events={event.key: event}, deliveries=deliveries)


def recent(make, number, **fields):
    return make.event(number, at_s=NOW + number, opened_s=NOW + number, **fields)


def test_everything_is_there_again(path, make):
    store = AlertStore(path)
    ended = recent(make, 1, ended_s=NOW + 5)
    changes = told(recent(make, 0), "ops", "desk")
    changes.merge(told(ended, "ops"))
    changes.tracks[("gate", "person")] = {"run": 2}
    changes.mutes[("yard", "*")] = Mute("yard", "*", NOW + 99, "ann")
    store.write(changes)
    store.write(Changes(deliveries={(ended.key, "ops"): Delivery(ended, "ops", "delivered", 1)}))
    salt = store.salt
    store.close()
    again = AlertStore(path)
    kept = again.load()
    assert again.salt == salt
    assert kept.tracks == {("gate", "person"): {"run": 2}}
    assert kept.mutes == [Mute("yard", "*", NOW + 99, "ann")]
    assert kept.incidents == [recent(make, 0).incident]
    assert [(each.event, each.sink) for each in kept.pending] == [(recent(make, 0), "desk"), (recent(make, 0), "ops")]


def test_removed_is_removed(path):
    store = AlertStore(path)
    here = ("gate", "person")
    store.write(Changes(tracks={here: {"run": 1}}, mutes={here: Mute(*here, NOW)}))
    store.write(Changes(tracks={here: None}, mutes={here: None}))
    kept = store.load()
    assert (kept.tracks, kept.mutes) == ({}, [])


def test_incidents_are_found(path, make):
    store = AlertStore(path)
    for number in range(4):
        store.write(told(recent(make, number, camera="gate" if number % 2 else "yard"), "ops"))
    store.write(told(recent(make, 9, camera="gate", ended_s=NOW + 20), "ops", state="dead"))
    find = store.incidents
    assert [i.opened_s - NOW for i in find()] == [9, 3, 2, 1, 0]
    assert [i.opened_s - NOW for i in find(IncidentQuery(camera="gate", only_open=True))] == [3, 1]
    assert [i.opened_s - NOW for i in find(IncidentQuery(since_s=NOW + 2, limit=2))] == [9, 3]
    assert find(IncidentQuery(subject="vehicle")) == []
    found = store.incident(f"{9:016x}")
    [event], [delivery] = found.events, found.deliveries
    assert (found.incident.camera, event.kind, delivery.sink, delivery.state) == ("gate", "new", "ops", "dead")
    assert store.incident("nothing") is None
    assert [letter.event.key for letter in store.dead()] == [event.key]
    assert store.dead(sink="desk") == []
    # What is out of scope takes no place in a list with a limit.
    assert [i.opened_s - NOW for i in find(IncidentQuery(scope=["y*"], limit=2))] == [2, 0]
    assert store.dead(scope=["y*"], limit=1) == []
    assert [len(store.load().pending), len(store.dead())] == [4, 1]
    # Page by page, also through those of one moment.
    alike = [make.event(number, at_s=NOW + 5, opened_s=NOW + 5) for number in (22, 20, 21)]
    for event in alike:
        store.write(told(event, "ops"))
    paged, before = [], (math.inf, "")
    while page := find(IncidentQuery(limit=2, before=before)):
        paged += page
        before = (page[-1].opened_s, page[-1].id)
    assert paged == find(IncidentQuery(limit=100))
    assert [i.id for i in paged[1:4]] == [f"{number:016x}" for number in (20, 21, 22)]


def test_what_there_is_of_others_costs_nothing(tmp_path, make, monkeypatch):
    """A write waits two seconds at most, and so does every minute's search for what is too old."""
    parsed, numbers = [], itertools.count()
    monkeypatch.setattr("cluster.alerts.store.incident_of", lambda text: parsed.append(text) or incident_of(text))

    def steps_of(held: int, work) -> int:
        store = AlertStore(tmp_path / f"{held}-{next(numbers)}" / "alerts.sqlite")
        changes = told(recent(make, held, camera="yard", subject="smoke", verdict="rejected"), "ops", state="delivered")
        for number in range(held):
            changes.merge(told(recent(make, number, ended_s=NOW + number), "ops", state="delivered"))
        store.write(changes)
        steps = []
        store._db.set_progress_handler(lambda: steps.append(1), 100)
        parsed.clear()
        work(store)
        assert len(parsed) <= 3, "parsed what it does not give back"
        store.close()
        return len(steps)

    def grown(work) -> float:
        return steps_of(2000, work) / max(1, steps_of(500, work))

    of_one = ErasureScope("yard", NOW + 9999)
    assert grown(lambda store: store.incidents(IncidentQuery(camera="yard"))) < 2
    assert grown(lambda store: store.preview_erasure(of_one)) < 2
    assert grown(lambda store: store.preview_erasure(ErasureScope("", NOW - 1))) < 2
    for query in (IncidentQuery(subject="smoke"), IncidentQuery(verdict="rejected"), IncidentQuery(scope=("ya*",))):
        grown(lambda store, query=query: store.incidents(query))


def test_the_oldest_delivered_make_room_and_nothing_else(path, make):
    store = AlertStore(path, max_events=100)
    pending = recent(make, 0)
    store.write(told(pending, "ops"))
    for number in range(1, 300):
        store.write(told(recent(make, number, ended_s=NOW), "ops", state="delivered"))
    assert store.events_held() <= 100
    assert store.trimmed == 300 - store.events_held()
    assert [each.event.key for each in store.load().pending] == [pending.key]
    assert store.incident(pending.incident.id) is not None
    assert store.incident(f"{1:016x}") is None
    assert store.incident(f"{299:016x}") is not None


def test_the_updates_of_a_storm_do_not_delete_the_incidents_before_it(path, make):
    """All cameras offline for an hour: an update of each every minute."""
    store = AlertStore(path, max_events=100)
    before = [recent(make, number, ended_s=NOW, event_kind="end") for number in range(40)]
    storm = [recent(make, number) for number in range(40, 80)]
    for event in (*before, *storm):
        store.write(told(event, "ops", state="delivered"))
    for minute in range(1, 60):
        for number in range(40, 80):
            store.write(told(recent(make, number, events=minute, event_kind="update"), "ops", state="delivered"))
    assert store.events_held() <= 100
    assert {each.id for each in store.incidents()} == {each.incident.id for each in (*before, *storm)}


def test_an_outbox_full_of_what_is_owed_refuses_with_a_sentence(path, make):
    store = AlertStore(path, max_events=100)
    for number in range(100):
        store.write(told(recent(make, number), "ops"))
    with pytest.raises(CapacityError, match="holds 100 undelivered alerts"):
        store.write(told(recent(make, 100), "ops"))
    assert len(store.load().pending) == 100
    # Its sinks hear of it from memory, and its end must come also after a restart.
    assert [each.opened_s - NOW for each in store.incidents(IncidentQuery(limit=1, only_open=True))] == [100]
    store.write(Changes(deliveries={(recent(make, 3).key, "ops"): Delivery(recent(make, 3), "ops", "delivered")}))
    store.write(told(recent(make, 100), "ops"))
    assert len(store.load().pending) == 100


def test_a_full_disk_takes_delivered_ones_first_and_then_says_so(path, make):
    """SQLite's own limit of pages stands for the disk's."""
    store = AlertStore(path, max_bytes=2**19)
    long = "x" * 2000
    for number in range(300):
        store.write(told(recent(make, number, text=long, ended_s=NOW), "ops", state="delivered"))
    assert store.trimmed > 0

    def fill():
        for number in range(1000, 1300):
            store.write(told(recent(make, number, text=long), "ops"))

    with pytest.raises(sqlite3.OperationalError, match="full"):
        fill()
    assert store.events_held() == len(store.load().pending) > 20


def test_a_disk_without_any_room_is_called_full_and_nothing_else(path, make):
    """SQLite takes a transaction back by itself then, also the one that was to make room."""
    store = AlertStore(path)
    store.write(told(recent(make, 0, ended_s=NOW), "ops", state="delivered"))
    db = store._db

    class Full:
        def __enter__(self):
            return db

        def __exit__(self, *_):
            # As where it cannot be committed.
            db.rollback()
            raise sqlite3.OperationalError("database or disk is full")

        def __getattr__(self, name):
            return getattr(db, name)

    store._db = Full()
    with pytest.raises(sqlite3.OperationalError, match="disk is full"):
        store.write(told(recent(make, 1), "ops"))
    store._db = db
    assert store.trimmed == 0, "what was rolled back is still there"
    store.write(told(recent(make, 1), "ops"))
    assert store.events_held() == 2


def test_a_damaged_file_is_put_aside(path, make):
    path.parent.mkdir()
    path.write_bytes(b"this is no database" * 1000)
    store = AlertStore(path)
    store.write(told(make.event(), "ops"))
    assert store.damaged is not None
    assert store.damaged.read_bytes().startswith(b"this is no database")


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
async def test_a_file_of_another_version_is_not_opened_and_stays_where_it_is(path, make, version):
    """Put aside as damaged, its open incidents and undelivered alerts would be deleted with the next erasure."""
    store = AlertStore(path)
    store.write(told(recent(make, 0), "ops"))
    store._db.execute(f"PRAGMA user_version = {version}")
    store.close()
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"alerts.sqlite has schema version {version}, .* knows {VERSION}; run"):
            await Journal(lambda: AlertStore(path)).start()
    assert list(path.parent.glob("*.damaged-*")) == []
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT COUNT(*) FROM deliveries").fetchone() == (1,)


def with_a_damaged_table(path, make, table):
    """A database of one alert whose table has pages of rubbish, which only reading them tells."""
    store = AlertStore(path)
    store.write(told(recent(make, 0), "ops"))
    [(page,)] = store._db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,))
    store.close()
    with path.open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\xa5" * 4096)


@pytest.mark.parametrize("table", ["meta", "tracks", "incidents", "deliveries"])
async def test_damaged_pages_are_put_aside_at_the_start(path, make, table):
    with_a_damaged_table(path, make, table)
    journal = Journal(lambda: AlertStore(path))
    kept = await journal.start()
    assert (kept.incidents, kept.pending, journal.trouble) == ([], [], "")
    assert await journal.write(told(recent(make, 1), "ops"))
    assert len(list(path.parent.glob("alerts.sqlite.damaged-*"))) == 1
    await journal.stop()
    again = AlertStore(path)
    assert [each.id for each in again.load().incidents] == [recent(make, 1).incident.id]
    again.close()


@pytest.mark.parametrize("use", ["read", "write", "erase"])
async def test_pages_that_are_damaged_while_it_runs_are_put_aside(path, make, use):
    journal = Journal(lambda: AlertStore(path))
    with_a_damaged_table(path, make, "incidents_by_time")
    await journal.start()
    if use == "read":
        assert await journal.read(lambda store: store.incidents(IncidentQuery(since_s=NOW - 1))) == []
    elif use == "write":
        assert await journal.write(told(recent(make, 1), "ops"))
    else:
        assert await journal.write(Changes(erasures={"gate": NOW + 1}))
    # The erased camera's records are nowhere, and not put aside either.
    assert len(list(path.parent.glob("alerts.sqlite.damaged-*"))) == (use != "erase")
    assert await journal.write(told(recent(make, 2), "ops"))
    found = await journal.read(lambda store: store.incidents())
    assert recent(make, 2).incident.id in [each.id for each in found]
    await journal.stop()


def test_what_waits_in_memory_is_bounded(make):
    """The oldest delivered ones go first, then the oldest."""
    waiting = Changes()
    for number in range(10):
        waiting.merge(told(recent(make, number), "ops", state="delivered" if number in (3, 5) else "pending"))
    assert waiting.drop_oldest(9) == (1, 0, 0, 0)
    assert waiting.drop_oldest(6) == (1, 2, 0, 0)
    assert [int(event.at_s - NOW) for event in waiting.events.values()] == [2, 4, 6, 7, 8, 9]
    assert len(waiting.deliveries) == 6


def test_incidents_that_wait_in_memory_are_bounded(make):
    """Open ones and those of which an event waits stay: a restart needs them."""
    waiting = Changes()
    for number in range(5):
        waiting.merge(told(recent(make, number, ended_s=NOW if number else None), "ops"))
    for number in range(5, 40):
        incident = recent(make, number, ended_s=None if number == 6 else NOW).incident
        waiting.merge(Changes(incidents={incident.id: incident}))
        waiting.drop_oldest(5)
    left = [int(each.opened_s - NOW) for each in waiting.incidents.values()]
    assert left == [0, 1, 2, 3, 4, 6]
    assert len(waiting.events) == 5


# -- the journal --------------------------------------------------------------------------------
async def test_a_journal_writes_and_reads(path, make):
    journal = Journal(lambda: AlertStore(path))
    kept = await journal.start()
    assert kept.pending == []
    assert await journal.write(told(recent(make, 0), "ops"))
    assert await journal.read(lambda store: store.events_held()) == 1
    await journal.stop()
    assert AlertStore(path).events_held() == 1


async def test_a_full_disk_is_told_and_healed(path, make):
    journal = Journal(lambda: AlertStore(path, max_events=100), memory_events=5)
    await journal.start()
    for number in range(100):
        assert await journal.write(told(recent(make, number), "ops"))
    for number in range(100, 103):
        assert not await journal.write(told(recent(make, number), "ops"))
    assert "undelivered alerts" in journal.trouble
    assert (journal.pending_events, journal.lost) == (3, 0)
    for number in range(103, 110):
        await journal.write(told(recent(make, number), "ops"))
    assert (journal.pending_events, journal.lost) == (5, 5)
    done = {(event.key, "ops"): Delivery(event, "ops", "delivered") for n in range(50) for event in [recent(make, n)]}
    assert await journal.write(Changes(deliveries=done)) or await journal.write(Changes())
    assert (journal.pending_events, journal.trouble) == (0, "")
    kept = await journal.read(lambda store: store.load())
    assert [int(each.event.at_s - NOW) for each in kept.pending][-5:] == [105, 106, 107, 108, 109]
    await journal.stop()


async def test_more_at_once_than_memory_keeps_is_written_whole(path, make):
    """As when the switch of a thousand cameras fails: nothing is dropped before the disk has refused it."""
    journal, every = Journal(lambda: AlertStore(path), memory_events=5), Changes()
    await journal.start()
    for number in range(80):
        every.merge(told(recent(make, number), "ops"))
    assert await journal.write(every)
    resent = {(key, sink): replace(each, attempts=2) for (key, sink), each in every.deliveries.items()}
    assert await journal.write(Changes(deliveries=resent))
    kept = await journal.read(lambda store: store.load())
    assert [each.attempts for each in kept.pending] == [2] * 80
    assert (journal.lost, journal.trimmed) == (0, 0)
    await journal.stop()


async def test_whatever_waits_through_a_long_outage_is_bounded_counted_and_logged(path, make, caplog):
    """A slow sink gets 400 alerts long after they were dropped from memory. All of it is dropped but what fits; not
    erasures, nor open incidents."""
    working = False

    def open_store():
        if not working:
            raise OSError("no disk")
        return AlertStore(path)

    journal, most = Journal(open_store, memory_events=5), 5
    assert await journal.start() is None
    open_one = recent(make, 999).incident
    await journal.write(Changes(erasures={"yard": NOW}, incidents={open_one.id: open_one}))
    for number in range(400):
        state = "pending" if number % 2 else "delivered"
        assert not await journal.write(told(recent(make, number, ended_s=NOW + number), "ops", state=state))
    late = [recent(make, number, ended_s=NOW + number) for number in range(1, 390, 2)]
    for event in late:
        assert not await journal.write(Changes(deliveries={(event.key, "ops"): Delivery(event, "ops", "delivered")}))
    waiting = journal._waiting
    kept = len(waiting.deliveries) - most
    assert len(waiting.events) == most
    assert kept == most * OTHER_DELIVERIES
    assert [key for key, _ in waiting.deliveries][-1] == late[-1].key
    assert waiting.erasures == {"yard": NOW}
    assert open_one.id in waiting.incidents
    # Of 200 that were delivered at once none is left, of 200 others the newest five.
    assert (journal.trimmed, journal.lost) == (200, 195)
    incidents = 401 - len(waiting.incidents)
    assert len(waiting.incidents) <= 2 * most + 1
    working = True
    assert await journal.write(Changes())
    told_of = [record.message for record in caplog.records if "dropped" in record.message]
    assert told_of[0].endswith("the oldest are dropped")
    figures = f"200 delivered and 195 undelivered alerts, {incidents} incidents, {len(late) - kept} delivery states"
    assert told_of[1:] == [f"dropped before reaching the disk: {figures}"]
    assert (await journal.read(lambda store: store.events_held())) == most
    await journal.stop()


async def test_a_hung_disk_holds_nobody_up(path, make, until):
    hung, told_of = threading.Event(), []

    class Hanging(AlertStore):
        def write(self, changes):
            told_of.append(len(changes.events))
            assert hung.wait(20)
            super().write(changes)

    journal = Journal(lambda: Hanging(path), deadline_s=0.2)
    await journal.start()
    assert not await journal.write(told(recent(make, 0), "ops"))
    assert "has not answered" in journal.trouble
    # The next one does not wait at all: it would wait for the same disk.
    async with asyncio.timeout(0.1):
        assert not await journal.write(told(recent(make, 1), "ops"))
    with pytest.raises(UnavailableError, match="disk does not answer"):
        await journal.read(lambda store: store.events_held())
    hung.set()
    await until(lambda: journal.trouble == "")
    assert await journal.write(Changes())
    assert journal.trouble == ""
    assert await journal.read(lambda store: store.events_held()) == 2
    assert told_of == [1, 1]
    await journal.stop()


async def test_a_folder_that_cannot_be_made_yet(tmp_path, make):
    """Alerts go on from memory; once the folder can be made, they are written, and what was pending in it is sent."""
    blocked = tmp_path / "box"
    before = AlertStore(tmp_path / "other" / "a.sqlite")
    before.write(told(recent(make, 7), "ops"))
    before.close()
    blocked.write_text("a file where the folder should be")
    late = []
    journal = Journal(lambda: AlertStore(blocked / "a.sqlite"), on_late=late.append)
    assert await journal.start() is None
    assert "cannot be opened" in journal.trouble
    assert not await journal.write(told(recent(make, 0), "ops"))
    with pytest.raises(UnavailableError, match="cannot be read now"):
        await journal.read(lambda store: store.events_held())
    blocked.unlink()
    (tmp_path / "other").rename(blocked)
    assert await journal.write(told(recent(make, 1), "ops"))
    [state] = late
    assert [each.event.key for each in state.pending] == [recent(make, 7).key]
    assert await journal.read(lambda store: store.events_held()) == 3
    await journal.stop()


WRITER = """
import sys
sys.path.insert(0, {tests!r})
from alert_parts import Make
from cluster.alerts.incident import Changes, Delivery
from cluster.alerts.store import AlertStore
from pathlib import Path
store = AlertStore(Path({path!r}))
for number in range(100_000):
    event = Make().event(number, at_s={now!r})
    deliveries = {{(event.key, "ops"): Delivery(event, "ops")}}
    store.write(Changes(events={{event.key: event}}, deliveries=deliveries))
    print(number, flush=True)
"""


def test_what_was_written_survives_kill_9(path):
    """Nothing that the process had said it wrote is missing, and nothing is half there."""
    from pathlib import Path

    code = WRITER.format(tests=str(Path(__file__).parents[1] / "support"), path=str(path), now=NOW)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        last = -1
        for line in process.stdout:
            last = int(line)
            if last == 40:
                process.send_signal(signal.SIGKILL)
    undone = AlertStore(path).load().pending
    assert [int(each.event.incident.id, 16) for each in undone] == list(range(len(undone)))
    assert last + 1 <= len(undone) <= last + 2


def test_the_store_knows_its_events_again(path, make):
    store = AlertStore(path)
    event = replace(recent(make, 0), silent=True)
    store.write(told(event))
    store.write(told(replace(event, kind="end")))
    found = store.incident(event.incident.id)
    assert (found.events, found.deliveries) == ([event], [])
