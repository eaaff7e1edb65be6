"""Incidents over HTTP, live: who sees to one, what became of its clip, and what is told to those it is not for."""

import json

import pytest
from gateway_parts import make_answer, serving
from http_parts import Client
from waiting import until_async


async def begin(served, *cameras):
    """An incident at each, by camera."""
    for window in (1, 2):
        served.publish([make_answer(camera, "person", 0.9, window) for camera in cameras])
    await served.alerts._flush()
    return {incident.camera: incident.id for incident in served.alerts.open_incidents()}


async def incident_events(reply, count):
    """The next ``count`` events of incidents in a stream."""
    found, kind = [], b""
    async for line in reply.content:
        if line.startswith(b"event: "):
            kind = line.split()[1]
        elif kind == b"incident" and line.startswith(b"data: "):
            found.append(json.loads(line[6:]))
            if len(found) == count:
                return found
    return found


async def test_a_browser_is_told_who_sees_to_it_and_that_its_clip_is_there(tmp_path):
    async with serving(tmp_path, cameras=1) as served, Client(served.url) as client:
        await until_async(lambda: served.alerts._feed._subscriptions)
        async with client.open("GET", "/v1/events") as reply:
            incident = (await begin(served, "cam-000"))["cam-000"]
            await client("POST", f"/v1/incidents/{incident}/acknowledge", {"by": "Kim"})
            await served.alerts.set_clip_state(incident, "part", "the clip is incomplete: it began late")
            new, seen_to, clip = await incident_events(reply, 3)
    assert (new["event"], new["cause"], new["incident"]["clip"]) == ("new", "", "waiting")
    assert (seen_to["event"], seen_to["cause"]) == ("update", "acknowledged")
    assert seen_to["incident"]["acknowledged_by"] == "Kim"
    assert (clip["event"], clip["cause"], clip["key"]) == ("update", "clip", f"{incident}-clip")
    assert (clip["incident"]["clip"], clip["incident"]["acknowledged_by"]) == ("part", "Kim")


ABOUT_ONE = (
    ("GET", ""),
    ("GET", "/snapshot.jpg"),
    ("HEAD", "/snapshot.jpg"),
    ("GET", "/clip.mp4"),
    ("GET", "/clip.mp4?part=end"),
    ("HEAD", "/clip.mp4"),
    ("POST", "/acknowledge"),
    ("POST", "/review"),
)


async def answer_of(client, method, incident, what, **headers):
    """All that comes back, but for what differs between two calls of the same."""
    body = {"by": "me"} if method == "POST" else None
    if what == "/review":
        body = {"verdict": "confirmed"}
    async with client.open(method, f"/v1/incidents/{incident}{what}", json=body, headers=headers) as reply:
        kept = {name: value for name, value in reply.headers.items() if name.lower() not in ("date", "x-request-id")}
        return reply.status, kept, (await reply.read()).replace(incident.encode(), b"ID")


async def test_an_incident_that_a_token_is_not_for_is_answered_as_one_that_never_was(tmp_path):
    """Byte for byte, with and without a file of it; and one's own is there, so that this is not all there is."""
    async with serving(tmp_path, cameras=2, tokens=True, scopes=["cam-000"]) as served:
        incidents = await begin(served, "cam-000", "cam-001")
        async with Client(served.url, served.secrets["ask"]) as client:
            for method, what in ABOUT_ONE:
                for headers in ({}, {"Range": "bytes=0-9"}):
                    theirs, nobodys, own = [
                        await answer_of(client, method, incident, what, **headers)
                        for incident in (incidents["cam-001"], "0" * 16, incidents["cam-000"])
                    ]
                    assert theirs == nobodys, (method, what)
                    assert theirs[0] == 404
                    assert own != theirs
                    assert own[0] == (404 if "end" in what else 206 if headers and "." in what else 200), (method, what)
        assert {each.camera: each.acknowledged_by for each in served.alerts.open_incidents()} == {
            "cam-000": "ask-token",
            "cam-001": "",
        }


@pytest.mark.parametrize("what", ["/snapshot.jpg", "/clip.mp4"])
async def test_footage_of_which_nobody_says_whose_it_is_is_for_those_who_may_see_all(tmp_path, monkeypatch, what):
    monkeypatch.setattr("gallery_parts.CAMERA", "another-bin")
    async with serving(tmp_path, cameras=1, tokens=True, scopes=["cam-000"]) as served:
        incident = (await begin(served, "cam-000"))["cam-000"]
        async with Client(served.url, served.secrets["view"]) as client:
            assert (await answer_of(client, "GET", incident, what))[0] == 404
