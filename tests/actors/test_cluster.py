"""A whole cluster, end to end: answers, errors, removals, Kubernetes, memory, and every process killed once."""

import asyncio
import os
import re
import signal
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import ray
from cluster_parts import Answers, ray_processes, until
from dashboards_bench import panels

from actors.remote import ALERTING, CONTROLLER, GATEWAY, NAMESPACE, RECONCILER
from actors.runtime import Cluster
from cluster.client import GatewayClient
from cluster.codec import FileSource
from cluster.errors import CameraExistsError, ConfigError, NotReadyError, UnknownCameraError
from cluster.types import MICROSECONDS, MemoryStatus
from cluster.wire.memory_wire import AskOutcome
from cluster.wire.push import PushAgent

STRIDE_S = 2.0
SPEED = 4
"""Of every camera's clip."""
FAST = {"loop": True, "realtime": True, "speed": SPEED}
DASHBOARDS = Path(__file__).parents[2] / "deploy/helm/sightline/dashboards"

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

PULLED = ("gate", "yard")
ALL = (*PULLED, "dock")


@pytest.fixture(scope="module")
def client(cluster):
    with GatewayClient(cluster.gateway_address) as client:
        yield client


@pytest.fixture(scope="module")
def agent(cluster, clip):
    """An edge agent that pushes the clip to camera ``dock``, over and over."""
    source = FileSource(clip, loop=True, realtime=True, speed=SPEED)
    agent = PushAgent(source, cluster.gateway_address, "dock")
    loop = asyncio.new_event_loop()
    running = loop.create_task(agent.run())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([running])), daemon=True)
    thread.start()
    yield agent
    loop.call_soon_threadsafe(running.cancel)
    thread.join(10)


def kill_actor(name: str) -> int:
    """SIGKILL to a named actor's process; returns its process id."""
    pid = ray.get(ray.get_actor(name, namespace=NAMESPACE).process_id.remote())
    os.kill(pid, signal.SIGKILL)
    return pid


def test_pulled_and_pushed_cameras_give_answers(client, answers: Answers, agent) -> None:
    answers.wait_for_more(*ALL, count=3)
    for camera in ALL:
        [first, *_] = answers.of(camera)
        assert first.question == "person"
        assert 0 <= first.score <= 1
        assert first.tokens.full >= first.tokens.kept > 0
        assert [a.window for a in answers.of(camera)] == sorted({a.window for a in answers.of(camera)})

    def complete():
        statuses = {status.name: status for status in client.cameras_list()}
        return statuses if all(s.windows_done and s.last_answers for s in statuses.values()) else None

    statuses = until("windows in the list", complete)
    assert sorted(statuses) == ["dock", "gate", "yard"]
    for status in statuses.values():
        assert (status.state, status.reason) == ("running", "")
        assert (status.codec, status.width, status.height, status.cue) == ("h264", 160, 96, "vectors+luma")
        assert status.replica == "replica-0"
        assert status.tokens_full > status.tokens_kept >= 1
        assert (status.windows_lost, status.windows_dropped) == (0, 0)
    assert {status.decoder for status in statuses.values()} == {"decoder-0", "decoder-1"}


def test_a_broken_camera_says_why_and_others_go_on(client, answers: Answers, tmp_path) -> None:
    rubbish = tmp_path / "rubbish.mp4"
    rubbish.write_bytes(b"this is no video" * 100)
    client.camera_add("rubbish", str(rubbish))
    with pytest.raises(ConfigError, match=r"there is no file .*nothing\.mp4"):
        client.camera_add("missing", str(tmp_path / "nothing.mp4"))
    until("rubbish to fail", lambda: client.camera_get("rubbish").state == "error")
    assert "rubbish.mp4" in client.camera_get("rubbish").reason
    answers.wait_for_more("gate", count=2)
    client.camera_remove("rubbish")


def test_bad_requests_change_nothing(client, clip) -> None:
    with pytest.raises(CameraExistsError, match="gate"):
        client.camera_add("gate", "rtsp://elsewhere/stream")
    with pytest.raises(ConfigError, match="strde_s"):
        client.camera_add("new", str(clip), settings={"window": {"strde_s": 2}})
    with pytest.raises(ConfigError, match=r"there is no file .*nothing\.mp4"):
        client.camera_add("missing", str(clip.parent / "nothing.mp4"))
    with pytest.raises(ConfigError, match=r"is not below .*security\.file_roots"):
        client.camera_add("secret", "/etc/hostname")
    with pytest.raises(ConfigError, match="did you mean 'rtsp'"):
        client.camera_add("misspelt", "rstp://elsewhere/stream")
    with pytest.raises(UnknownCameraError, match="did you mean 'gate'"):
        client.camera_remove("gates")
    assert [status.name for status in client.cameras_list()] == ["dock", "gate", "yard"]


