"""The application as KubeRay deploys it: the chart's own Serve configuration on a real Ray, changed and taken away."""

import contextlib
import json
import os
import signal
import socket
from pathlib import Path

import psutil
import pytest
import ray
from ray.exceptions import RayActorError
from serve_parts import (
    FAST,
    chart_serve_config,
    deploy,
    gateway_ports,
    named_actors,
    ray_cluster,
    states,
    until,
    until_running,
)

from actors.remote import CONTROLLER, GATEWAY, NAMESPACE
from actors.serve_app import processes, replicas
from cluster.client import GatewayClient
from cluster.errors import ConfigError
from cluster.lab.scenes.street_clips import make_clip

PLAIN_CONFIG = {"security": {"allow_plain_inside": True}}


def process_ids() -> dict[str, int]:
    """Of the processes that are named actors of ours, but for those that end just now."""
    found = {}
    for name in named_actors(NAMESPACE):
        with contextlib.suppress(ValueError, RayActorError):
            found[name] = ray.get(ray.get_actor(name, namespace=NAMESPACE).process_id.remote(), timeout=60)
    return found


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_deployed_changed_and_taken_away(tmp_path) -> None:
    clip = tmp_path / "street.mp4"
    make_clip("street", clip, seconds=24, size=(160, 96))
    address, ports = gateway_ports()
    before = chart_serve_config(tmp_path, clip, ports=ports)
    # The head offers nothing, as in the chart; all of this lands on the other node or nowhere.
    with ray_cluster({"sightline_control": 16, "sightline_decoder": 1, "sightline_replica": 1}):
        deploy(before)
        until_running()
        with GatewayClient(address) as client:
            until("answers of the file's camera", lambda: client.camera_get("gate").last_answers)
            client.camera_add("late", str(clip), settings=FAST)
            replica = client.replicas_and_decoders()[0][0]
            # What the readiness probe of its pod looks for.
            assert "@sightline-replica-" in Path("/proc/net/unix").read_text()
            until("answers of a camera added later", lambda: client.camera_get("late").last_answers)
        first = process_ids()
        assert {CONTROLLER, GATEWAY, "alerting", "decoder-0"} < first.keys()
        assert len([name for name in first if name.startswith("tier-")]) == 1, "none on the head"

        # A process that ends for good comes back; so does the supervisor, which finds the others where they were.
        ray.kill(ray.get_actor("alerting", namespace=NAMESPACE))
        until("alerting again", lambda: process_ids().get("alerting", first["alerting"]) != first["alerting"])
        [killed] = supervisors()
        os.kill(killed, signal.SIGKILL)
        until("another supervisor", lambda: supervisors() - {killed})
        until_running()
        assert {**process_ids(), "alerting": 0} == {**first, "alerting": 0}

        # Another question: the controller alone begins anew and hands it on; added cameras stay.
        after = json.loads(json.dumps(before))
        after["applications"][0]["args"]["configuration"]["questions"] = [{"id": "car", "text": "Is there a car?"}]
        deploy(after)
        until("the change", lambda: process_ids().get(CONTROLLER, first[CONTROLLER]) != first[CONTROLLER])
        until_running()
        assert {**process_ids(), "alerting": 0, CONTROLLER: 0} == {**first, "alerting": 0, CONTROLLER: 0}
        with GatewayClient(address) as client:
            until("answers to it", lambda: [a.question for a in client.camera_get("gate").last_answers] == ["car"])
            until("the other camera", lambda: client.camera_get("late").last_answers)
            assert client.replicas_and_decoders()[0][0].address == replica.address

        deploy({"proxy_location": "Disabled", "applications": []})
        until("the end", lambda: not states())
        assert named_actors(NAMESPACE) == set()
        with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
            pass


def supervisors() -> set[int]:
    """Process ids of this test's Serve replicas that look after the processes."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if line.startswith("ray::") and ":processes:supervisor" in line:
                found.add(process.pid)
    return found


@pytest.mark.parametrize("application", [processes, replicas])
def test_wrong_arguments_are_named(application) -> None:
    with pytest.raises(ConfigError, match="args must hold configuration, a mapping, and nothing else"):
        application({"config": "sightline.yaml"})
    with pytest.raises(ConfigError, match="capp"):
        application({"configuration": {"memory": {"capp": 2}}})
    with pytest.raises(ConfigError, match=r"cluster\.ray_address has no meaning"):
        application({"configuration": {"cluster": {"ray_address": "auto"}, **PLAIN_CONFIG}})
    with pytest.raises(ConfigError, match="without TLS so does anyone on it"):
        application({"configuration": {}})


def test_replicas_do_not_look_at_what_is_not_theirs() -> None:
    """Not even at what is wrong there: it is refused by the other application."""
    replicas({"configuration": {"cameras": "none", **PLAIN_CONFIG}})


@pytest.mark.parametrize("application", [processes, replicas])
def test_a_changed_password_counts_for_processes_that_begin(application, monkeypatch) -> None:
    """Serve starts them with what it was given, which a pod's new environment does not change."""
    tiers = {"redis_url": "redis://:${REDIS_PASSWORD}@localhost:6379/0"}
    monkeypatch.setenv("REDIS_PASSWORD", "old")
    deployed = application({"configuration": {"tiers": tiers, **PLAIN_CONFIG}})
    load = deployed._bound_deployment.init_args[0]
    monkeypatch.setenv("REDIS_PASSWORD", "new")
    assert load().tiers.redis_url == "redis://:new@localhost:6379/0"
