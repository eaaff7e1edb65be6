"""One small cluster for a module of tests: tiny model, tiny clips, two decoders, one replica, `Camera` resources."""

import pytest
from cluster_parts import Answers, configuration
from kube_server import KubeServer

from actors.runtime import Cluster
from cluster.config.cluster import KubernetesConfig
from cluster.config.memory import MemoryConfig


@pytest.fixture(scope="module")
def kube(tmp_path_factory):
    server = KubeServer(tmp_path_factory.mktemp("kube"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def cluster(clip, kube, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    playing = {"loop": True, "realtime": True, "speed": 4}
    cameras = [
        {"name": "gate", "source": str(clip), "source_options": playing},
        {"name": "yard", "source": str(clip), "source_options": playing},
        {"name": "dock"},
    ]
    soon = {"resync_s": 1, "status_s": 0.2, "status_refresh_s": 1}
    sections = {
        "kubernetes": KubernetesConfig(enabled=True, kubeconfig=str(kube.kubeconfig), **soon),
        "memory": MemoryConfig(block_frames=4),
    }
    with Cluster(configuration(cameras, log_dir=str(logs)).model_copy(update=sections)) as cluster:
        yield cluster
    for log in sorted(logs.iterdir()):
        print(f"--- {log.name}\n{log.read_text()[-6000:]}")


@pytest.fixture(scope="module")
def answers(cluster):
    watcher = Answers(cluster.gateway_address)
    yield watcher
    watcher.stop()
