"""Cameras, replicas, the fleet and incidents over HTTP; every reply is held against the OpenAPI document."""

import asyncio
import math
import time
from itertools import pairwise

import pytest
from gateway_parts import make_answer, serving
from http_parts import Client
from waiting import until_async

from cluster.config.camera_list import parse_camera_list
from cluster.files import jsonable
from cluster.gateway.http import cameras
from cluster.gateway.http.fleet import summary
from cluster.types import CameraStatus


async def test_a_camera_comes_changes_and_goes(tmp_path):
    async with serving(tmp_path, cameras=2) as served, Client(served.url) as client:
        _, body = await client("GET", "/v1/cameras")
        assert [camera["name"] for camera in body["cameras"]] == ["cam-000", "cam-001"]
        question = {"id": "person", "text": "Is there a person?", "threshold": 0.7}
        new = {"name": "gate", "source": "rtsp://gate/1", "questions": [question], "settings": {"priority": "critical"}}
        assert (await client("POST", "/v1/cameras", new))[1]["source"] == "rtsp://gate/1"
        status, body = await client("POST", "/v1/cameras", new | {"source": "rtsp://gate/2"})
        assert (status, body["error"]) == (409, "there is a camera 'gate' already")
        changed = {"source": "rtsp://gate/2", "questions": []}
        assert (await client("PUT", "/v1/cameras/gate", changed))[1]["source"] == "rtsp://gate/2"
        assert (await client("GET", "/v1/cameras/gate"))[1]["source"] == "rtsp://gate/2"
        assert await client("DELETE", "/v1/cameras/gate") == (200, {})
        status, body = await client("GET", "/v1/cameras/gate")
        assert (status, body["error"]) == (404, "there is no camera 'gate'")


WRONG = {
    "no source": ({"name": "a"}, "source is missing"),
    "a threshold": (
        {"name": "a", "source": "", "questions": [{"id": "q", "text": "?", "threshold": 2}]},
        "questions.0.threshold is out of range",
    ),
    "a threshold that would be another": (
        {"name": "a", "source": "", "questions": [{"id": "q", "text": "?", "threshold": 0}]},
        "questions.0.threshold is out of range",
    ),
    "a question's key": (
        {"name": "a", "source": "", "questions": [{"id": "q", "text": "?", "treshold": 0.1}]},
        "unknown key 'treshold' in questions.0",
    ),
    "no list": ({"name": "a", "source": "", "questions": {}}, "questions is {}, which is not a list"),
    "no name": ({"name": "", "source": ""}, "a camera needs a name"),
    "half a name": ({"name": "\ud800", "source": ""}, "name is not text"),
}


@pytest.mark.parametrize("what", WRONG)
async def test_a_camera_that_cannot_be_is_told_why(tmp_path, what):
    body, sentence = WRONG[what]
    async with serving(tmp_path, cameras=0) as served, Client(served.url) as client:
        status, reply = await client("POST", "/v1/cameras", body)
        assert status == 400
        assert sentence in reply["error"]
        assert not served.world.cameras


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/v1/cameras/discover", {"network": "10.0.0.0/30", "password": 48151623}, "password is not text"),
        ("/v1/cameras/discover", {"network": "10.0.0.0/30", "password": ["48151623"]}, "password is not text"),
        ("/v1/cameras/discover", {"network": {"password": "48151623"}}, "network is not text"),
        ("/v1/cameras", {"name": "a", "source": 48151623}, "source is not text"),
        ("/v1/cameras/test", {"name": "a", "source": {"url": "rtsp://a:48151623@h"}}, "source is not text"),
        ("/v1/session", {"token": 48151623}, "token is not text"),
    ],
)
async def test_a_secret_of_the_wrong_type_is_not_repeated(tmp_path, caplog, path, body, sentence):
    caplog.set_level(0)
    async with serving(tmp_path, cameras=0) as served, Client(served.url) as client:
        status, reply = await client("POST", path, body)
    assert (status, reply["error"]) == (400, sentence)
    assert "48151623" not in caplog.text


async def test_a_controller_that_is_away(tmp_path):
    async with serving(tmp_path, cameras=1) as served, Client(served.url) as client:
        assert await client("GET", "/readyz") == (200, {"status": "ok"})
        served.world.trouble = "the controller is restarting"
        for path in ("/v1/cameras", "/v1/cameras/cam-000", "/v1/replicas", "/v1/memory/cam-000"):
            status, body = await client("GET", path)
            assert (status, body["error"]) == (503, "the controller is restarting")
        served.gateway._live.seen_s = -math.inf
        served.gateway._live.trouble = served.world.trouble
        assert await client("GET", "/readyz") == (503, {"error": "the controller is restarting"})
        assert await client("GET", "/healthz") == (200, {"status": "ok"})


