"""Questions about the past against a whole cluster: asked, forgotten, and remembered over the replica's death."""

import os
import signal

import pytest
from cluster_parts import QUESTION, until

from actors.runtime import Cluster
from cluster.client import GatewayClient
from cluster.config import load_config
from cluster.errors import NotReadyError, UnknownCameraError
from cluster.types import MICROSECONDS, MemoryStatus
from cluster.wire.memory_wire import AskOutcome

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

PLAYING = {"loop": True, "realtime": True, "speed": 2}
WAIT_S = 150.0


@pytest.fixture(scope="module")
def cluster(clip, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    config = load_config(
        None,
        {
            "model": {"name": "tiny-qwen2_5_vl", "threads": 1},
            "gateway": {"port": 0, "http_port": 0},
            "sampling": {"anchor_interval_s": 4},
            "window": {"length_s": 4, "stride_s": 2, "static_gate": False},
            "memory": {"block_frames": 4},
            "questions": [QUESTION],
            "security": {"file_roots": [str(clip.parent)]},
            "cameras": [{"name": name, "source": str(clip), "source_options": PLAYING} for name in ("gate", "yard")],
            "cluster": {
                "heartbeat_s": 0.25,
                "heartbeat_timeout_s": 8,
                "decoders": 1,
                "start_timeout_s": 240,
                "log_dir": str(logs),
            },
        },
    )
    with Cluster(config) as cluster:
        yield cluster
    for log in sorted(logs.iterdir()):
        print(f"--- {log.name}\n{log.read_text()[-6000:]}")


@pytest.fixture(scope="module")
def client(cluster):
    with GatewayClient(cluster.gateway_address) as client:
        yield client


def asked(client: GatewayClient, camera: str, **options) -> AskOutcome:
    *pieces, told = client.ask(camera, "What happened?", max_new_tokens=6, **options)
    assert "".join(pieces).strip() == told.result.text
    return told


def remembered(client: GatewayClient, camera: str, frames: int = 1) -> MemoryStatus:
    """What a camera remembers, once it is as much."""

    def enough() -> MemoryStatus | None:
        try:
            status = client.memory(camera)
        except NotReadyError:
            return None
        return status if status.frames >= frames else None

    return until(f"{frames} remembered frames of {camera}", enough, WAIT_S)


def kill_replica(cluster: Cluster) -> int:
    """SIGKILL; returns the process that was killed."""
    pid = cluster.readiness().replicas["replica-0"].pid
    os.kill(pid, signal.SIGKILL)
    return pid


def replica_back(cluster: Cluster, killed: int) -> None:
    def back() -> bool:
        replica = cluster.readiness().replicas.get("replica-0")
        return replica is not None and replica.pid != killed

    until("a new replica", back, WAIT_S)


def test_a_camera_is_asked_about_what_left_its_window(client: GatewayClient) -> None:
    status = remembered(client, "gate", 16)
    assert status.tier_bytes["host"] > 0
    assert status.tier_bytes["node"] > 0
    assert set(status.tier_states.values()) == {""}
    told = asked(client, "gate", with_pictures=True)
    result = told.result
    assert result.moments
    assert not result.degraded
    assert result.tokens_read > 0
    assert result.newest - result.oldest >= 16 * MICROSECONDS
    assert len(told.pictures) == len(result.moments)
    assert any(picture.startswith(b"\xff\xd8") for picture in told.pictures)
    follow = asked(client, "gate", conversation=told.conversation)
    assert follow.conversation == told.conversation
    listed = {each.name: each for each in client.cameras_list()}
    assert listed["gate"].memory_frames > 0
    assert listed["gate"].memory_bytes > 0
    assert listed["gate"].memory_state == ""


def test_forgetting_leaves_only_what_came_after(client: GatewayClient) -> None:
    before = remembered(client, "yard", 24)
    assert client.forget("yard", before_s=8.0).frames > 0
    after = client.memory("yard")
    assert after.newest - after.oldest <= 8 * MICROSECONDS
    assert after.oldest > before.oldest
    assert client.forget("yard").frames > 0
    assert remembered(client, "yard").oldest > before.newest


def test_a_killed_replica_knows_the_time_before_from_its_node(cluster: Cluster, client: GatewayClient) -> None:
    before = remembered(client, "gate", 24)
    replica_back(cluster, kill_replica(cluster))
    after = until(
        "frames after the restart",
        lambda: (status := remembered(client, "gate")).newest > before.newest + 8 * MICROSECONDS and status,
        WAIT_S,
    )
    assert after.oldest == before.oldest
    result = asked(client, "gate").result
    assert result.oldest == before.oldest
    assert not result.degraded
    assert result.tokens_read > 0


def test_a_removed_camera_is_forgotten(client: GatewayClient, clip) -> None:
    before = remembered(client, "gate", 24)
    client.camera_remove("gate", takeover=True)
    with pytest.raises(UnknownCameraError):
        asked(client, "gate")
    client.camera_add("gate", str(clip), settings={"source_options": PLAYING})
    assert remembered(client, "gate").frames < before.frames
    assert remembered(client, "gate", 8).newest < before.newest, "its time began anew"


def test_a_camera_that_is_removed_while_its_replica_is_down_is_forgotten_too(
    cluster: Cluster, client: GatewayClient, clip
) -> None:
    before = remembered(client, "yard", 24)
    killed = kill_replica(cluster)
    client.camera_remove("yard", takeover=True)
    replica_back(cluster, killed)
    client.camera_add("yard", str(clip), settings={"source_options": PLAYING})
    assert remembered(client, "yard").frames < before.frames
    assert remembered(client, "yard", 8).newest < before.newest
