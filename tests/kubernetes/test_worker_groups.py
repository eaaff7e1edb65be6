"""Numbers of pods: KubeRay takes over no changed number of a RayService; a hook of the chart sets them."""

import copy

import pytest

from cluster.config.cluster import KubernetesConfig
from cluster.errors import ConfigError, UnavailableError
from cluster.kubernetes import scale
from cluster.kubernetes.api import ChangedError, KubernetesApi


def group(name, count):
    return {"groupName": name, "replicas": count, "minReplicas": count, "maxReplicas": count, "template": {"x": name}}


GROUPS = [group("control", 1), group("decoders", 2), group("replicas", 4)]


@pytest.fixture
def api(kube):
    kube.ray_clusters["sightline-abcde"] = {"spec": {"workerGroupSpecs": copy.deepcopy(GROUPS)}}
    return KubernetesApi(KubernetesConfig(kubeconfig=str(kube.kubeconfig)))


def test_numbers_are_set_and_nothing_else(kube, api):
    assert api.scale_worker_groups("sightline-abcde", {"decoders": 5, "replicas": 4, "unknown": 9}) == ["decoders"]
    found = kube.ray_clusters["sightline-abcde"]["spec"]["workerGroupSpecs"]
    assert found == [GROUPS[0], group("decoders", 5), GROUPS[2]]
    assert api.scale_worker_groups("sightline-abcde", {"decoders": 5, "replicas": 4}) == []


def test_a_refusal_says_what_is_missing(kube, api):
    kube.refuse["list"] = [403]
    with pytest.raises(UnavailableError, match=r"must be allowed to list, get and patch rayclusters\.ray\.io"):
        api.scale_worker_groups("sightline-abcde", {"decoders": 5})
    with pytest.raises(UnavailableError, match="404"):
        api.scale_worker_groups("another", {"decoders": 5})


def test_the_hook_sets_them_in_its_own_cluster_alone(kube, api, capsys):
    kube.ray_clusters["another-abcde"] = copy.deepcopy(kube.ray_clusters["sightline-abcde"])
    arguments = ["sightline", "decoders=3", "replicas=4"]
    assert scale.main(arguments, KubernetesConfig(kubeconfig=str(kube.kubeconfig))) == 0
    assert capsys.readouterr().out == "sightline-abcde: decoders has 3 pods now\n"
    assert kube.ray_clusters["sightline-abcde"]["spec"]["workerGroupSpecs"][1] == group("decoders", 3)
    assert kube.ray_clusters["another-abcde"]["spec"]["workerGroupSpecs"] == GROUPS
    assert scale.main(arguments, KubernetesConfig(kubeconfig=str(kube.kubeconfig))) == 0
    assert capsys.readouterr().out == ""


def test_groups_that_change_meanwhile_are_read_again(kube, api, monkeypatch):
    monkeypatch.setattr(scale, "PAUSE_S", 0.01)
    kube.conflicts = 2
    assert scale.scale(api, "sightline", {"decoders": 3}) == ["sightline-abcde: decoders has 3 pods now"]
    found = kube.ray_clusters["sightline-abcde"]["spec"]["workerGroupSpecs"]
    assert [each["groupName"] for each in found] == ["new-0", "new-1", "control", "decoders", "replicas"]
    assert found[3]["replicas"] == 3
    kube.conflicts = 99
    with pytest.raises(ChangedError):
        scale.scale(api, "sightline", {"decoders": 4})


def test_what_is_wrong_is_said_in_a_line(kube, capsys):
    with pytest.raises(ConfigError, match="'decoders=many' is no number"):
        scale.read_counts(["decoders=many"])
    kube.refuse["list"] = [403]
    assert scale.main(["sightline", "decoders=1"], KubernetesConfig(kubeconfig=str(kube.kubeconfig))) == 1
    said = capsys.readouterr().err
    assert "list, get and patch rayclusters.ray.io" in said
    assert said.count("\n") == 1
