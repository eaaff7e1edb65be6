"""The actor's own life without Ray: it starts, follows, and stops; the controller behind it is the real table."""

import asyncio

import pytest
from camera_cluster import CameraCluster
from kube_server import KubeServer
from waiting import until_async

from actors import reconciler, remote
from cluster.config import load_config
from cluster.errors import ConfigError

WAIT_S = 15.0


class Handle:
    """An actor handle whose methods run at once."""

    def __init__(self, cluster: CameraCluster) -> None:
        self.cluster = cluster

    def __getattr__(self, name):
        class Method:
            remote = staticmethod(getattr(self.cluster, name))

        return Method


def actor(monkeypatch, cluster, **kubernetes):
    monkeypatch.setattr(remote, "controller", lambda: Handle(cluster))
    monkeypatch.setattr("actors.startup.configure_logging", lambda *_, **__: None)
    return reconciler.ReconcilerActor(load_config(None, {"kubernetes": {"enabled": True, **kubernetes}}), "127.0.0.1")


async def test_it_starts_follows_and_stops(kube: KubeServer, monkeypatch):
    cluster = CameraCluster()
    kube.apply("gate", {"priority": "critical"})
    running = actor(monkeypatch, cluster, kubeconfig=str(kube.kubeconfig), status_s=0.1)
    assert await running.ready()
    await until_async(lambda: cluster.priorities() == {"gate": "critical"})
    await until_async(lambda: kube.status("gate").get("manager") == "kubernetes")
    kube.apply("gate", {"priority": "background"})
    await until_async(lambda: cluster.priorities() == {"gate": "background"})
    kube.delete("gate")
    await until_async(lambda: not cluster.managers())
    await running.stop()
    kube.apply("late", {})
    await asyncio.sleep(0.3)
    assert not cluster.managers(), "it follows no more"


async def test_without_an_identity_it_says_so_and_stops(monkeypatch):
    running = actor(monkeypatch, CameraCluster())
    with pytest.raises(ConfigError, match="needs a service account"):
        await running.ready()
    await running.stop()