async def test_replicas_and_the_fleet(tmp_path):
    async with serving(tmp_path, cameras=40) as served, Client(served.url) as client:
        await until_async(lambda: served.gateway._live.cameras)
        _, body = await client("GET", "/v1/replicas")
        assert [(replica["name"], replica["draining"]) for replica in body["replicas"]] == [
            ("replica-0", False),
            ("replica-1", False),
        ]
        assert (await client("POST", "/v1/replicas/replica-1/drain", {}))[1]["draining"] is True
        assert served.world.drained == {"replica-1"}
        assert (await client("POST", "/v1/replicas/replica-1/drain", {"undo": True}))[1]["draining"] is False
        assert (await client("POST", "/v1/replicas/none/drain", {}))[0] == 404
        _, fleet = await client("GET", "/v1/fleet")
        assert fleet["cameras"] == 40
        assert sum(fleet["states"].values()) == sum(fleet["rungs"].values()) == 40
        assert fleet["trouble"] == ""
        assert len(fleet["replicas"]) == 2


def test_a_fleet_is_added_up():
    cameras = [
        CameraStatus(f"c{number}", state="running", latency_s=number, windows_per_s=0.5, windows_done=2, tokens_full=3)
        for number in range(1, 101)
    ]
    cameras += [CameraStatus("off", state="error", latency_s=1000.0, rung="fewer", expected_lag_s=7.0)]
    body = summary(cameras)
    assert body["states"] == {"running": 100, "error": 1}
    assert body["rungs"] == {"full": 100, "fewer": 1}
    assert body["lag"] == {"cameras": 100, "median_s": 50, "p95_s": 95, "highest_s": 100, "expected_highest_s": 7.0}
    assert (body["windows_per_s"], body["windows"]["done"], body["tokens"]["full"]) == (50.0, 200, 300)
    assert summary([])["lag"]["p95_s"] == 0.0


async def test_scores_and_rungs_of_late(tmp_path):
    async with serving(tmp_path, cameras=2) as served, Client(served.url) as client:
        for window in range(130):
            served.gateway._hub.publish([make_answer("cam-000", "person", window / 1000, window)])
        async with asyncio.timeout(30):
            while True:
                _, body = await client("GET", "/v1/cameras/cam-000/history")
                rows = body["scores"].get("person", [])
                if len(rows) == 120 and rows[-1][1] == 0.129 and body["rungs"]:
                    break
        assert [row[1] for row in rows] == [window / 1000 for window in range(10, 130)]
        assert all(earlier[0] <= later[0] for earlier, later in pairwise(rows))
        assert [rung[1:] for rung in body["rungs"]] == [["pruned", "replica-0 has more work than it can do in time"]]
        assert (await client("GET", "/v1/cameras/cam-001/history"))[1]["scores"] == {}


async def test_incidents_from_their_beginning_to_a_mute(tmp_path):
    async with serving(tmp_path, cameras=2) as served, Client(served.url) as client:
        for window in (1, 2):
            served.publish([make_answer("cam-000", "person", 0.9, window)])
        _, body = await client("GET", "/v1/incidents?open=1&camera=cam-000&since_s=5.5&limit=10")
        (incident,) = body["incidents"]
        assert (incident["camera"], incident["subject"], incident["ended_s"]) == ("cam-000", "person", None)
        path = f"/v1/incidents/{incident['id']}"
        _, detail = await client("GET", path)
        assert [event["kind"] for event in detail["events"]] == ["new"]
        assert detail["events"][0]["incident"]["id"] == incident["id"]
        # Alerting's own record, over whichever wire.
        [recorded] = (await served.alerts.incident(incident["id"])).events
        told = {key: detail["incident"][key] for key in ("events", "announced_s", "told_s")}
        assert told == {"events": 1, "announced_s": recorded.at_s, "told_s": recorded.at_s}
        timeline = (await client("GET", "/v1/cameras/cam-000/timeline?since_s=5"))[1]
        assert timeline["bin_s"] == 60
        assert sum(row[3] for row in timeline["scores"]["person"]) == 2
        assert timeline["scores"]["person"][0][1] == pytest.approx(0.9, abs=0.002)
        said = (await client("POST", f"{path}/review", {"verdict": "confirmed", "by": "Kim"}))[1]
        assert (said["verdict"], said["reviewed_by"]) == ("confirmed", "Kim")
        assert len((await client("GET", "/v1/incidents?verdict=confirmed"))[1]["incidents"]) == 1
        status, refused = await client("GET", "/v1/incidents?verdict=perhaps")
        assert (status, "must be confirmed, rejected, unreviewed" in refused["error"]) == (400, True)
        assert (await client("POST", f"{path}/acknowledge", {"by": "Kim"}))[1]["acknowledged_by"] == "Kim"
        _, body = await client(
            "POST", "/v1/mutes", {"camera": "cam-000", "subject": "person", "for_s": 60, "by": "Kim"}
        )
        assert [(mute["camera"], mute["by"]) for mute in body["mutes"]] == [("cam-000", "Kim")]
        assert (await client("GET", "/v1/mutes"))[1] == body
        for _ in range(2):
            unmuted = await client("DELETE", "/v1/mutes?camera=cam-000&subject=person")
            assert unmuted == (200, {"mutes": []}), "once more is no error"
        # Clients of OpenAI and scrapers add what they like.
        for path in ("/v1/models?api-version=1", "/metrics?format=text"):
            async with client.open("GET", path) as reply:
                assert reply.status == 200, path
        # Named wrongly, no mute is ended: one without names is that of all cameras.
        await client("POST", "/v1/mutes", {"for_s": 60})
        assert (await client("DELETE", "/v1/mutes?name=cam-000"))[0] == 400
        assert len((await client("GET", "/v1/mutes"))[1]["mutes"]) == 1
        assert (await client("GET", "/v1/outbox?dead=5"))[1]["sinks"] == {}
        assert (await client("GET", "/v1/incidents?camera=cam-001"))[1] == {"incidents": []}
        for path, sentence in {
            "/v1/incidents?open=yes": "open is 'yes'; it must be 0 or 1",
            "/v1/incidents?since_s=-1": "since_s is '-1'; it must be a number that is not negative",
            "/v1/incidents?limit=nan": "limit is 'nan'",
            # Else all incidents look like those of one camera.
            "/v1/incidents?cameras=cam-001": "unknown parameter; there are: camera, subject, open,",
            "/v1/cameras?limit=5": "unknown parameter; there are: none",
        }.items():
            status, reply = await client("GET", path)
            assert (status, sentence in reply["error"]) == (400, True), path
        assert (await client("GET", "/v1/incidents/none"))[0] == 404


