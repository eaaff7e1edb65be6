"""Several gateways as KubeRay runs them, while the node of one of them is away."""

import os
import signal

import pytest
import ray
from ray.exceptions import GetTimeoutError
from serve_parts import chart_serve_config, deploy, gateway_ports, named_actors, ray_cluster, until, until_running

from actors.remote import NAMESPACE, gateway_names
from cluster.client import GatewayClient
from cluster.lab.scenes.street_clips import make_clip


def answers(name: str) -> int | None:
    """Process id of a gateway that listens."""
    handle = ray.get_actor(name, namespace=NAMESPACE)
    try:
        ray.get(handle.ready.remote(), timeout=2)
        return int(ray.get(handle.process_id.remote(), timeout=2))
    except (GetTimeoutError, ray.exceptions.RayActorError):
        return None


def listening() -> list[int]:
    """Process ids of the gateways that do."""
    return [found for name in gateway_names(2) if (found := answers(name)) is not None]


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_one_to_a_node_and_those_that_have_one_serve(tmp_path) -> None:
    clip = tmp_path / "street.mp4"
    make_clip("street", clip, seconds=24, size=(160, 96))
    address, ports = gateway_ports()
    config = chart_serve_config(tmp_path, clip, "gateways.pods=1", "config.cluster.start_timeout_s=20", ports=ports)
    # One pod's worth: a second gateway on this machine would want the same ports.
    pod = {"sightline_control": 16, "sightline_gateway": 1, "sightline_decoder": 1, "sightline_replica": 1}
    with ray_cluster(pod):
        deploy(config)
        # The one that has a node answers while the other is still waited for.
        with GatewayClient(address) as client:
            until("answers", lambda: client.camera_get("gate").last_answers)
        until_running()
        assert set(gateway_names(2)) <= named_actors(NAMESPACE)
        [before] = until("one that listens", listening)
        os.kill(before, signal.SIGKILL)
        until("one of them again", lambda: {*listening()} - {before})
        with GatewayClient(address) as client:
            assert client.camera_get("gate").name == "gate"
        deploy({"proxy_location": "Disabled", "applications": []})
        until("the end", lambda: not named_actors(NAMESPACE))
