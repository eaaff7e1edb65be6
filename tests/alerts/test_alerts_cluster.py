"""Incidents of a whole cluster, end to end: to a webhook and the command line, with alerting killed in the middle."""

import asyncio
import io
import json
import os
import re
import signal
import threading
from urllib.request import urlopen

import av
import pytest
import ray
from sink_parts import Receiver
from waiting import until

from actors.cli import main
from actors.remote import ALERTING, NAMESPACE
from actors.runtime import Cluster
from cluster.client import GatewayClient
from cluster.config import load_config
from cluster.errors import UnavailableError, UnknownCameraError
from cluster.lab.scenes.street_clips import make_clip

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def receiver():
    """On a loop of its own; the tests here have none."""
    receiver, loop = Receiver(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(receiver.start(), loop).result(10)
    yield receiver
    asyncio.run_coroutine_threadsafe(receiver.stop(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


@pytest.fixture(scope="module")
def running(tmp_path_factory, receiver):
    folder = tmp_path_factory.mktemp("alerts")
    clip = folder / "street.mp4"
    make_clip("street", clip, seconds=24, size=(160, 96))
    # Not faster: what is held for clips reaches back in the time of the camera, and alerting takes its own.
    playing = {"loop": True, "realtime": True, "speed": 2}
    config = load_config(
        None,
        {
            "model": {"name": "tiny-qwen2_5_vl", "threads": 1},
            "gateway": {"port": 0, "http_port": 0},
            "sampling": {"anchor_interval_s": 4},
            "window": {"length_s": 4, "stride_s": 2, "static_gate": False},
            # The model is a random one: a threshold that every score passes stands for "it happens".
            "questions": [{"id": "always", "text": "Is there a person?", "threshold": 1e-9}],
            "cameras": [
                {"name": "gate", "source": str(clip), "source_options": playing},
                {"name": "gone", "source": str(folder / "nothing.mp4")},
            ],
            "alerts": {
                "folder": str(folder / "box"),
                "health": {"offline": {"after_s": 2}},
                "sinks": [{"name": "ops", "kind": "webhook", "options": {"url": receiver.url, "secret": "s"}}],
            },
            # The camera begins moments before its incident: there is nothing to show of before.
            "clips": {"before_s": 0},
            "cluster": {"heartbeat_s": 0.25, "heartbeat_timeout_s": 8, "start_timeout_s": 300},
        },
    )
    with Cluster(config) as cluster:
        yield cluster


def arrived(receiver: Receiver) -> list[tuple[str, str, str]]:
    incidents = [json.loads(body) for _, body in receiver.got]
    return [(each["event"], each["incident"]["camera"], each["incident"]["subject"]) for each in incidents]


def test_incidents_reach_the_webhook_and_the_gateway(running, receiver):
    until(lambda: ("new", "gate", "always") in arrived(receiver), "the question's alert")
    until(lambda: ("new", "gone", "camera-offline") in arrived(receiver), "the offline alert")
    with GatewayClient(running.gateway_address) as client:
        found = {incident.camera: incident for incident in client.incidents(only_open=True)}
        assert found["gone"].severity == "critical"
        assert "nothing.mp4" in found["gone"].text
        assert client.acknowledge(found["gate"].id, "ann").acknowledged_by == "ann"
        assert client.outbox().trouble == ""


def test_its_clip_plays_and_the_camera_shows_itself(running, receiver):
    with GatewayClient(running.gateway_address) as client:
        [found] = client.incidents(camera="gate", limit=1)
        until(lambda: client.incident(found.id).incident.clip != "waiting", "the clip")
        incident = client.incident(found.id).incident
        [gone] = client.incidents(camera="gone", limit=1)
        assert (incident.clip, incident.footage_note) == ("whole", "")
        until(lambda: client.incident(gone.id).incident.clip == "none", "word of the clip that cannot be")
    with GatewayClient(running.gateway_address) as client:
        about, data = client.footage(incident.id)
        with av.open(io.BytesIO(b"".join(data))) as container:
            pictures = sum(1 for _ in container.decode(video=0))
        assert about.camera == "gate"
        assert pictures >= min(150, 12.5 * (incident.end - incident.start) / 1e6 * 0.9)
        assert client.picture("gate", kept=True).age_s < 10
    with urlopen(f"http://{running.metrics_address}/v1/incidents/{incident.id}/snapshot.jpg", timeout=20) as reply:
        assert reply.read(2) == b"\xff\xd8"
    body = next(json.loads(each) for _, each in receiver.got if json.loads(each)["incident"]["id"] == incident.id)
    assert body["incident"]["clip_url"] == f"/v1/incidents/{incident.id}/clip.mp4"


def test_its_metrics_are_the_gateways(running):
    def page():
        with urlopen(f"http://{running.metrics_address}/metrics", timeout=20) as reply:
            return reply.read().decode()

    for line in (
        'sightline_incidents_open{kind="health",process="alerting"} 1.0',
        'sightline_alert_deliveries_total{process="alerting",result="delivered",sink="ops"}',
    ):
        until(lambda line=line: line in page(), line)


def test_alerting_that_was_killed_goes_on_with_the_same_incident(running, receiver):
    with GatewayClient(running.gateway_address, deadline_s=30) as client:
        [before] = client.incidents(camera="gate", only_open=True)
        pid = ray.get(ray.get_actor(ALERTING, namespace=NAMESPACE).process_id.remote())
        os.kill(pid, signal.SIGKILL)

        def grown():
            try:
                return [
                    each for each in client.incidents(camera="gate", only_open=True) if each.windows > before.windows
                ]
            except UnavailableError:
                return []

        until(grown, "the incident after the restart")
        [after] = grown()
        assert (after.id, after.start, after.acknowledged_by) == (before.id, before.start, "ann")
    assert arrived(receiver).count(("new", "gate", "always")) == 1


def test_the_command_line(running, capsys):
    gateway = ["--gateway", running.gateway_address]
    for command in (
        ["list", "--open"],
        ["outbox"],
        ["mute", "--camera", "gate", "--for", "1h", "--by", "ann"],
        ["mute"],
    ):
        assert main(["incidents", *command, *gateway]) == 0
    text = capsys.readouterr().out
    assert "camera-offline" in text
    assert "webhook" in text
    assert text.count("camera gate, question *: muted until") == 2
    assert main(["incidents", "list", "--camera", "gate", "--json", "-", *gateway]) == 0
    [gate] = json.loads(capsys.readouterr().out)
    assert main(["incidents", "show", gate["id"], *gateway]) == 0
    assert "always at gate, warning" in capsys.readouterr().out
    assert main(["incidents", "follow", "--count", "2", "--json", "-", *gateway]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["incident"]["camera"] for line in lines} == {"gate", "gone"}
    assert main(["incidents", "show", "nothing", *gateway]) == 1
    assert "there is no incident 'nothing'" in capsys.readouterr().err


def test_a_camera_that_forgets_takes_its_incidents_along(running, receiver, capsys):
    with GatewayClient(running.gateway_address) as client:
        [gate] = client.incidents(camera="gate", only_open=True)
        assert main(["forget", "gate", "--yes", "--gateway", running.gateway_address]) == 0
        told = capsys.readouterr().out
        assert re.search(r"gate: deleted \d+ frames?, .* of memory; [2-9] files, .* of footage; 1 incident, ", told)
        with pytest.raises(UnknownCameraError, match="there is no incident"):
            client.incident(gate.id)
        assert all(each.id != gate.id for each in client.incidents(camera="gate"))
        assert [each.subject for each in client.incidents(camera="gone")] == ["camera-offline"]
    # Nobody waits for what nobody will hear of again.
    until(lambda: ("end", "gate", "always") in arrived(receiver), "the end")
    last = [json.loads(body)["incident"] for _, body in receiver.got if gate.id in str(body)][-1]
    assert (last["state"], last["text"], last["score"], last["clip_url"]) == ("ended", "", 0.0, "")
