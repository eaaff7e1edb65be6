"""A disk that is really full, or damages a page: what is announced on it gets its end, also by another process."""

import contextlib
import os
import sqlite3
import subprocess

import pytest
from alert_parts import bodies, configuration, running
from sink_parts import Receiver

from cluster.alerts import store
from cluster.alerts.service import FILE
from cluster.alerts.store import PAGE_BYTES, RESERVE_BYTES, DiskReserve


@pytest.fixture
def disk(tmp_path):
    """A file system of 8 MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder):
    """Take every byte that is left."""
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    assert os.statvfs(folder).f_bavail == 0


@pytest.mark.parametrize("reserved", [True, False])
async def test_announced_on_a_full_disk_and_ended_after_a_restart(disk, make, until, monkeypatch, reserved):
    if not reserved:
        # What it was like without: nobody knows of the incident any more.
        monkeypatch.setattr(store, "DiskReserve", lambda path: DiskReserve(path, nbytes=0))
    async with Receiver() as receiver:
        config = configuration(receiver, consecutive=1, release=1)
        async with running(config, disk) as service:
            service.accept_answer(make.answer(0, 0.0))
            await service._journal.probe()
            await service._flush()
            # SQLite keeps its log as large as it was.
            await service._journal.read(lambda each: each._db.execute("PRAGMA wal_checkpoint(TRUNCATE)"))
            fill(disk)
            service.accept_answer(make.answer(1))
            await until(lambda: len(receiver.got) == 1)
            await until(lambda: "full" in service._journal.trouble)
        async with running(config, disk) as service:
            assert bool(service.open_incidents()) == reserved
            service.accept_answer(make.answer(2, 0.0))
            if reserved:
                await until(lambda: len(receiver.got) >= 2)
    told = {(body["event"], body["incident"]["id"]) for body in bodies(receiver)}
    assert ("end" in {event for event, _ in told}) == reserved
    assert len({incident for _, incident in told}) == 1


def test_the_reserve_is_taken_where_there_is_room_and_given_once(disk):
    reserve = DiskReserve(disk / "reserve")
    assert not reserve.release()
    reserve.hold()
    assert (disk / "reserve").stat().st_blocks * 512 >= RESERVE_BYTES
    assert DiskReserve(disk / "reserve").release(), "a new process finds it"
    fill(disk)
    again = DiskReserve(disk / "reserve")
    again.hold()
    assert not again.release()


def mutes_in(file):
    with contextlib.suppress(sqlite3.OperationalError), contextlib.closing(sqlite3.connect(file)) as db:
        return db.execute("SELECT COUNT(*) FROM mutes").fetchone()[0]
    # It is being made.
    return 0


async def test_what_goes_on_is_in_the_file_that_replaces_a_damaged_one(make, until, tmp_path):
    """Or a restart would know of no mute, and never end what sinks have been told of."""
    async with running(configuration(), tmp_path) as service:
        for window in range(3):
            service.accept_answer(make.answer(window))
        await until(service.open_incidents)
        await service.mute("yard", "", 3600.0, "ann")
    file = tmp_path / FILE
    with contextlib.closing(sqlite3.connect(file)) as db:
        [(page,)] = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'incidents_by_time'")
    with file.open("r+b") as pages:
        pages.seek((page - 1) * PAGE_BYTES)
        pages.write(b"\xa5" * PAGE_BYTES)
    async with running(configuration(), tmp_path) as service:
        for window in range(3, 5):
            service.accept_answer(make.answer(window, camera="yard"))
        await until(lambda: list(tmp_path.glob("*.damaged-*")))
        # Until the next probe of the disk, and the writing after it.
        await until(lambda: mutes_in(file) == 1, timeout_s=10.0)
    async with running(configuration(), tmp_path) as service:
        assert {each.camera for each in service.open_incidents()} == {"gate", "yard"}
        assert [each.camera for each in service.mutes()] == ["yard"]
        service.accept_answer(make.answer(2))
        assert {each.camera for each in service.open_incidents()} == {"gate", "yard"}
