"""One small cluster for a module of tests: tiny model, tiny clips, two decoders, one replica."""

import pytest
from cluster_parts import Answers, configuration

from actors.runtime import Cluster


@pytest.fixture(scope="module")
def cluster(clip, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    playing = {"loop": True, "realtime": True, "speed": 4}
    cameras = [
        {"name": "gate", "source": str(clip), "source_options": playing},
        {"name": "yard", "source": str(clip), "source_options": playing},
        {"name": "dock"},
    ]
    with Cluster(configuration(cameras, log_dir=str(logs))) as cluster:
        yield cluster
    for log in sorted(logs.iterdir()):
        print(f"--- {log.name}\n{log.read_text()[-6000:]}")


@pytest.fixture(scope="module")
def answers(cluster):
    watcher = Answers(cluster.gateway_address)
    yield watcher
    watcher.stop()
