"""Two nodes, each with a decoder and a replica, as the chart places them: one dies and comes back."""

from __future__ import annotations

import json
import socket
import time

import pytest
from cluster_parts import Answers
from serve_parts import chart_serve_config, deploy, ray_cluster, until, until_running

from cluster.client import GatewayClient
from cluster.lab.scenes.street_clips import make_clip
from cluster.types.cameras import CameraStatus

NODE = {"sightline_decoder": 1.0, "sightline_replica": 1.0}
STRIDE_S = 2.0


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_node_dies_with_its_decoder_and_replica_and_one_like_it_comes_back(tmp_path) -> None:
    clip = tmp_path / "street.mp4"
    make_clip("street", clip, seconds=24, size=(160, 96))
    with socket.create_server(("127.0.0.1", 0)) as rpc, socket.create_server(("127.0.0.1", 0)) as http:
        ports = (f"gateway.grpcPort={rpc.getsockname()[1]}", f"gateway.httpPort={http.getsockname()[1]}")
        address = f"127.0.0.1:{rpc.getsockname()[1]}"
    config = chart_serve_config(tmp_path, clip, *ports, "decoders.pods=2", "replicas.pods=2")
    full = config["applications"][0]["args"]["configuration"]
    # At the clip's own pace: two cores carry four of them with time to spare.
    camera = {**full["cameras"][0], "source_options": {"loop": True, "realtime": True}}
    full["cameras"] = [{**json.loads(json.dumps(camera)), "name": name} for name in ("gate", "yard", "dock", "lane")]
    with ray_cluster({"sightline_control": 16, **NODE}) as (add, kill):
        second = add(NODE)
        deploy(config)
        until_running()
        answers = Answers(address)
        with GatewayClient(address) as client:

            def cameras() -> dict[str, CameraStatus]:
                return {status.name: status for status in client.cameras_list()}

            def everybody_on(decoders: int, replicas: int) -> dict[str, CameraStatus] | None:
                found = cameras()
                on = {each.decoder for each in found.values()}, {each.replica for each in found.values()}
                going = all(each.state == "running" and each.last_answers for each in found.values())
                return found if going and (len(on[0]), len(on[1])) == (decoders, replicas) else None

            first = until("cameras on both nodes", lambda: everybody_on(2, 2))
            first_s = time.monotonic()
            kill(second)
            until("all cameras on the node that is left", lambda: everybody_on(1, 1))
            for name in cameras():
                answers.wait_for_more(name, 2)
            _check_books(first, cameras(), time.monotonic() - first_s)

            add(NODE)
            until("both decoders and replicas", lambda: len(client.replicas_list()) == 2)
            until_running()
            client.camera_add("late", str(clip), settings={"source_options": camera["source_options"]})
            back = until("cameras on both nodes again", lambda: everybody_on(2, 2))
            for name in back:
                answers.wait_for_more(name, 2)
            _check_books(first, cameras(), time.monotonic() - first_s)


def _check_books(before: dict[str, CameraStatus], after: dict[str, CameraStatus], seconds: float) -> None:
    """A camera at its own pace owes a window a stride: done, dropped or lost, give or take the edges of each gap."""
    owed = seconds / STRIDE_S
    counted = {name: _accounted(after[name]) - _accounted(old) for name, old in before.items()}
    assert all(abs(each - owed) <= 4 for each in counted.values()), (owed, counted)


def _accounted(status: CameraStatus) -> int:
    return status.windows_done + status.windows_dropped + status.windows_lost
