"""A second cluster on the folder of the first one's alerts: refused in one sentence, and nothing is touched."""

import pytest

from actors.alerting import Alerting
from cluster.config import load_config
from cluster.errors import ConfigError
from cluster.security.private_files import FolderLock


async def test_a_second_cluster_leaves_the_folder_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("actors.startup.configure_logging", lambda *_, **__: None)
    monkeypatch.setattr("actors.startup.describe_process", lambda *_: None)
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
