"""Files for their owner alone, whatever the umask, and the lock on a folder."""

import os

import pytest
from alert_parts import Make

from cluster.alerts.clips.footage_store import FootageStore
from cluster.alerts.incident import Changes
from cluster.alerts.store import AlertStore
from cluster.errors import ConfigError
from cluster.security.audit import AuditLog
from cluster.security.private_files import FolderLock


@pytest.fixture(params=[0o000, 0o022])
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(folder):
    return {path.name: oct(path.stat().st_mode & 0o777) for path in folder.rglob("*")}


def test_nothing_of_alerting_is_for_others(tmp_path, umask):
    folder = tmp_path / "alerts"
    lock = FolderLock(folder, "alerts.folder")
    store = AlertStore(folder / "alerts.sqlite")
    event = Make().event()
    store.write(Changes(incidents={event.incident.id: event.incident}, events={event.key: event}))
    clips = FootageStore(folder / "clips", max_bytes=1000, retention_s=9.0, keep_free=0)
    clips.begin("gate", f"{1:016x}", "clip", 1.0).commit()
    clips.begin("gate", f"{2:016x}", "clip", 1.0).write(b"begun")
    audit = AuditLog(folder / "log" / "audit.jsonl")
    audit.write("ann", "a call", cameras=[], outcome="ok")
    found = modes(folder)
    assert len(found) == 10
    assert {name for name, mode in found.items() if mode == "0o700"} == {"clips", "log"}
    assert set(found.values()) == {"0o700", "0o600"}
    assert oct(folder.stat().st_mode & 0o777) == "0o700"
    store.close()
    lock.release()


def test_a_file_of_before_is_closed_to_others(tmp_path):
    path = tmp_path / "alerts.sqlite"
    path.touch(0o644)
    AlertStore(path).close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_folder_has_one_cluster(tmp_path):
    first = FolderLock(tmp_path / "alerts", "alerts.folder")
    with pytest.raises(ConfigError, match=r"is in use by another Sightline cluster; .* another alerts\.folder"):
        FolderLock(tmp_path / "alerts", "alerts.folder", wait_s=0.2)
    first.release()
    FolderLock(tmp_path / "alerts", "alerts.folder", wait_s=0.0).release()
