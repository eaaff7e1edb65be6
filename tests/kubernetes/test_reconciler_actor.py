"""The actor's own life without Ray: it starts, follows, and stops; the controller behind it is the real table."""

from __future__ import annotations

import asyncio

import pytest
from camera_cluster import CameraCluster
from kube_server import KubeServer
from reconciler_actor import actor, until

from cluster.errors import ConfigError


async def test_it_starts_follows_and_stops(kube: KubeServer, monkeypatch):
    cluster = CameraCluster()
    kube.apply("gate", {"priority": "critical"})
    running = actor(monkeypatch, cluster, kubeconfig=str(kube.kubeconfig), status_s=0.1)
    assert await running.ready()
    await until(lambda: cluster.priorities() == {"gate": "critical"})
    await until(lambda: kube.status("gate").get("manager") == "kubernetes")
    kube.apply("gate", {"priority": "background"})
    await until(lambda: cluster.priorities() == {"gate": "background"})
    kube.delete("gate")
    await until(lambda: not cluster.managers())
    await running.stop()
    kube.apply("late", {})
    await asyncio.sleep(0.3)
    assert not cluster.managers(), "it follows no more"


async def test_without_an_identity_it_says_so_and_stops(monkeypatch):
    running = actor(monkeypatch, CameraCluster())
    with pytest.raises(ConfigError, match="needs a service account"):
        await running.ready()
    await running.stop()
