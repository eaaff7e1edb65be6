"""Before ``helm uninstall`` deletes the Redis of Ray's tables, KubeRay has emptied it: the Ray clusters are gone."""

import pytest

from cluster.config.cluster import KubernetesConfig
from cluster.kubernetes import hooks


@pytest.fixture
def remove(kube, monkeypatch):
    monkeypatch.setattr(hooks, "PAUSE_S", 0.01)
    kube.ray_services = {"sightline": {}, "another": {}}
    kube.ray_clusters["sightline-abcde"] = {}
    return lambda *names: hooks.main(["uninstall", *names], KubernetesConfig(kubeconfig=str(kube.kubeconfig)))


def test_it_waits_until_nothing_is_left(kube, remove):
    kube.kuberay_s = 0.3
    assert remove("sightline") == 0
    assert kube.ray_clusters == {}
    assert kube.ray_services == {"another": {}}
    assert remove("sightline") == 0, "it is gone already"


def test_an_operator_that_is_away_is_said(kube, remove, monkeypatch, capsys):
    monkeypatch.setattr(hooks, "PATIENCE_S", 0.1)
    kube.kuberay_s = 30.0
    assert remove("sightline") == 1
    assert "sightline-abcde still exists after 0.1 s; is KubeRay's operator running?" in capsys.readouterr().err


def test_what_is_wrong_is_said_in_a_line(kube, remove, capsys):
    kube.refuse["delete"] = [403]
    assert remove("sightline") == 1
    assert "must be allowed to delete rayservices.ray.io" in capsys.readouterr().err
    assert remove() == 1
    assert "HOOK is one of" in capsys.readouterr().err
