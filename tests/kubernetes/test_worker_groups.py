"""Numbers of pods: KubeRay takes over no changed number of a RayService; the reconciler sets those of the cluster."""

from __future__ import annotations

import copy
import logging

import pytest
from camera_cluster import CameraCluster
from reconciler_actor import actor, until

from cluster.config import load_config
from cluster.errors import UnavailableError
from cluster.kubernetes.api import KubernetesApi


def group(name, count):
    return {"groupName": name, "replicas": count, "minReplicas": count, "maxReplicas": count, "template": {"x": name}}


GROUPS = [group("control", 1), group("decoders", 2), group("replicas", 4)]


@pytest.fixture
def api(kube):
    kube.ray_clusters["sightline-abcde"] = {"spec": {"workerGroupSpecs": copy.deepcopy(GROUPS)}}
    return KubernetesApi(load_config(None, {"kubernetes": {"kubeconfig": str(kube.kubeconfig)}}).kubernetes)


def test_numbers_are_set_and_nothing_else(kube, api):
    assert api.scale_worker_groups("sightline-abcde", {"decoders": 5, "replicas": 4, "unknown": 9}) == ["decoders"]
    found = kube.ray_clusters["sightline-abcde"]["spec"]["workerGroupSpecs"]
    assert found == [GROUPS[0], group("decoders", 5), GROUPS[2]]
    assert api.scale_worker_groups("sightline-abcde", {"decoders": 5, "replicas": 4}) == []


def test_a_refusal_says_what_is_missing(kube, api):
    kube.refuse["list"] = [403]
    with pytest.raises(UnavailableError, match=r"must be allowed to get and patch rayclusters\.ray\.io"):
        api.scale_worker_groups("sightline-abcde", {"decoders": 5})
    with pytest.raises(UnavailableError, match="404"):
        api.scale_worker_groups("another", {"decoders": 5})


async def test_the_reconciler_keeps_them(kube, api, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("RAY_CLUSTER_NAME", "sightline-abcde")
    groups = {"decoders": 3, "replicas": 1}
    running = actor(monkeypatch, CameraCluster(), kubeconfig=str(kube.kubeconfig), worker_groups=groups, resync_s=1)
    assert await running.ready()

    def counts():
        return [each["replicas"] for each in kube.ray_clusters["sightline-abcde"]["spec"]["workerGroupSpecs"]]

    await until(lambda: counts() == [1, 3, 1])
    # Somebody else's change does not last.
    kube.ray_clusters["sightline-abcde"]["spec"]["workerGroupSpecs"][1]["replicas"] = 7
    await until(lambda: counts() == [1, 3, 1])
    await running.stop()
    assert "worker group decoders has 3 pods now" in caplog.text
