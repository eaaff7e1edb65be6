"""After an upgrade: KubeRay takes over no changed pods of a RayService; a hook of the chart hands them on."""

import copy

import pytest

from cluster.config.cluster import KubernetesConfig
from cluster.errors import UnavailableError
from cluster.kubernetes import hooks
from cluster.kubernetes.api import ChangedError, KubernetesApi


def group(name, count, image="old"):
    return {"groupName": name, "replicas": count, "minReplicas": count, "maxReplicas": count, "template": image}


def spec(decoders, image="old"):
    return {
        "headGroupSpec": {"rayStartParams": {}, "template": image},
        "workerGroupSpecs": [
            group("control", 1, image),
            group("decoders", decoders, image),
            group("replicas", 4, image),
        ],
    }


@pytest.fixture
def api(kube):
    kube.ray_services["sightline"] = {"spec": {"rayClusterConfig": spec(2)}}
    kube.ray_clusters["sightline-abcde"] = {"spec": {**spec(2), "rayVersion": "2.60.0"}}
    kube.ray_clusters["another-abcde"] = {"spec": spec(2)}
    return KubernetesApi(KubernetesConfig(kubeconfig=str(kube.kubeconfig)))


def upgrade(kube, after):
    kube.ray_services["sightline"]["spec"]["rayClusterConfig"] = after


def test_numbers_are_handed_on_and_nothing_else(kube, api):
    upgrade(kube, spec(5))
    assert api.update_ray_cluster("sightline-abcde", "sightline") == ["decoders"]
    assert kube.ray_clusters["sightline-abcde"]["spec"] == {**spec(5), "rayVersion": "2.60.0"}
    assert api.update_ray_cluster("sightline-abcde", "sightline") == []


def test_a_number_that_the_autoscaler_chose_stays_between_the_limits(kube, api):
    def decoders():
        return kube.ray_clusters["sightline-abcde"]["spec"]["workerGroupSpecs"][1]

    for least, most, chosen, number in ((1, 6, 4, 4), (3, 6, 1, 3), (1, 2, 6, 2), (2, 2, 1, 2)):
        decoders()["replicas"] = chosen
        after = spec(least)
        after["workerGroupSpecs"][1]["maxReplicas"] = most
        upgrade(kube, after)
        api.update_ray_cluster("sightline-abcde", "sightline")
        found = decoders()
        assert (found["minReplicas"], found["replicas"], found["maxReplicas"]) == (least, number, most)


def test_templates_are_handed_on_and_taken_back(kube, api):
    upgrade(kube, spec(2, "new"))
    assert api.update_ray_cluster("sightline-abcde", "sightline") == ["head", "control", "decoders", "replicas"]
    assert kube.ray_clusters["sightline-abcde"]["spec"] == {**spec(2, "new"), "rayVersion": "2.60.0"}
    upgrade(kube, spec(2))
    assert len(api.update_ray_cluster("sightline-abcde", "sightline")) == 4
    assert kube.ray_clusters["sightline-abcde"]["spec"] == {**spec(2), "rayVersion": "2.60.0"}


def test_a_group_that_only_one_of_them_has_stays(kube, api):
    after = spec(2)
    after["workerGroupSpecs"] = [after["workerGroupSpecs"][0], group("appended", 1)]
    upgrade(kube, after)
    before = copy.deepcopy(kube.ray_clusters["sightline-abcde"])
    assert api.update_ray_cluster("sightline-abcde", "sightline") == []
    assert kube.ray_clusters["sightline-abcde"] == before


def test_a_refusal_says_what_is_missing(kube, api):
    kube.refuse["list"] = [403]
    with pytest.raises(UnavailableError, match=r"must be allowed to get rayservices\.ray\.io"):
        api.update_ray_cluster("sightline-abcde", "sightline")
    with pytest.raises(UnavailableError, match=r"404.*rayclusters"):
        api.update_ray_cluster("unknown-abcde", "sightline")


def test_the_hook_changes_its_own_cluster_alone(kube, api, capsys):
    upgrade(kube, spec(3))
    config = KubernetesConfig(kubeconfig=str(kube.kubeconfig))
    assert hooks.main(["update", "sightline"], config) == 0
    assert capsys.readouterr().out == "sightline-abcde: decoders updated from sightline\n"
    assert kube.ray_clusters["sightline-abcde"]["spec"]["workerGroupSpecs"][1] == group("decoders", 3)
    assert kube.ray_clusters["another-abcde"]["spec"] == spec(2)
    assert hooks.main(["update", "sightline"], config) == 0
    assert capsys.readouterr().out == ""


def test_groups_that_change_meanwhile_are_read_again(kube, api, monkeypatch, capsys):
    monkeypatch.setattr(hooks, "PAUSE_S", 0.01)
    upgrade(kube, spec(3))
    kube.conflicts = 2
    hooks.update(api, "sightline")
    assert capsys.readouterr().out == "sightline-abcde: decoders updated from sightline\n"
    found = kube.ray_clusters["sightline-abcde"]["spec"]["workerGroupSpecs"]
    assert [each["groupName"] for each in found] == ["new-0", "new-1", "control", "decoders", "replicas"]
    assert found[3]["replicas"] == 3
    upgrade(kube, spec(4))
    kube.conflicts = 99
    with pytest.raises(ChangedError, match=r"would not be valid: .*cannot be applied"):
        hooks.update(api, "sightline")


def test_what_is_wrong_is_said_in_a_line(kube, api, capsys):
    config = KubernetesConfig(kubeconfig=str(kube.kubeconfig))
    assert hooks.main(["update"], config) == 1
    kube.refuse["list"] = [403]
    assert hooks.main(["update", "sightline"], config) == 1
    said = capsys.readouterr().err.splitlines()
    assert "HOOK is one of" in said[0]
    assert "list, get and patch rayclusters.ray.io" in said[1]
    assert len(said) == 2