async def test_whoever_has_a_token_acknowledges_in_its_name(tmp_path):
    async with serving(tmp_path, cameras=1, tokens=True) as served, Client(served.url, served.secrets["ask"]) as client:
        for window in (1, 2):
            served.publish([make_answer("cam-000", "person", 0.9, window)])
        (incident,) = await served.alerts.incidents()
        _, body = await client("POST", f"/v1/incidents/{incident.id}/acknowledge", {"by": "somebody else"})
        assert body["acknowledged_by"] == "ask-token"


def test_what_is_no_number_is_none():
    assert jsonable({"a": math.inf, "b": (1, math.nan), "c": CameraStatus("x").last_answers, "d": b"Man"}) == {
        "a": None,
        "b": [1, None],
        "c": [],
        # The example of RFC 4648.
        "d": "TWFu",
    }
    with pytest.raises(TypeError, match="dataclass"):
        jsonable(object())


async def test_a_list_that_was_added_in_part_can_be_sent_again(tmp_path):
    """The browser left, or the controller did not answer, in the midst of it."""
    lines = [f"listed-{number},rtsp://u:hunter2horse@10.0.0.{number}/s,Is the gate open?" for number in range(3)]

    async def send(client, *lines):
        text = "\n".join(["name,source,question", *lines])
        _, told = await client("POST", "/v1/cameras/import", json={"text": text, "apply": True})
        return [(each["added"], each["error"]) for each in told["cameras"]]

    async with serving(tmp_path, cameras=1) as served, Client(served.url) as client:
        assert await send(client, *lines[:2]) == [(True, "")] * 2
        assert await send(client, *lines) == [(True, "")] * 3
        # Another camera of that name is not replaced, nor is one whose password is another.
        assert await send(client, lines[0].replace("gate", "door")) == [
            (False, "there is a camera 'listed-0' already, with other settings")
        ]
        [(added, error)] = await send(client, lines[0].replace("hunter2horse", "hunter3horse"))
        assert not added
        assert "there is a camera 'listed-0' already" in error


async def test_a_list_that_takes_long_to_read_holds_up_nobody_else(tmp_path, monkeypatch):
    """The loop stands still for as long as the list is read: 5000 cameras in YAML take ten seconds."""
    held_s = []

    def read(text):
        time.sleep(0.5)
        return parse_camera_list(text)

    async def tick():
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(0.01)
            held_s.append(time.monotonic() - began_s)

    monkeypatch.setattr(cameras, "parse_camera_list", read)
    async with serving(tmp_path, cameras=0) as served, Client(served.url) as client:
        ticking = asyncio.create_task(tick())
        status, _ = await client("POST", "/v1/cameras/import", {"text": "name,source\ngate,demo://gate"})
        ticking.cancel()
    assert status == 200
    assert len(held_s) > 10
    assert max(held_s) < 0.4
