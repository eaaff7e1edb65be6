"""A whole cluster whose cameras come from a configuration and from Kubernetes, and are changed while they run."""

import os
import signal
import urllib.request

import pytest
import ray
from cluster_parts import Answers, configuration, until
from kube_server import KubeServer

from actors.remote import CONTROLLER, NAMESPACE, RECONCILER
from actors.runtime import Cluster
from cluster.client import GatewayClient
from cluster.config.cluster import KubernetesConfig
from cluster.errors import CameraExistsError, ConfigError

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SOON = {"resync_s": 1, "status_s": 0.2, "status_refresh_s": 1}


def kill(name):
    os.kill(ray.get(ray.get_actor(name, namespace=NAMESPACE).process_id.remote()), signal.SIGKILL)


def test_cameras_of_a_configuration_and_of_kubernetes(clip, tmp_path) -> None:
    playing = {"loop": True, "realtime": True, "speed": 4}
    spec = {"source": str(clip), "sourceOptions": playing}
    kube = KubeServer(tmp_path)
    kube.apply("yard", spec)
    watching = KubernetesConfig(enabled=True, kubeconfig=str(kube.kubeconfig), **SOON)
    gate = {"name": "gate", "source": str(clip), "source_options": playing}
    config = configuration([gate], decoders=1, log_dir=str(tmp_path / "logs"))
    config = config.model_copy(update={"kubernetes": watching})
    try:
        with Cluster(config) as cluster, GatewayClient(cluster.gateway_address) as client:
            answers = Answers(cluster.gateway_address)
            try:
                check(kube, spec, client, answers, f"http://{cluster.metrics_address}/metrics")
            finally:
                answers.stop()
    finally:
        kube.close()
        for log in sorted((tmp_path / "logs").glob("*")):
            print(f"--- {log.name}\n{log.read_text()[-4000:]}")


def followed(page) -> bool:
    with urllib.request.urlopen(page, timeout=10) as reply:
        text = reply.read().decode()
    return 'sightline_camera_resources{process="reconciler",state="accepted"} 1.0' in text


def check(kube, spec, client, answers, page) -> None:
    def managers():
        return {status.name: status.manager for status in client.cameras_list()}

    until("the resource's camera runs", lambda: kube.condition("yard", "Running") == ("True", "Running", ""))
    assert managers() == {"gate": "configuration", "yard": "kubernetes"}
    answers.wait_for_more("gate", "yard", count=2)
    until("its answers are told", lambda: kube.status("yard").get("lastAnswer", "").startswith("person 0."))

    # Changed while it runs: the windows are counted on, nothing is lost, and the new question is answered.
    questions = [{"id": "person", "text": "Is there a person?"}, {"id": "car", "text": "Is there a car?"}]
    kube.apply("yard", {**spec, "priority": "critical", "questions": questions})
    until("the new question's answers", lambda: any(each.question == "car" for each in answers.of("yard")))
    of_one = [each.window for each in answers.of("yard") if each.question == "person"]
    assert of_one == sorted(set(of_one))
    assert next(each.window for each in answers.of("yard") if each.question == "car") > 0
    status = client.camera_get("yard")
    assert (status.priority, status.windows_lost, status.gaps) == ("critical", 0, 0)

    # Nobody else's business, from either side.
    for call in (lambda: client.camera_remove("yard"), lambda: client.camera_update("gate")):
        with pytest.raises(CameraExistsError, match="take it over"):
            call()
    with pytest.raises(ConfigError, match="must not be called 'kubernetes'"):
        client.camera_remove("yard", manager="kubernetes")
    kube.apply("gate", {})
    until("the conflict is told", lambda: (kube.condition("gate", "Conflict") or ("",))[0] == "True")
    client.camera_update(
        "gate", spec["source"], {"priority": "background", "source_options": spec["sourceOptions"]}, takeover=True
    )
    answers.wait_for_more("gate")
    assert client.camera_get("gate").windows_lost == 0

    # Both restart; a resource that went meanwhile takes its camera with it, and everybody else's stay theirs.
    kill(CONTROLLER)
    kill(RECONCILER)
    kube.delete("yard")
    until("the camera is removed", lambda: managers() == {"gate": "cluster"})
    assert client.camera_get("gate").priority == "background"
    kube.apply("yard", spec)
    until("it comes back", lambda: kube.condition("yard", "Running") == ("True", "Running", ""))
    until("the reconciler is on the gateway's page again", lambda: followed(page))
