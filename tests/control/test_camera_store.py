"""Cameras on disk: they outlive the cluster, and a second cluster does not touch them."""

import pytest

from cluster.config import CameraEntry
from cluster.control.cameras.managed import ManagedCamera
from cluster.control.cameras.table import CameraStore, FileTable, lock_state
from cluster.errors import ConfigError, UnavailableError

GATE = ManagedCamera(entry=CameraEntry(name="gate", source="rtsp://user:secret@10.0.0.11/stream1"))


def test_cameras_of_an_ended_cluster_are_there_for_the_next(tmp_path) -> None:
    path = tmp_path / "cameras.sqlite"
    store = CameraStore(FileTable(path))
    assert not store.begin("first")
    assert store.load() == []
    assert [camera.entry.name for camera in store.follow([GATE.entry]).changed] == ["gate"]
    store.put(ManagedCamera(entry=CameraEntry(name="yard")))
    store.put(ManagedCamera(entry=CameraEntry(name="dock")))
    store.remove("its-life", "dock")
    store.put_counted({"gate": {"decoder": {"frames": 7}}})
    assert store.decoders() == 0
    store.put_decoders(3)
    assert store.begin("first"), "the same run again: its controller was restarted"
    store.end()

    store = CameraStore(FileTable(path))
    assert not store.begin("second")
    assert [camera.entry.name for camera in store.load()] == ["gate", "yard"]
    assert store.load()[0].entry.source.reveal() == "rtsp://user:secret@10.0.0.11/stream1"
    same = store.follow([GATE.entry])
    assert (same.changed, same.removed, [camera.entry.name for camera in same.cameras]) == ([], [], ["gate", "yard"])
    assert store.removed() == {"its-life": "dock"}
    assert store.counted() == {"gate": {"decoder": {"frames": 7}}}
    assert store.decoders() == 3
    store.remove("yard-1", "yard")
    # There was another one of its name by the time that this is written.
    store.remove("yard-2", "yard")
    store.put_deleted(["its-life", "yard-1"])
    assert ([camera.entry.name for camera in store.load()], store.removed()) == (["gate"], {"yard-2": "yard"})
    [gate] = store.follow([]).removed
    assert gate.entry.name == "gate"
    assert (store.load(), store.removed()) == ([], {gate.life: "gate", "yard-2": "yard"})
    # It holds passwords.
    assert path.stat().st_mode & 0o077 == 0


def test_what_cannot_be_read_is_said(tmp_path) -> None:
    table = FileTable(tmp_path / "cameras.sqlite")
    table._connection.execute("DROP TABLE kept")
    for call in (lambda: table.get("run"), lambda: table.keys(""), lambda: CameraStore(table).follow([])):
        with pytest.raises(UnavailableError, match=r"cameras cannot be read from .*cameras\.sqlite"):
            call()


def test_a_folder_of_state_belongs_to_one_cluster(tmp_path) -> None:
    folder = lock_state(tmp_path / "state")
    # Closed to others, whatever the umask.
    assert (tmp_path / "state" / "lock").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    with pytest.raises(
        ConfigError, match=r"state is in use by another Sightline cluster; .* another folder with --state"
    ):
        lock_state(tmp_path / "state")
    folder.release()
    lock_state(tmp_path / "state").release()


def test_a_folder_that_cannot_be_written_is_said(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be stored in .*--state none"):
        lock_state(tmp_path / "file" / "state")
    (tmp_path / "cameras.sqlite").mkdir()
    with pytest.raises(ConfigError, match="cameras cannot be stored"):
        FileTable(tmp_path / "cameras.sqlite")
