"""A second cluster on the folder of the first one's alerts: refused in one sentence, and nothing is touched. Temporary
folders of clusters that were killed are deleted by the next one."""

import os
import tempfile
import time
from functools import partial

import pytest

from actors.alerting import Alerting, private_folder
from cluster.config import load_config
from cluster.errors import ConfigError
from cluster.security.private_files import FolderLock


async def test_a_second_cluster_leaves_the_folder_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("actors.startup.configure_logging", lambda *_, **__: None)
    monkeypatch.setattr("actors.startup.describe_process", lambda *_: None)
    monkeypatch.setattr("actors.alerting.FolderLock", partial(FolderLock, wait_s=0.2))
    folder = tmp_path / "alerts"
    first = FolderLock(folder, "alerts.folder")
    making = folder / "clips" / "0000000000001-clip.part"
    making.parent.mkdir()
    making.write_bytes(b"in the making")
    questions = [{"id": "person", "text": "Is there a person?"}]
    alerts, cameras = {"folder": str(folder)}, [{"name": "gate"}]
    config = load_config(None, {"alerts": alerts, "cameras": cameras, "questions": questions})
    second = Alerting(config, "another", "127.0.0.1")
    with pytest.raises(ConfigError, match="is in use by another Sightline cluster"):
        await second.ready()
    await second.stop()
    assert making.read_bytes() == b"in the making"
    first.release()


async def test_what_a_cluster_that_was_killed_kept_for_its_time_is_deleted_by_the_next_one(
    tmp_path, monkeypatch, until
):
    """Incidents and clips of ``--state none`` stayed in the folder of temporary files for ever."""
    monkeypatch.setattr("actors.startup.configure_logging", lambda *_, **__: None)
    monkeypatch.setattr("actors.startup.describe_process", lambda *_: None)
    monkeypatch.setattr("actors.alerting.ABANDONED_S", 0.5)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    running = FolderLock(private_folder("running"), "alerts.folder")
    # Another was killed before it wrote anything.
    private_folder("empty").mkdir()
    os.utime(private_folder("empty"), (time.time() - 3600,) * 2)
    for run in ("killed", "running", "restarting"):
        (private_folder(run) / "clips").mkdir(parents=True)
        (private_folder(run) / "alerts.sqlite").write_bytes(b"a man in a red coat")
        for path in (private_folder(run), *private_folder(run).iterdir()):
            os.utime(path, (at_s := time.time() + (3600 if run == "restarting" else -3600), at_s))
    config = load_config(None, {"cameras": [{"name": "gate"}], "questions": [{"id": "person", "text": "?"}]})
    alerting = Alerting(config, "next", "127.0.0.1")
    await alerting.ready()
    await until(lambda: not any(private_folder(run).exists() for run in ("killed", "empty")))
    assert private_folder("running").exists()
    assert private_folder("restarting").exists()
    await alerting.stop()
    running.release()
