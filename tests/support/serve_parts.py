"""A Ray cluster of two nodes, and what KubeRay does with a Serve configuration: for tests of the application."""

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import ray
from chart_parts import OPEN, PLAIN, PLAIN_INSIDE, documents, serve_config, template
from ray.cluster_utils import Cluster

from actors.session import FLAGS, OBJECT_STORE_BYTES, ONE_THREAD, small_head
from cluster.errors import UnavailableError

WAIT_S = 240.0
FAST = {"source_options": {"loop": True, "realtime": True, "speed": 4}}


def chart_serve_config(folder, clip, *settings: str, ports: tuple[int, int]) -> dict[str, Any]:
    """What the chart renders for a trial without a GPU, with a small model and a file for a camera; ``ports``: of the
    gateway's gRPC and HTTP on this machine."""
    camera = {"name": "gate", "source": str(clip), **FAST}
    done = template(
        None,
        *(PLAIN_INSIDE, OPEN, PLAIN, "config.questions[0].id=person", "config.questions[0].text=Is anyone there?"),
        *("config.model.name=tiny-qwen2_5_vl", "config.model.threads=1", "cameras.enabled=false"),
        *("config.sampling.anchor_interval_s=4", "config.window.length_s=4", "config.window.stride_s=2"),
        *("config.window.static_gate=false", "config.cluster.heartbeat_timeout_s=8"),
        *settings,
    )
    assert done.returncode == 0, done.stderr
    config = serve_config(documents(done.stdout))
    # Folders and ports of a container are not this machine's.
    full = config["applications"][0]["args"]["configuration"]
    for application in config["applications"]:
        application["args"]["configuration"]["cluster"]["state_dir"] = str(folder)
    full["alerts"]["folder"] = str(folder / "alerts")
    full["gateway"] |= dict(zip(("port", "http_port"), ports, strict=True))
    full["cameras"] = [camera]
    full["security"]["file_roots"] = [str(folder)]
    return config


def gateway_ports() -> tuple[str, tuple[int, int]]:
    """Address of a gateway's gRPC where a port is free, and that port and a free one for HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as rpc, socket.create_server(("127.0.0.1", 0)) as http:
        grpc_port, http_port = rpc.getsockname()[1], http.getsockname()[1]
    return f"127.0.0.1:{grpc_port}", (grpc_port, http_port)


@contextmanager
def ray_cluster(*nodes: dict[str, float]) -> Iterator[tuple[Callable[[dict[str, float]], Any], Callable[[Any], None]]]:
    """A head that offers nothing, as in the chart, and one more node with each ``resources``; this process is a driver.

    Gives what adds a node and what kills one with all that runs on it.
    """
    node = {"num_cpus": 0, "num_gpus": 0, "object_store_memory": OBJECT_STORE_BYTES}
    small_head()
    with mock.patch.dict(os.environ, FLAGS | ONE_THREAD):
        cluster = Cluster(initialize_head=True, head_node_args=node)

        def add(resources: dict[str, float]) -> Any:
            return cluster.add_node(resources=resources, **node)

        def kill(lost: Any) -> None:
            cluster.remove_node(lost, allow_graceful=False)

        try:
            for resources in nodes:
                add(resources)
            ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
            yield add, kill
        finally:
            ray.shutdown()
            cluster.shutdown()


def deploy(configuration: dict[str, Any]) -> None:
    """``PUT /api/serve/applications/`` of the head's dashboard, without the dashboard."""
    from ray.serve._private.api import serve_start
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(json.loads(json.dumps(configuration)))
    client = serve_start(
        http_options=schema.http_options.model_dump(),
        proxy_location=schema.proxy_location,
        global_logging_config=schema.logging_config,
    )
    client.deploy_apps(schema)


def states() -> dict[str, tuple[str, str]]:
    """Application -> its status and message."""
    from ray import serve

    return {name: (str(app.status.value), app.message) for name, app in serve.status().applications.items()}


def named_actors(namespace: str) -> set[str]:
    return {each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == namespace}


def until_running() -> None:
    def running() -> bool:
        found = states()
        failed = {name: state for name, state in found.items() if "FAILED" in state[0]}
        assert not failed, failed
        return all(status == "RUNNING" for status, _ in found.values())

    until("all applications to run", running)


def until(what: str, condition: Callable[[], Any]) -> Any:
    """The condition's value once it is true; the cluster may be unavailable meanwhile."""
    deadline = time.monotonic() + WAIT_S
    while True:
        with contextlib.suppress(UnavailableError):
            if value := condition():
                return value
        assert time.monotonic() < deadline, f"waited {WAIT_S:g} s for {what}; applications: {states()}"
        time.sleep(0.2)