def test_pushing_to_the_wrong_camera_is_refused(cluster: Cluster, clip) -> None:
    async def push(camera: str) -> None:
        await PushAgent(FileSource(clip), cluster.gateway_address, camera).run()

    with pytest.raises(UnknownCameraError, match="'dokc'; did you mean 'dock'"):
        asyncio.run(push("dokc"))
    with pytest.raises(NotReadyError, match="accepts no pushed packets"):
        asyncio.run(push("gate"))


def test_pushed_file_ends_and_the_camera_takes_another(cluster: Cluster, client, answers: Answers, clip) -> None:
    """Two sessions one after the other."""
    client.camera_add("upload", source="")
    for session in (1, 2):
        asyncio.run(PushAgent(FileSource(clip), cluster.gateway_address, "upload").run())
        until("the end", lambda: client.camera_get("upload").state == "ended")
        until("all frames", lambda session=session: client.camera_get("upload").frames_decoded == 300 * session)
    # The replica's count comes with its own heartbeat.
    until("its windows", lambda: client.camera_get("upload").windows_done > 0)
    client.camera_remove("upload")


def test_file_as_fast_as_it_goes_loses_no_window_and_ends(client, answers: Answers, clip) -> None:
    client.camera_add("archive", str(clip))
    until("the end", lambda: client.camera_get("archive").state == "ended")
    until("all windows", lambda: client.camera_get("archive").windows_done == 12)
    status = client.camera_get("archive")
    assert (status.windows_dropped, status.windows_lost, status.frames_decoded) == (0, 0, 300)
    until("all answers", lambda: [a.window for a in answers.of("archive")] == list(range(12)))
    client.camera_remove("archive")


def test_removed_camera_is_gone_and_may_come_back(client, answers: Answers, clip) -> None:
    playing = {"source_options": FAST}
    client.camera_add("guest", str(clip), settings=playing)
    answers.wait_for_more("guest", count=2)
    client.camera_remove("guest")
    with pytest.raises(UnknownCameraError):
        client.camera_get("guest")
    assert "guest" not in [status.name for status in client.cameras_list()]
    until("its series to go", lambda: 'camera="guest"' not in page(client))
    client.camera_add("guest", str(clip), settings=playing)
    answers.wait_for_more("guest", count=2)
    assert answers.of("guest")[-1].window <= 3, "a camera that comes back begins anew"
    client.camera_remove("guest")


def page(client: GatewayClient) -> str:
    address = ray.get(ray.get_actor(GATEWAY, namespace=NAMESPACE).ready.remote()).metrics
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
        return reply.read().decode()


def sample(text: str, name: str, label: str = "") -> float:
    [line, *_] = [line for line in text.splitlines() if line.startswith(name) and label in line]
    return float(line.rsplit(" ", 1)[1])


def test_metrics_of_every_process_are_on_one_page(cluster: Cluster, client) -> None:
    tier = f"tier-{ray.nodes()[0]['NodeID'][:12]}"

    def everybody() -> str | None:
        text = page(client)
        return text if all(f'{{process="{name}"}}' in text for name in ("replica-0", tier)) else None

    text = until("all processes", everybody)
    for process in ("gateway", "controller", "decoder-0", "decoder-1", "replica-0", tier):
        assert f'process_resident_memory_bytes{{process="{process}"}}' in text
    assert 'sightline_camera_state{camera="gate",process="decoder-' in text
    done = [
        line for line in text.splitlines() if line.startswith("sightline_windows_total") and 'result="done"' in line
    ]
    assert float(done[0].rsplit(" ", 1)[1]) > 0
    packets = [line for line in text.splitlines() if line.startswith("sightline_ingest_packets_total")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in packets) > 0
    # Every metric of ours that a dashboard asks for, whatever has happened so far.
    queries = [query for panel in panels(DASHBOARDS) if not panel.needs for query in panel.expressions]
    asked = {name for query in queries for name in re.findall(r"sightline_\w+", query)}
    shown = set(re.findall(r"^(\w+)[{ ]", text, re.MULTILINE))
    # There are no alert sinks, no certificates and no cameras that decode lazily here.
    assert asked - shown <= {
        "sightline_alert_deliveries_total",
        "sightline_alert_delivery_seconds_bucket",
        "sightline_alerts_waiting",
        "sightline_certificate_expiry_timestamp_seconds",
        "sightline_disk_free_bytes",
        "sightline_lazy_events_total",
    }


def test_killed_replica_comes_back_and_only_windows_in_flight_are_lost(
    cluster: Cluster, client, answers: Answers, agent
) -> None:
    answers.wait_for_more(*ALL)
    before = cluster.readiness().replicas["replica-0"]
    # The stride in the making, one that waits for its acknowledgement, one in the engine; and on a busy machine those
    # that wait for the engine, which is as far behind as its last answers were late.
    most = {status.name: 3 + int(status.latency_s / (STRIDE_S / SPEED)) for status in client.cameras_list()}
    os.kill(before.pid, signal.SIGKILL)
    until("a new replica", lambda: cluster.readiness().replicas.get("replica-0", before).pid != before.pid)
    answers.wait_for_more(*ALL, count=3)
    for camera in ALL:
        # Of the stride in the making none is lost where its successor finds the saved window.
        assert client.camera_get(camera).windows_lost <= most[camera]
    for camera in PULLED:
        check_books(client, answers, camera)


def check_books(client: GatewayClient, answers: Answers, camera: str) -> None:
    """Every stride from the first answer to the last is done, dropped or lost, give or take the edges of each gap."""
    mine = answers.of(camera)
    strides = (mine[-1].end - mine[0].end) / 2_000_000 + 1
    status = client.camera_get(camera)
    accounted = status.windows_done + status.windows_dropped + status.windows_lost
    assert abs(accounted - strides) <= 4, (accounted, strides, status)


def _instance(cluster: Cluster, decoder: str) -> str | None:
    """Which start of a decoder is a member now; none while its heartbeats are missed."""
    info = cluster.readiness().decoders.get(decoder)
    return None if info is None else info.instance


def test_killed_decoder_comes_back_with_its_cameras_and_the_agent_resumes(
    cluster: Cluster, client, answers: Answers, agent
) -> None:
    reconnects = agent.status.reconnects
    for name in ("decoder-0", "decoder-1"):
        before = cluster.readiness().decoders[name]
        cameras = [status.name for status in client.cameras_list() if status.decoder == name]
        lost = {camera: client.camera_get(camera).windows_lost for camera in cameras}
        killed_s = time.monotonic()
        os.kill(before.pid, signal.SIGKILL)
        until("the decoder", lambda name=name, old=before.instance: _instance(cluster, name) not in (None, old))
        answers.wait_for_more(*cameras, count=3)
        for camera in cameras:
            # Answers come from the replica; the state comes with the decoder's next heartbeat.
            until(f"{camera} to run", lambda camera=camera: client.camera_get(camera).state == "running")
            # A decoder takes one window in the making with it, and is away for longer where the machine is busy.
            most = 1 + int((time.monotonic() - killed_s) / STRIDE_S)
            status = client.camera_get(camera)
            assert status.decoder == name
            assert status.windows_lost - lost[camera] <= most
    assert agent.status.reconnects > reconnects
    assert agent.status.dropped == agent.status.cluster_dropped == 0


def test_killed_controller_remembers_cameras_added_while_it_ran(client, answers: Answers, clip) -> None:
    client.camera_add("late", str(clip), settings={"source_options": FAST})
    answers.wait_for_more("late")
    before = {status.name: (status.decoder, status.replica) for status in client.cameras_list()}
    windows = {camera: answers.of(camera)[-1].window for camera in before}
    kill_actor(CONTROLLER)
    listed = until("the controller", lambda: client.cameras_list())
    assert {status.name: (status.decoder, status.replica) for status in listed} == before
    answers.wait_for_more(*before, count=2)
    for camera in before:
        assert answers.of(camera)[-1].window > windows[camera], "its window went on"
    until("statuses", lambda: all(status.state == "running" for status in client.cameras_list()))
    client.camera_remove("late")


def test_killed_gateway_is_back_on_its_port(client, answers: Answers, agent) -> None:
    kill_actor(GATEWAY)
    assert until("the gateway", lambda: len(client.cameras_list())) == 3
    answers.wait_for_more(*ALL, count=2)
    assert agent.status.reconnects >= 1


def test_processes_that_are_gone_for_good_are_started_again(client, answers: Answers) -> None:
    """As those are that fail while they are restarted: Ray leaves them dead."""
    for name in (ALERTING, GATEWAY):
        ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
    assert until("the gateway", lambda: client.cameras_list())
    until("alerting", lambda: client.outbox(0) is not None)
    answers.wait_for_more(PULLED[0], count=2)


def followed(text: str) -> bool:
    return 'sightline_camera_resources{process="reconciler",state="accepted"} 1.0' in text


def test_cameras_of_a_configuration_and_of_kubernetes(cluster: Cluster, client, answers: Answers, kube, clip) -> None:
    spec = {"source": str(clip), "sourceOptions": FAST}
    kube.apply("lane", spec)

    def managers():
        return {status.name: status.manager for status in client.cameras_list()}

    until("the resource's camera runs", lambda: kube.condition("lane", "Running") == ("True", "Running", ""))
    assert managers() == dict.fromkeys(ALL, "configuration") | {"lane": "kubernetes"}
    answers.wait_for_more("gate", "lane", count=2)
    until("its answers are told", lambda: kube.status("lane").get("lastAnswer", "").startswith("person 0."))

    # Changed while it runs: the windows are counted on, nothing is lost, and the new question is answered.
    questions = [{"id": "person", "text": "Is there a person?"}, {"id": "car", "text": "Is there a car?"}]
    kube.apply("lane", {**spec, "priority": "critical", "questions": questions})
    until("the new question's answers", lambda: any(each.question == "car" for each in answers.of("lane")))
    of_one = [each.window for each in answers.of("lane") if each.question == "person"]
    assert of_one == sorted(set(of_one))
    assert next(each.window for each in answers.of("lane") if each.question == "car") > 0
    status = client.camera_get("lane")
    assert (status.priority, status.windows_lost, status.gaps) == ("critical", 0, 0)

    # Nobody else's business, from either side.
    for call in (lambda: client.camera_remove("lane"), lambda: client.camera_update("gate")):
        with pytest.raises(CameraExistsError, match="take it over"):
            call()
    with pytest.raises(ConfigError, match="must not be called 'kubernetes'"):
        client.camera_remove("lane", manager="kubernetes")
    kube.apply("gate", {})
    until("the conflict is told", lambda: (kube.condition("gate", "Conflict") or ("",))[0] == "True")
    lost = client.camera_get("gate").windows_lost
    client.camera_update(
        "gate", spec["source"], {"priority": "background", "source_options": spec["sourceOptions"]}, takeover=True
    )
    answers.wait_for_more("gate")
    assert client.camera_get("gate").windows_lost == lost

    # Both restart; a resource that went meanwhile takes its camera with it, and everybody else's stay theirs.
    kill_actor(CONTROLLER)
    kill_actor(RECONCILER)
    kube.delete("lane")
    until("the camera is removed", lambda: managers() == dict.fromkeys(ALL, "configuration") | {"gate": "cluster"})
    assert client.camera_get("gate").priority == "background"
    kube.apply("lane", spec)
    until("it comes back", lambda: kube.condition("lane", "Running") == ("True", "Running", ""))
    until("the reconciler is on the gateway's page again", lambda: followed(page(client)))

    # The resources go, and with them their cameras alone.
    kube.delete("lane")
    kube.delete("gate")
    until("the end", lambda: sorted(managers()) == sorted(ALL))


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

    return until(f"{frames} remembered frames of {camera}", enough)


def kill_replica(cluster: Cluster) -> int:
    """SIGKILL; returns the process that was killed."""
    pid = cluster.readiness().replicas["replica-0"].pid
    os.kill(pid, signal.SIGKILL)
    return pid


def replica_back(cluster: Cluster, killed: int) -> None:
    def back() -> bool:
        replica = cluster.readiness().replicas.get("replica-0")
        return replica is not None and replica.pid != killed

    until("a new replica", back)


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
    # Its newest are of a later moment where the machine is busy.
    assert after.oldest >= before.newest - 8 * MICROSECONDS
    assert after.oldest > before.oldest
    assert client.forget("yard").frames > 0
    assert remembered(client, "yard").oldest > before.newest


def test_a_killed_replica_knows_the_time_before_from_its_node(cluster: Cluster, client: GatewayClient) -> None:
    before = remembered(client, "gate", 24)
    replica_back(cluster, kill_replica(cluster))
    after = until(
        "frames after the restart",
        lambda: (status := remembered(client, "gate")).newest > before.newest + 8 * MICROSECONDS and status,
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
    client.camera_add("gate", str(clip), settings={"source_options": FAST})
    assert remembered(client, "gate").frames < before.frames
    assert remembered(client, "gate", 8).newest < before.newest, "its time began anew"


def test_a_camera_that_is_removed_while_its_replica_is_down_is_forgotten_too(
    cluster: Cluster, client: GatewayClient, clip
) -> None:
    before = remembered(client, "yard", 24)
    killed = kill_replica(cluster)
    client.camera_remove("yard", takeover=True)
    replica_back(cluster, killed)
    client.camera_add("yard", str(clip), settings={"source_options": FAST})
    assert remembered(client, "yard").frames < before.frames
    assert remembered(client, "yard", 8).newest < before.newest


def test_stopping_leaves_no_process(cluster: Cluster) -> None:
    mine = ray_processes()
    assert mine
    cluster.stop()
    assert [process for process in mine if process.is_running()] == []
    assert not ray.is_initialized()
    cluster.stop()
